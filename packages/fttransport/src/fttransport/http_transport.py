"""HTTPTransport: serves a state from memory over HTTP, and fetches one from one source or many."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

from fttransport.address import address_of, advertised, listen
from fttransport.clock import Clock
from fttransport.codec import Codec
from fttransport.codecs import codec_of
from fttransport.digests import digester_for
from fttransport.fence import Fence
from fttransport.http.server import Server
from fttransport.manifest import digester_of
from fttransport.receive import Choices, Receiver
from fttransport.report import Report
from fttransport.security import Security
from fttransport.snapshot import Snapshot, Staging, take_snapshot
from fttransport.transport import CheckpointTransport

T = TypeVar("T")

logger = logging.getLogger(__name__)


class HTTPTransport(CheckpointTransport[T]):
    """Carries a state of any size between processes over HTTP.

    Args:
        timeout: how long the source keeps a request waiting for a step to be allowed and gives
            readers to come to their end; as receiver, the longest silence of a source.
        num_chunks: 0 fetches in one stream, N in N parallel ranges, cut by bytes. It is the
            receiver's own choice.
        state_dict: called at a receive; its tensors are filled in place (see `Destination`).
        security: token, TLS and MAC (see `Security`).
        bind, port, interface: where to listen. Without them, on loopback, or, where a token guards
            the state, on all addresses. `interface` (such as `"ib0"`) chooses the address of one.
        advertise: the host, or hosts, best first, under which others reach this one; without it,
            what was bound, or the host's name.
        codec: `"safe"`; `"pickle"` also sends, and opens, what else is in a tree, which runs code
            that comes from the source; or a `Codec` with registered types.
        snapshot: `"alias"` reads CPU tensors where they are, but for small ones, so the state stays
            unchanged until `disallow_checkpoint` has returned; `"copy"` copies them first.
        verify: how chunks are digested, `"xxh3"`, `"blake2b"` or None.
        max_readers: how many requests are answered at once.
        serve_received: after a receive, serve that step to others under the own metadata.
        delta: on a receive in place, fetch only chunks that differ from what is there.
        progress: called on the receiving thread with the bytes done and the bytes to do.

    `last_report` has the Report of the last transfer. Listens from the start, serving nothing.
    """

    def __init__(  # noqa: PLR0913 - users know these names; all but two have defaults
        self,
        timeout: timedelta,
        num_chunks: int,
        *,
        state_dict: Callable[[], object] | None = None,
        security: Security | None = None,
        bind: str | None = None,
        port: int = 0,
        advertise: str | Sequence[str] | None = None,
        interface: str | None = None,
        codec: str | Codec = "safe",
        snapshot: Staging = "alias",
        verify: str | None = "xxh3",
        max_readers: int = 32,
        serve_received: bool = False,
        delta: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._timeout_s = timeout.total_seconds()
        self._security = security or Security()
        self._codec = codec_of(codec)
        self._staging = snapshot
        self._digester = digester_for(verify, self._security.key)
        self._serve_received = serve_received
        self._receiver = Receiver(
            Choices(
                codec=self._codec,
                security=self._security,
                state_dict=state_dict,
                streams=max(1, num_chunks),
                delta=delta,
                progress=progress,
            )
        )
        self.last_report: Report | None = None
        if snapshot not in ("alias", "copy"):
            raise ValueError(f"snapshot: expected 'alias' or 'copy', got {snapshot!r}")
        guarded = self._security.token is not None
        listener = listen(bind, port, interface=interface, guarded=guarded)
        tls = self._security.server_context is not None
        number = listener.getsockname()[1]
        hosts = advertised(listener, advertise)
        self._addresses = [address_of(host, number, tls=tls) for host in hosts]
        self._metadata = ",".join(self._addresses)
        self._fence = Fence()
        self._server = Server(
            listener,
            self._fence,
            security=self._security,
            num_chunks=num_chunks,
            max_readers=max_readers,
            timeout_s=self._timeout_s,
        )

    def address(self) -> str:
        """The address to fetch from, `http://host:port/checkpoint/`; the step is appended."""
        return self._addresses[0]

    def metadata(self) -> str:
        """What a receiver needs to find this source: its addresses. Never changes."""
        return self._metadata

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Stage a state, or what a callable returns, and serve it under `step`.

        Returns once it is staged; whoever asks may fetch it, so `dst_ranks` is not looked at.
        CPU tensors are not copied (`snapshot="alias"`): leave the state as it is until
        `disallow_checkpoint` has returned. CodecRefused names what cannot be sent.
        """
        begin = time.monotonic()
        staged = take_snapshot(
            state_dict, step, codec=self._codec, digester=self._digester, staging=self._staging
        )
        self._fence.open(step, staged)
        seconds = time.monotonic() - begin
        self.last_report = Report(step, staged.content_id, staged.manifest.nbytes, seconds)
        mb = staged.manifest.nbytes / 1e6
        logger.info(
            "serving step %d at %s: %.1f MB, staged in %.3f s", step, self._metadata, mb, seconds
        )

    def allow_checkpoint(self, step: int) -> None:
        """Serve what is staged under `step`."""
        staged = self._fence.snapshot
        if staged is not None and staged.manifest.step != step:
            staged = staged.at_step(step, self._digester)
        self._fence.open(step, staged)

    def disallow_checkpoint(self) -> None:
        """Serve no longer. Once this returns, nobody reads the state, and it may be changed.

        Whoever is reading has the constructor's timeout to come to the end, and is then cut off.
        What was staged is freed. Idempotent, and immediate where nobody reads.
        """
        self._fence.close(self._timeout_s)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Fetch the state of `step`, within `timeout` for everything together.

        `metadata` is that of one source, or of several (`join_metadata`), which are then all
        used; `src_rank` is not looked at. A source that sends nothing for the constructor's
        timeout or a quarter of this one, whichever is less, counts as lost.
        A call after one that failed goes on where that one ended, if the content is the same.

        Raises StepMismatch, NotServing, AuthError, LayoutMismatch, IntegrityError, SourceLost or
        DeadlineExceeded. `error.dirty` then says whether tensors of `state_dict` were written to.
        """
        clock = Clock.of(timeout.total_seconds(), self._timeout_s)
        received = self._receiver.receive(metadata, step, clock)
        self.last_report = received.report
        for source, why in received.report.failures.items():
            logger.warning("did without the source %s: %s", source, why)
        logger.info("received %s", received.report)
        if self._serve_received and received.stream is not None:
            digester = digester_of(received.manifest, self._security.key)
            snapshot = Snapshot.of(received.manifest, received.stream, digester)
            self._fence.open(step, snapshot)
        return cast("T", received.state)

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving, cut readers off and free what is staged; with `wait`, until all ended."""
        self._receiver.forget()
        self._server.close(wait)
