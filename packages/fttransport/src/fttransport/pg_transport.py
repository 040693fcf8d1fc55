"""PGTransport: carries a state between two members of a process group.

Both sides first agree on the step and then on the description of the state; only when the
receiver has found that everything fits does the first byte move. So a mismatch is known to both
and leaves the group as it was. Then the stream goes in buckets of fixed size, two at a time,
straight from and into tensors where a bucket lies within one. At last the receiver says whether
all is right, and both sides know.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor

from distcore.v1 import Pending
from fttransport.codec import Codec
from fttransport.codecs import codec_of
from fttransport.destination import Destination
from fttransport.digests import digester_for
from fttransport.errors import (
    DeadlineExceeded,
    IntegrityError,
    SourceLost,
    StepMismatch,
    TransportError,
)
from fttransport.manifest import MAX_MANIFEST_NBYTES, Manifest, digester_of, read_manifest
from fttransport.pair import Pair
from fttransport.report import Report
from fttransport.snapshot import Snapshot, take_snapshot
from fttransport.stream import Stream
from fttransport.transport import CheckpointTransport

T = TypeVar("T")

logger = logging.getLogger(__name__)

PROTOCOL: Final = 1
BUCKET_NBYTES: Final = 8 << 20
_AHEAD: Final = 2


class PGTransport(CheckpointTransport[T]):
    """Carries a state over a process group, from one member to others.

    Args:
        pg: any object with `send(tensors, rank, tag)` and `recv(tensors, rank, tag)` that return
            something to wait for; looked at only during a transfer.
        timeout: bounds each wait of a transfer that names no timeout of its own; not the whole.
        device: what the group sends from, where that is not the CPU.
        state_dict: called at a receive; its tensors are filled in place (see `Destination`). Other
            tensors come back on the CPU.
        codec, verify: as for `HTTPTransport`.

    `last_report` has the Report of the last transfer.
    """

    def __init__(
        self,
        pg: Any,
        timeout: timedelta,
        device: torch.device,
        state_dict: Callable[[], object] | None = None,
        *,
        codec: str | Codec = "safe",
        verify: str | None = "xxh3",
    ) -> None:
        self._pg = pg
        self._timeout = timeout
        self._device = None if device.type == "cpu" else str(device)
        self._state_dict = state_dict
        self._codec = codec_of(codec)
        self._digester = digester_for(verify, b"")
        self.last_report: Report | None = None

    def metadata(self) -> str:
        """What a receiver needs to find this source: nothing, since the group knows."""
        return "<n/a>"

    def disallow_checkpoint(self) -> None:
        """Do nothing: a state has been sent when `send_checkpoint` returns."""

    def send_checkpoint(
        self,
        dst_ranks: list[int],
        step: int,
        state_dict: T,
        timeout: timedelta | None = None,
    ) -> None:
        """Send a state, or what a callable returns, to each destination; return when all have it.

        `timeout` bounds each wait; None takes the constructor's, and zero leaves it to the group.
        Each destination is served for itself, on the CPU all at once in a thread each: where one
        fails, the others are served all the same, and then its error is raised; `error.failures`
        has the text for each. (On gloo a wait that times out also ends the connections to all
        others, so those have as long as that wait.)
        """
        begin = time.monotonic()
        pairs = [self._pair(rank, timeout) for rank in dst_ranks]
        try:
            staged = take_snapshot(
                state_dict, step, codec=self._codec, digester=self._digester, staging="alias"
            )
        except Exception as error:
            for pair in pairs:
                _tell_quietly(pair, error)
            raise
        errors = _send_to_all(pairs, staged)
        sent = {f"rank {p.peer}": staged.manifest.nbytes for p in pairs if p.peer not in errors}
        self.last_report = Report(
            step,
            staged.content_id,
            staged.manifest.nbytes,
            time.monotonic() - begin,
            per_source=sent,
            failures={f"rank {rank}": error.text for rank, error in errors.items()},
        )
        logger.info("sent %s", self.last_report)
        if errors:
            first = next(iter(errors.values()))
            first.failures = {f"rank {rank}": error.text for rank, error in errors.items()}
            raise first

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta | None = None
    ) -> T:
        """Receive the state of `step` from `src_rank`.

        `timeout` is that of `send_checkpoint`. Raises what the other side raises too: StepMismatch
        and LayoutMismatch, after which nothing was written and the group is as it was,
        CodecRefused, IntegrityError; DeadlineExceeded and SourceLost where the group fails.
        `error.dirty` says whether tensors of `state_dict` were written to.
        """
        begin = time.monotonic()
        pair = self._pair(src_rank, timeout)
        try:
            manifest, content_id = _agree(pair, step)
            target = None if self._state_dict is None else self._state_dict()
            destination = Destination(manifest, self._codec, target)
        except Exception as error:
            if not _is_from_peer(error):
                _tell_quietly(pair, error)
            raise
        try:
            _receive_stream(pair, destination)
            state = _finished(pair, destination)
        except TransportError as error:
            error.dirty = destination.in_place
            raise
        self.last_report = Report(
            step,
            content_id,
            manifest.nbytes,
            time.monotonic() - begin,
            per_source={f"rank {src_rank}": manifest.nbytes},
        )
        logger.info("received %s", self.last_report)
        return cast("T", state)

    def _pair(self, peer: int, timeout: timedelta | None) -> Pair:
        chosen = self._timeout if timeout is None else timeout
        # Zero is a value of its own: no limit but the group's.
        wait_s = chosen.total_seconds() or None
        return Pair(self._pg, peer, device=self._device, wait_s=wait_s)


def _send_to_all(pairs: Sequence[Pair], staged: Snapshot) -> dict[int, TransportError]:
    """Serve every destination; give the error of each that failed, by its rank."""

    def error_of(pair: Pair) -> TransportError | None:
        try:
            _send_to(pair, staged)
        except TransportError as error:
            return error
        return None

    distinct = len({pair.peer for pair in pairs}) == len(pairs)
    if len(pairs) > 1 and distinct and all(pair.device.type == "cpu" for pair in pairs):
        with ThreadPoolExecutor(len(pairs), "fttransport-send") as pool:
            found = list(pool.map(error_of, pairs))
    else:
        # What a device sends is queued on the stream of this thread.
        found = [error_of(pair) for pair in pairs]
    return {pair.peer: error for pair, error in zip(pairs, found, strict=True) if error}


def _send_to(pair: Pair, staged: Snapshot) -> None:
    """One destination from the first frame to the last."""
    pair.tell(
        protocol=PROTOCOL,
        step=staged.manifest.step,
        content_id=staged.content_id,
        nbytes=len(staged.text),
    )
    pair.hear()
    pair.send(torch.frombuffer(bytearray(staged.text), dtype=torch.uint8))
    pair.hear()
    flying: deque[Pending] = deque()
    for start, stop in _buckets(staged.manifest.nbytes):
        buffer = _one(staged.stream, start, stop)
        if buffer is None:
            buffer = torch.cat(staged.stream.tensors(start, stop))
        flying.append(pair.start_send(buffer.to(pair.device)))
        if len(flying) == _AHEAD:
            pair.finish(flying.popleft())
    while flying:
        pair.finish(flying.popleft())
    pair.hear()


def _agree(pair: Pair, step: int) -> tuple[Manifest, str]:
    """The first half of a receive: the step and the description, checked."""
    hello = pair.hear()
    if hello.get("protocol") != PROTOCOL:
        raise IntegrityError(f"rank {pair.peer} speaks protocol {hello.get('protocol')!r}")
    serving, nbytes = hello.get("step"), hello.get("nbytes")
    if serving != step:
        raise StepMismatch.of(int(serving if isinstance(serving, int) else -1), step)
    if type(nbytes) is not int or not 0 < nbytes <= MAX_MANIFEST_NBYTES:
        raise IntegrityError(f"rank {pair.peer} announces a description of {nbytes!r} bytes")
    pair.tell(ok=True)
    text = pair.receive(nbytes).numpy().tobytes()
    content_id = str(hello.get("content_id"))
    return read_manifest(text, content_id, b""), content_id


def _receive_stream(pair: Pair, destination: Destination) -> None:
    """The second half of a receive: the bytes, verified; the source is told what is wrong."""
    pair.tell(ok=True)
    manifest, stream = destination.manifest, destination.stream
    flying: deque[tuple[Pending, Tensor, int, int]] = deque()
    checker = _Checker(destination)

    def settle() -> None:
        pending, buffer, start, stop = flying.popleft()
        pair.finish(pending)
        _put(stream, buffer, start, stop)
        checker.advance(stop)

    for start, stop in _buckets(manifest.nbytes):
        own = _one(stream, start, stop)
        if own is None or pair.device.type != "cpu":
            own = torch.empty(stop - start, dtype=torch.uint8, device=pair.device)
        flying.append((pair.start_receive(own), own, start, stop))
        if len(flying) == _AHEAD:
            settle()
    while flying:
        settle()
    if checker.wrong:
        chunk = checker.wrong[0]
        error = IntegrityError(f"rank {pair.peer} sent wrong bytes in chunk {chunk}", chunk)
        error.name_keys(destination.keys_in(chunk))
        pair.tell_error(error)
        raise error


def _finished(pair: Pair, destination: Destination) -> object:
    """The end of a receive: the state handed over, and only then word that it is there."""
    try:
        state = destination.finish()
    except Exception as error:
        _tell_quietly(pair, error)
        raise
    pair.tell(ok=True)
    return state


class _Checker:
    """Verifies chunks as the stream grows."""

    def __init__(self, destination: Destination) -> None:
        self.wrong: list[int] = []
        self._stream = destination.stream
        self._manifest = destination.manifest
        self._digester = digester_of(destination.manifest, b"")
        self._next = 0

    def advance(self, stop: int) -> None:
        """Verify what lies before `stop` and was not verified yet."""
        if self._digester is None:
            return
        while self._next < self._manifest.num_chunks:
            if self._manifest.chunk(self._next)[1] > stop:
                return
            found = self._stream.digest(self._manifest, self._next, self._digester)
            if found != self._manifest.digests[self._next]:
                self.wrong.append(self._next)
            self._next += 1


def _buckets(nbytes: int) -> list[tuple[int, int]]:
    starts = range(0, nbytes, BUCKET_NBYTES)
    return [(start, min(start + BUCKET_NBYTES, nbytes)) for start in starts]


def _one(stream: Stream, start: int, stop: int) -> Tensor | None:
    """The memory of a bucket, where it lies in one block."""
    parts = stream.tensors(start, stop)
    return parts[0] if len(parts) == 1 else None


def _put(stream: Stream, buffer: Tensor, start: int, stop: int) -> None:
    """Bring a bucket to where its bytes belong, where it did not arrive there."""
    parts = stream.tensors(start, stop)
    if len(parts) == 1 and parts[0].data_ptr() == buffer.data_ptr():
        return
    at = 0
    host = buffer.cpu()
    for part in parts:
        part.copy_(host[at : at + part.numel()])
        at += part.numel()


def _tell_quietly(pair: Pair, error: BaseException) -> None:
    """Tell the peer of an error; that the peer is gone is then no news."""
    try:
        pair.tell_error(error)
    except TransportError as lost:
        logger.warning("rank %d could not be told of %r: %s", pair.peer, error, lost)


def _is_from_peer(error: BaseException) -> bool:
    """Whether the peer knows: it told of the error, or cannot be told of anything."""
    if isinstance(error, DeadlineExceeded | SourceLost):
        return True
    return isinstance(error, TransportError) and "peer" in error.failures
