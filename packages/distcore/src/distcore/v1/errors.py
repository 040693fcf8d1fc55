"""The five error types of the house, and how each says what went wrong.

`PlanError` means that your arguments are wrong, `DisagreementError` that the ranks called
differently, `PeerError` that another rank failed, `ChannelError` that the carrier broke and
`ChannelTimeout` that it did not answer in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

SHOWN_PROBLEMS: Final = 20
"""How many problems the text of a PlanError spells out; its `problems` always has all."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with an input.

    `where` names the place (a key, a rank, a field), `kind` is a short machine-readable word
    (`"shape"`, `"dtype"`, `"missing"`, ...), `text` says what was expected and what came.
    """

    where: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class PlanError(ValueError):
    """The arguments do not fit together; `problems` lists everything that is wrong at once."""

    problems: tuple[Problem, ...]

    def __init__(self, problems: Iterable[Problem] | Problem | str) -> None:
        if isinstance(problems, str):
            problems = (Problem("arguments", "invalid", problems),)
            text = problems[0].text
        else:
            problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
            text = "; ".join(str(problem) for problem in problems[:SHOWN_PROBLEMS])
            if len(problems) > SHOWN_PROBLEMS:
                text += f"; and {len(problems) - SHOWN_PROBLEMS} more"
        self.problems = problems
        super().__init__(text)


class DisagreementError(RuntimeError):
    """The ranks came to one point with different values; `values` is rank -> value as text."""

    label: str
    values: Mapping[int, str]
    hint: str

    def __init__(self, label: str, values: Mapping[int, str], hint: str = "") -> None:
        self.label = label
        self.values = dict(values)
        self.hint = hint
        shown = "; ".join(f"rank {rank}: {value}" for rank, value in self.values.items())
        super().__init__(
            f"the ranks disagree on {label!r}: {shown}" + (f" ({hint})" if hint else "")
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.label, self.values, self.hint), self.__dict__


class PeerError(RuntimeError):
    """A rank of the group failed; `failures` is rank -> what it said, as text, never pickled.

    The failing rank raises the same error, chained to its own exception.
    """

    label: str
    failures: Mapping[int, str]

    def __init__(self, label: str, failures: Mapping[int, str]) -> None:
        self.label = label
        self.failures = dict(failures)
        shown = "; ".join(f"rank {rank}: {text}" for rank, text in self.failures.items())
        super().__init__(f"{label!r} failed: {shown}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.label, self.failures), self.__dict__


class ChannelError(OSError):
    """The carrier broke while bytes were on their way.

    `peer` is the global rank at the other end, where one is known; `usable` says whether the
    channel can carry anything after this.
    """

    peer: int | None
    usable: bool

    def __init__(self, text: str, *, peer: int | None = None, usable: bool = False) -> None:
        self.peer = peer
        self.usable = usable
        super().__init__(text)


class ChannelTimeout(ChannelError, TimeoutError):
    """Nothing came from `peer` within the time allowed."""
