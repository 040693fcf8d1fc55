"""The short way for ranks of one host: a wrapper around a channel.

Where two ranks share a host, the receiver reads the sender's memory, or both use a shared memory
segment where the host forbids that; all other messages go through the inner channel. Small
messages (offers, rows) go over Unix sockets, which also tell at once when a peer has died.
"""

from __future__ import annotations

import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

from distcore.v1.channel import Channel, Message, Pending
from distcore.v1.errors import ChannelError, ChannelTimeout, DisagreementError, PlanError
from distcore.v1.runtime.addressing import check_peers
from distcore.v1.runtime.cross_memory import OfferingLane, TakingLane
from distcore.v1.runtime.host_handshake import Carrier, Meeting, Mode, Neighbour, meet
from distcore.v1.runtime.host_lane import Lane, Ticket
from distcore.v1.runtime.host_link import FREED, ROW, TAKEN, Frame, HostLink
from distcore.v1.runtime.process_memory import ProcessReader
from distcore.v1.runtime.shared_segment import EmptyingLane, FillingLane

DEFAULT_TIMEOUT_S = 1800.0


def with_same_host(
    channel: Channel,
    *,
    mode: str = "auto",
    timeout_s: float | None = None,
    handshake_timeout_s: float | None = None,
) -> SameHostChannel:
    """Return a channel that goes short ways between ranks of one host. Collective.

    `channel` carries what is left and stays the caller's. The result owns sockets and segments:
    close it, or use it as a context manager; a process that dies leaves nothing behind.
    `mode` is `"auto"`, `"off"`, or for tests `"cross_memory"` or `"segment"`, which raise
    ChannelError on every rank where any pair of ranks cannot do it.
    `timeout_s` (30 minutes unless given) bounds every call that names no timeout of its own, and
    the handshake where `handshake_timeout_s` does not.
    A channel whose buffers lie on another device than the CPU is used as it is.
    """
    if mode not in set(Mode):
        raise PlanError(f"mode: expected one of {', '.join(Mode)}, got {mode!r}")
    wanted = Mode(mode)
    limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    handshake_s = limit_s if handshake_timeout_s is None else handshake_timeout_s
    if channel.size == 1 or channel.device != "cpu":
        meeting = Meeting.of_strangers(channel.size)
    else:
        meeting = meet(channel, wanted, timeout_s=handshake_s)
    result = SameHostChannel(channel, meeting, timeout_s=limit_s)
    if wanted in {Mode.CROSS_MEMORY, Mode.SEGMENT}:
        refused = result.pairs_not_carried_by(Carrier(wanted))
        if refused:
            result.close()
            raise ChannelError(
                f"mode {mode!r}: this host does not allow it between ranks {refused}", usable=True
            )
    return result


@dataclass(slots=True)
class _Peer:
    """What is held towards one rank of this host."""

    link: HostLink
    outgoing: Lane | None
    incoming: Lane | None
    rows: deque[bytes] = field(default_factory=deque)

    def lanes(self) -> list[Lane]:
        return [lane for lane in (self.incoming, self.outgoing) if lane is not None]


class SameHostChannel:
    """A channel over `inner` and what the handshake found; made by `with_same_host`.

    One thread at a time may use it. Bytes between ranks of one host move while a rank is in
    `wait` (or in any other call of this channel). A failed call closes the links, so that the
    peers fail at once instead of waiting; every later call raises ChannelError.
    """

    def __init__(self, inner: Channel, meeting: Meeting, *, timeout_s: float) -> None:
        self._inner = inner
        self._timeout_s = timeout_s
        self._meeting = meeting
        self._positions = {rank: position for position, rank in enumerate(inner.ranks)}
        self._gathers = meeting.all_linked
        self._broken: str | None = None
        self._reader = ProcessReader()
        self._peers = {
            inner.ranks[index]: _Peer(neighbour.link, *self._lanes(index, neighbour))
            for index, neighbour in meeting.neighbours.items()
        }
        self._by_descriptor = {peer.link.fileno(): peer for peer in self._peers.values()}
        self._poller = select.poll()
        for peer in self._peers.values():
            self._poller.register(peer.link, select.POLLIN)
        # What the kernel gave goes back even where nobody closes the channel.
        self._release = weakref.finalize(self, _release, list(self._peers.values()), self._reader)

    @property
    def rank(self) -> int:
        """The global rank of the caller."""
        return self._inner.rank

    @property
    def index(self) -> int:
        """The caller's position in the group."""
        return self._inner.index

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._inner.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group, by index."""
        return self._inner.ranks

    @property
    def device(self) -> str:
        """The device on which buffers must lie."""
        return self._inner.device

    @property
    def inner(self) -> Channel:
        """The channel for what has no short way."""
        return self._inner

    def carrier(self, src: int, dst: int) -> str:
        """Return how messages from rank `src` to rank `dst` travel.

        `"cross_memory"`, `"segment"` or `"inner"`; all ranks return the same.
        """
        return self._meeting.carrier(self._positions[src], self._positions[dst]).value

    def pairs_not_carried_by(self, carrier: Carrier) -> list[tuple[int, int]]:
        """Return the pairs (src, dst) of ranks whose messages travel otherwise."""
        return [
            (src, dst)
            for src in self.ranks
            for dst in self.ranks
            if src != dst and self.carrier(src, dst) != carrier
        ]

    def scatters(self, peer: int) -> bool:
        """Whether buffers to and from `peer` go a short way; the same at both ends."""
        ways = {self.carrier(self.rank, peer), self.carrier(peer, self.rank)}
        return Carrier.INNER not in ways or self._inner.scatters(peer)

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """Return every rank's `row`, by index. All rows must have one length on all ranks."""
        self._refuse_if_broken()
        if not self._gathers:
            return self._inner.all_gather(row, timeout_s=timeout_s)
        deadline = self._deadline(timeout_s)
        try:
            for peer in self._peers.values():
                peer.link.send(ROW, payload=row)
            self._drive(lambda: [r for r, peer in self._peers.items() if not peer.rows], deadline)
        except BaseException as error:
            self.give_up(error)
            raise
        rows = {rank: peer.rows.popleft() for rank, peer in self._peers.items()}
        rows[self.rank] = bytes(row)
        if {len(found) for found in rows.values()} != {len(row)}:
            raise DisagreementError(
                "the length of the rows",
                {rank: f"{len(rows[rank])} bytes" for rank in self.ranks},
                "all ranks must be in the same exchange",
            )
        return tuple(rows[rank] for rank in self.ranks)

    def start(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        timeout_s: float | None = None,
    ) -> Pending:
        """Start messages to and from other ranks, at most one per peer and direction.

        Dropping the result without waiting for it gives the channel up, as a failure would.
        """
        check_peers(self, sends, receives)
        self._refuse_if_broken()
        exchange = _Exchange(self, self._deadline(timeout_s), (*sends, *receives))
        try:
            # Offers leave before anything else is done, so that every peer has work at once.
            for message in sends:
                self._submit(exchange, message, incoming=False)
            for message in receives:
                self._submit(exchange, message, incoming=True)
            exchange.start_rest(self._inner, timeout_s)
        except BaseException as error:
            self.give_up(error)
            raise
        return exchange

    def finish(self, tickets: Sequence[Ticket], deadline: float) -> None:
        """Move bytes until all `tickets` are done and all that was said has left."""
        if all(ticket.done for ticket in tickets) and not self._has_output():
            return
        # Lanes of a broken channel may hold addresses of buffers that are gone.
        self._refuse_if_broken()
        try:
            self._drive(lambda: [ticket.peer for ticket in tickets if not ticket.done], deadline)
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, reason: BaseException | str) -> None:
        """Close the links: buffers under way are no longer touched by us nor read by the peers."""
        if self._broken is None:
            self._broken = str(reason) or type(reason).__name__
        for peer in self._peers.values():
            peer.link.shut()

    def close(self) -> None:
        """Give sockets and segments back; idempotent. The inner channel is left as it is."""
        self._broken = "it is closed"
        self._release()
        self._peers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _submit(self, exchange: _Exchange, message: Message, *, incoming: bool) -> None:
        peer = self._peers.get(message.peer)
        lane = None if peer is None else peer.incoming if incoming else peer.outgoing
        if lane is not None:
            exchange.tickets.append(lane.submit(message.buffers))
        else:
            (exchange.rest_receives if incoming else exchange.rest_sends).append(message)

    def _lanes(self, index: int, neighbour: Neighbour) -> tuple[Lane | None, Lane | None]:
        """Return the outgoing and the incoming lane to the rank at `index`."""
        link, own = neighbour.link, self._inner.index
        outgoing: Lane | None = None
        incoming: Lane | None = None
        sends, receives = self._meeting.carrier(own, index), self._meeting.carrier(index, own)
        if sends == Carrier.CROSS_MEMORY:
            outgoing = OfferingLane(link)
        elif sends == Carrier.SEGMENT and neighbour.outgoing is not None:
            outgoing = FillingLane(link, neighbour.outgoing)
        if receives == Carrier.CROSS_MEMORY:
            incoming = TakingLane(link, partial(self._reader.read, neighbour.pid))
        elif receives == Carrier.SEGMENT and neighbour.incoming is not None:
            incoming = EmptyingLane(link, neighbour.incoming)
        return outgoing, incoming

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise ChannelError(f"the channel broke before: {self._broken}", usable=False)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _drive(self, awaited: Callable[[], Sequence[int]], deadline: float) -> None:
        """Move bytes until no rank is `awaited` and all that we said has left."""
        while True:
            for peer in self._peers.values():
                self._step(peer)
            ranks = awaited()
            if not ranks and not self._has_output():
                return
            for rank in ranks:
                if self._peers[rank].link.lost:
                    raise ChannelError(
                        f"rank {self.rank}: rank {rank} has closed its end or died", peer=rank
                    )
            self._listen(ranks, deadline)

    def _has_output(self) -> bool:
        return any(peer.link.has_output for peer in self._peers.values())

    def _step(self, peer: _Peer) -> None:
        try:
            for lane in peer.lanes():
                lane.step()
        except ChannelError:
            raise
        except OSError as error:
            text = f"rank {self.rank}: rank {peer.link.peer} cannot be read: {error.strerror}"
            raise ChannelError(text, peer=peer.link.peer) from error

    def _listen(self, awaited: Sequence[int], deadline: float) -> None:
        """Sleep until a peer says something, and hand it to the lane that it is for."""
        for peer in self._peers.values():
            if peer.link.has_output:
                self._poller.modify(peer.link, select.POLLIN | select.POLLOUT)
        left_s = deadline - time.monotonic()
        ready = self._poller.poll(left_s * 1000) if left_s > 0 else []
        if not ready:
            peer_rank = awaited[0] if awaited else None
            raise ChannelTimeout(
                f"rank {self.rank}: ranks {sorted(set(awaited))} did not answer in time",
                peer=peer_rank,
            )
        for descriptor, _ in ready:
            peer = self._by_descriptor[descriptor]
            for frame in peer.link.receive():
                self._hand_over(peer, frame)
            peer.link.flush()
            if peer.link.lost:
                self._poller.unregister(descriptor)
            else:
                self._poller.modify(descriptor, select.POLLIN)

    def _hand_over(self, peer: _Peer, frame: Frame) -> None:
        if frame.kind == ROW:
            peer.rows.append(frame.payload)
            return
        lane = peer.outgoing if frame.kind in {TAKEN, FREED} else peer.incoming
        if lane is None:
            raise ChannelError(
                f"rank {peer.link.peer} sent a frame of kind {frame.kind} that nothing waits for",
                peer=peer.link.peer,
            )
        lane.handle(frame)


def _release(peers: Sequence[_Peer], reader: ProcessReader) -> None:
    for peer in peers:
        peer.link.close()
        for lane in peer.lanes():
            lane.close()
    reader.close()


class _Exchange:
    """The messages of one `start`; keeps their buffers until they may be given up."""

    def __init__(
        self, channel: SameHostChannel, deadline: float, messages: tuple[Message, ...]
    ) -> None:
        self.tickets: list[Ticket] = []
        self.rest_sends: list[Message] = []
        self.rest_receives: list[Message] = []
        self._channel = channel
        self._deadline = deadline
        self._messages = messages
        self._rest: Pending | None = None
        self._waited = False

    def start_rest(self, inner: Channel, timeout_s: float | None) -> None:
        """Start the messages that no lane takes."""
        if self.rest_sends or self.rest_receives:
            self._rest = inner.start(self.rest_sends, self.rest_receives, timeout_s=timeout_s)

    def wait(self) -> None:
        """Return when every receive has arrived and every sent buffer may be changed again."""
        if self._waited:
            return
        self._channel.finish(self.tickets, self._deadline)
        if self._rest is not None:
            try:
                self._rest.wait()
            except BaseException as error:
                self._channel.give_up(error)
                raise
        self._waited = True
        self._messages = ()

    def __del__(self) -> None:
        # The buffers may be reused from now on; a peer that reads them late must learn of it.
        if any(not ticket.done for ticket in self.tickets):
            self._channel.give_up("a message was dropped before it was waited for")
