"""Turn: one labelled call of this rank, from its number to its end.

A turn goes through at most three exchanges, in this order: every rank shows a header of 64 bytes;
payloads of known sizes move; every rank shows a header again, with what it made of them. What
fails on a rank is in its header, so no rank waits for a payload that will not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

import torch

from distcore.caller import Caller, caller_in
from distcore.v1.channel import Channel, Message
from distcore.v1.errors import (
    ChannelError,
    ChannelTimeout,
    DisagreementError,
    PeerError,
)
from distcore.v1.header import Call, Header, digest16
from distcore.v1.runtime.agree import failure_text, meet

T = TypeVar("T")
Text: TypeAlias = str | Callable[[], str]


class Turn:
    """A labelled call under way. Made by `take_turn`, ended by the end of its block.

    `known` is the exception, if any, of which every rank of the group knows.
    """

    def __init__(
        self, caller: Caller, channel: Channel, call: Call, label: str, timeout_s: float | None
    ) -> None:
        self.channel = channel
        self.call = call
        self.label = label
        self.number = caller.calls
        self.known: BaseException | None = None
        self._caller = caller
        self._timeout_s = timeout_s
        self._aside = False

    def aside(self, exchanges: Callable[[], T]) -> T:
        """Run several exchanges on the caller's thread as one job, which saves the ways there."""
        if self._aside:
            return exchanges()
        self._aside = True  # for good, should this rank leave while the thread is in there
        found = self._caller.wait(exchanges, self.channel, self.label)
        self._aside = False
        return found

    def meet(
        self, text: Text, *, value: bytes = bytes(16), source: int = 0, extra: int = 0
    ) -> tuple[Header, ...]:
        """Show a header and return those of all ranks by index, if they are all equal.

        `extra` may differ. `text`, or what it returns, is what the others are shown of this rank
        where they are not.
        """
        return self._meet(self._header(value=value, source=source, extra=extra), text, None)

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this rank failed, and raise what every rank raises.

        An interrupt is raised as it is, once it is told.
        """
        try:
            self._meet(self._header(failed=True), failure_text(error), error)
        except (PeerError, DisagreementError, ChannelError):
            if isinstance(error, Exception):
                raise
        self.known = error
        raise error

    def attempt(self, fn: Callable[[], T], *, all_alike: bool = False) -> T:
        """Run something local; where it raises, `fail`.

        Where all ranks fail alike if one does, there is nothing to tell.
        """
        try:
            return fn()
        except BaseException as error:
            failed = error
            if all_alike and isinstance(error, Exception):
                self.known = error
                raise
        self.fail(failed)
        raise failed

    def move(self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]) -> None:
        """Send and receive one buffer for each peer named; return when all have arrived."""
        outgoing = [Message(peer, (buffer,)) for peer, buffer in sends.items()]
        incoming = [Message(peer, (buffer,)) for peer, buffer in receives.items()]
        timeout_s = self._timeout_s

        def start_and_wait() -> None:
            self.channel.start(outgoing, incoming, timeout_s=timeout_s).wait()

        self.aside(start_and_wait)

    def _header(
        self,
        *,
        failed: bool = False,
        value: bytes = bytes(16),
        source: int = 0,
        extra: int = 0,
    ) -> Header:
        label = digest16(self.label)
        return Header(self.call, failed, label, value, source, extra, count=self.number)

    def _meet(self, header: Header, text: Text, cause: BaseException | None) -> tuple[Header, ...]:
        def shown() -> str:
            told = text if isinstance(text, str) else text()
            return told if header.failed else f"call {self.number}: {told}"

        def exchange() -> tuple[Header, ...]:
            return meet(
                self.label, header, shown, self.channel, timeout_s=self._timeout_s, cause=cause
            )

        try:
            return self.aside(exchange)
        except BaseException as error:
            if error is cause or isinstance(error, PeerError | DisagreementError):
                self.known = error
            raise


@contextmanager
def take_turn(
    call: Call, label: str, group: object, *, timeout_s: float | None = None
) -> Iterator[Turn]:
    """Begin this rank's next labelled call in `group`, and see to what is raised in it.

    Raises at once where the board of the world has told of a failure, or an earlier call broke
    the carrier. A ChannelError names the call and says where every rank was last.
    """
    caller, channel = caller_in(group)
    board = caller.board
    if board is not None and board.failure is not None:
        raise board.failure.error(label)
    if caller.broken is not None:
        raise ChannelError(f"{label!r}: no call is possible any more: {caller.broken}")
    caller.calls += 1
    if board is not None:
        of_ranks = "" if board.size == channel.size else f" of ranks {list(channel.ranks)}"
        board.place(f"{label!r} (call {caller.calls}{of_ranks})")
    turn = Turn(caller, channel, call, label, timeout_s)
    try:
        yield turn
    except ChannelError as error:
        where = f"; {board.places(channel.ranks)}" if board is not None else ""
        kind = ChannelTimeout if isinstance(error, ChannelTimeout) else ChannelError
        text = f"{label!r} (call {turn.number}): {error}{where}"
        raise kind(text, peer=error.peer, usable=error.usable) from error
    except BaseException as error:
        if error is not turn.known:  # the peers may be in the middle of the call
            caller.give_up(label, error)
        elif board is not None and board.size == channel.size:
            board.share(error)
        raise
