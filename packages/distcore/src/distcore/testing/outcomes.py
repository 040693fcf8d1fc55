"""What became of a function that ran on several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class DeadlineError(AssertionError):
    """The ranks did not end in time.

    The message holds the stack of each rank that was busy and says what became of the others; it
    is chained to the first exception of those, which is often the cause.
    """

    @classmethod
    def of(
        cls, deadline_s: float, stacks: Mapping[int, str], ended: Sequence[Outcome[Any]]
    ) -> Self:
        """Return the error for ranks that were busy after `deadline_s`, by rank their stacks."""
        size = len(stacks) + len(ended)
        lines = [f"ranks {sorted(stacks)} of {size} were busy after {deadline_s:g} s"]
        lines += [f"rank {rank}:\n{text}" for rank, text in stacks.items()]
        lines += [told(outcome) for outcome in ended]
        error = cls("\n".join(lines))
        error.__cause__ = next((o.exception for o in ended if o.exception is not None), None)
        return error


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What one rank returned or raised, and after how many seconds."""

    rank: int
    seconds: float
    value: T | None = None
    exception: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Outcomes(Sequence[Outcome[T]]):
    """The outcomes of all ranks, by rank."""

    by_rank: tuple[Outcome[T], ...]

    @overload
    def __getitem__(self, index: int) -> Outcome[T]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Outcome[T], ...]: ...
    def __getitem__(self, index: int | slice) -> Outcome[T] | tuple[Outcome[T], ...]:
        return self.by_rank[index]

    def __len__(self) -> int:
        return len(self.by_rank)

    def __iter__(self) -> Iterator[Outcome[T]]:
        return iter(self.by_rank)

    @property
    def exceptions(self) -> tuple[BaseException | None, ...]:
        """What each rank raised, None for a rank that returned."""
        return tuple(outcome.exception for outcome in self)

    def values(self) -> tuple[T, ...]:
        """Return what each rank returned; raise an exception group where any rank raised."""
        raised = [error for error in self.exceptions if error is not None]
        if raised:
            ranks = [outcome.rank for outcome in self if outcome.exception is not None]
            raise BaseExceptionGroup(f"ranks {ranks} of {len(self)} raised", raised)
        # A rank that did not raise has returned its value, which may well be None.
        return tuple(outcome.value for outcome in self)  # type: ignore[misc]

    def raised(self, kind: type[E], *, within_s: float | None = None) -> tuple[E, ...]:
        """Return what each rank raised, once every rank raised a `kind` within `within_s`.

        Raises AssertionError that says for each rank what happened instead.
        """
        found = [outcome.exception for outcome in self if isinstance(outcome.exception, kind)]
        late = within_s is not None and any(outcome.seconds > within_s for outcome in self)
        if len(found) != len(self) or late:
            limit = "" if within_s is None else f" within {within_s:g} s"
            lines = "\n".join(f"  {told(outcome)}" for outcome in self)
            wrong = next((e for e in self.exceptions if e and not isinstance(e, kind)), None)
            raise AssertionError(
                f"expected every rank to raise {kind.__name__}{limit}:\n{lines}"
            ) from wrong
        return tuple(found)


def told(outcome: Outcome[T]) -> str:
    """Return what became of a rank, as one line."""
    if outcome.exception is None:
        what = f"returned {outcome.value!r}"
    else:
        what = f"raised {type(outcome.exception).__name__}: {outcome.exception}"
    return f"rank {outcome.rank} {what} after {outcome.seconds:.2f} s"
