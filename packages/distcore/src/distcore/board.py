"""Board: what the ranks of a world tell each other beside their collectives.

It lies in the store of the process group. A rank that fails where no peer can notice reports it
there, and the peers that wait for it in a labelled call look there while they wait. Each rank
also writes which labelled call it entered last, so that a timeout can say who is where.
"""

from __future__ import annotations

import json
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, TypeVar
from weakref import WeakKeyDictionary

from distcore.v1.errors import PeerError
from distcore.v1.runtime.agree import failure_text
from distcore.world import channel_of, is_in_world, is_initialized, world

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from distcore.world import Group

T = TypeVar("T")

_GROUPS: Final = "distcore/groups/"
_FAILURE: Final = "distcore/failure/"
_PLACE: Final = "distcore/place/"
_TRACEBACK_CHARACTERS: Final = 20_000


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure outside any collective: of which rank, in what, and as what."""

    rank: int
    scope: str
    text: str
    traceback: str

    def error(self, label: str) -> PeerError:
        """The error that a rank raises which waited for the failed one under `label`."""
        told = f"failed in {self.scope!r}, outside any collective: {self.text}"
        error = PeerError(label, {self.rank: told})
        error.add_note(f"What rank {self.rank} raised:\n{self.traceback}")
        return error


class Board:
    """One rank's view of the board in `store`.

    The first failure that any rank reports stays: from then on every rank that looks has it, and
    no labelled call of this world succeeds. A store that is gone has nothing to tell.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.interval_s = min(0.1 + size / 4000, 0.5)  # some ten thousand looks a second, at most
        self.failure: Failure | None = None
        self._store = store
        self._shared: Callable[[], BaseException | None] = lambda: None
        # Not what was said in a former group on the same store; all ranks count them alike.
        number = self._ask(lambda: store.add(f"{_GROUPS}{rank}", 1))
        self._failure_key = f"{_FAILURE}{number}"
        self._place_key = f"{_PLACE}{number}/"

    def report(self, scope: str, error: BaseException) -> None:
        """Tell all ranks that this one failed. Where another has failed before, that one stays."""
        if self.failure is not None:
            return
        lines = "".join(traceback.format_exception(error))
        failure = Failure(self.rank, scope, failure_text(error), lines[-_TRACEBACK_CHARACTERS:])
        text = json.dumps(asdict(failure))
        found = self._ask(lambda: self._store.compare_set(self._failure_key, "", text))
        self.failure = failure if found is None else _failure(found)

    def share(self, error: BaseException) -> None:
        """Note that every rank of the world raises this error, so that nobody need report it."""
        try:
            self._shared = weakref.ref(error)
        except TypeError:  # built-in exceptions cannot be pointed to: this one is told twice
            return

    def is_shared(self, error: BaseException) -> bool:
        """Whether every rank of the world raises this error."""
        return self._shared() is error

    def look(self) -> Failure | None:
        """The first failure that was reported, if there is one. One short question to the store."""
        if self.failure is None:
            text = self._read(self._failure_key)
            self.failure = _failure(text) if text else None
        return self.failure

    def place(self, text: str) -> None:
        """Write where this rank is. Costs microseconds: a TCP store is not waited for."""
        self._ask(lambda: self._store.set(f"{self._place_key}{self.rank}", text))

    def places(self, ranks: Sequence[int]) -> str:
        """Where each of `ranks` was last, as one text."""
        ranks_at: dict[str, list[int]] = {}
        for rank in ranks:
            ranks_at.setdefault(self._place_of(rank), []).append(rank)
        return "; ".join(
            f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))} {place}"
            for place, found in ranks_at.items()
        )

    def _place_of(self, rank: int) -> str:
        text = self._read(f"{self._place_key}{rank}")
        return f"last entered {text.decode()}" if text else "entered no labelled call"

    def _read(self, key: str) -> bytes | None:
        # No key is ever deleted, so asking for one that was there does not wait.
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _ask(self, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except RuntimeError:  # the process that holds the store has ended; gloo notices that too
            return None


@contextmanager
def failure_scope(label: str, group: Group | None = None) -> Iterator[None]:
    """Tell the peers of `group` when the block raises, so that they need not wait for this rank.

    Local: needs no counterpart on other ranks. Peers that wait in a labelled call of the same
    world raise PeerError within two seconds, with this rank, `label` and the reason; later
    labelled calls raise at once, on this rank too. The exception itself passes on unchanged. An
    error that a labelled call raised on every rank of the world is known there and not told
    again. Without a group the block just runs.
    """
    try:
        yield
    except BaseException as error:
        board = board_of(group)
        clean = isinstance(error, SystemExit) and error.code in {None, 0}
        if board is not None and not clean and not board.is_shared(error):
            board.report(label, error)
        raise


def board_of(group: object = None) -> Board | None:
    """The board of the world that `group` belongs to, or None where there is no store for one.

    `group` is a process group, a channel over one, or None for torch's default world. A group
    that the default world does not know is a world of its own.
    """
    channel = channel_of(group) if group is not None or is_initialized() else None
    member: object = getattr(channel, "group", None)
    if is_in_world(member):
        channel, member = channel_of(), world()
    if channel is None or member is None:
        return None
    with _LOCK:
        if member in _BOARDS:
            return _BOARDS[member]
        store = _store_of(member)
        if store is None:
            return None
        board = _BOARDS[member] = Board(store, channel.rank, channel.size)
        return board


def _store_of(group: object) -> Store | None:
    getter = getattr(group, "get_group_store", None)
    try:
        return None if getter is None else getter()
    except RuntimeError:
        return None


def _failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))


# The only state of the module. It hangs on the group object itself and ends with it.
_BOARDS: Final[WeakKeyDictionary[object, Board]] = WeakKeyDictionary()
_LOCK: Final = threading.Lock()
