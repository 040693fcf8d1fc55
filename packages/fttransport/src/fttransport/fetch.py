"""Fetch: the stream of a state from several sources at once into memory.

Every chunk is verified as soon as it is there. A source that dies, stalls or sends a wrong byte
is given up, and what it was to bring is fetched from the others.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fttransport.board import Board, Link, Run
from fttransport.clock import Clock
from fttransport.digests import Digester
from fttransport.errors import IntegrityError, SourceLost, TransportError
from fttransport.http.client import Connection
from fttransport.manifest import CHUNK_NBYTES, Manifest
from fttransport.offers import Offer
from fttransport.security import Security

_TICK_S = 0.1
_PAUSE_S = 0.02


class Memory(Protocol):
    """Where the chunks of a stream go."""

    def part(self, start: int, stop: int) -> list[memoryview]:
        """The buffers that make up bytes `start` to `stop`; none is empty."""

    def digest(self, manifest: Manifest, chunk: int, digester: Digester) -> str:
        """The digest of a chunk as it is in memory now."""

    def touch(self, start: int, stop: int) -> None:
        """Have pages given to what is new of bytes `start` to `stop`; no byte changes."""


class Fetch:
    """One state on its way. `done` has a mark for every chunk that has arrived and is right."""

    def __init__(
        self,
        manifest: Manifest,
        memory: Memory,
        content_id: str,
        *,
        digester: Digester | None,
        done: bytearray,
    ) -> None:
        self.content_id = content_id
        self.done = done
        self.written = False
        self._manifest = manifest
        self._memory = memory
        self._digester = digester
        self._security = Security()
        self._clock = Clock(0.0, 0.0)
        self._reader = ""
        self._fetched_nbytes = 0

    def mark_what_is_there(self, candidates: Sequence[int]) -> int:
        """Mark the chunks that are right as they are in memory; give their bytes."""
        if self._digester is None:
            return 0
        reused = 0
        for chunk in candidates:
            if self._is_right(chunk):
                self.done[chunk] = 1
                start, stop = self._manifest.chunk(chunk)
                reused += stop - start
        return reused

    def run(
        self,
        offers: Sequence[Offer],
        *,
        streams: int,
        security: Security,
        clock: Clock,
        reader: str,
        progress: Callable[[int, int], None] | None,
    ) -> tuple[list[Link], int]:
        """Fetch every chunk that is not marked; give the sources and the bytes fetched twice.

        Raises the error of the last source where none is left, DeadlineExceeded where the time
        ran out. Nothing writes into the destination after this has returned.
        """
        self._security, self._clock, self._reader = security, clock, reader
        links = [Link(offer.connection.name, offer.addresses) for offer in offers]
        missing = [chunk for chunk, mark in enumerate(self.done) if not mark]
        self._fetched_nbytes = 0
        per_source = max(1, -(-streams // len(links)))
        board = Board(missing, links, per_source * len(links))
        open_connections = [offer.connection for offer in offers]
        jobs = [
            (link, open_connections[i] if stream == 0 else None)
            for stream in range(per_source)
            for i, link in enumerate(links)
        ]
        self._supervise(board, jobs, progress)
        if board.error is not None:
            raise board.error
        return links, board.retried * self._manifest.chunk_nbytes

    def _supervise(
        self,
        board: Board,
        jobs: list[tuple[Link, Connection | None]],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Run the workers; tell the caller of progress on the caller's own thread."""
        total = sum(self._size(i) for i, mark in enumerate(self.done) if not mark)
        for link, connection in jobs:
            worker = _Worker(self, board, link, connection)
            threading.Thread(target=worker.work, name="fttransport-fetch", daemon=True).start()
        try:
            while not board.wait(min(_TICK_S, self._clock.left_s())):
                if progress is not None:
                    progress(min(self._fetched_nbytes, total), total)
            if progress is not None and board.error is None:
                progress(total, total)
        except BaseException as error:
            board.end(error)
            raise
        finally:
            board.end(None)
            while not board.wait(_TICK_S):
                continue

    def _size(self, chunk: int) -> int:
        start, stop = self._manifest.chunk(chunk)
        return stop - start

    def connect(self, link: Link) -> Connection:
        """Connect to a source anew."""
        return Connection(
            link.addresses, security=self._security, clock=self._clock, reader=self._reader
        )

    def fetch(self, board: Board, run: Run, connection: Connection) -> None:
        """Fetch a run over a connection, verifying and marking chunk by chunk."""
        start, stop = self._manifest.chunk(run.start)[0], self._manifest.chunk(run.stop - 1)[1]
        wanted = [("If-Match", f'"{self.content_id}"'), ("Range", f"bytes={start}-{stop - 1}")]
        head = connection.ask(f"{self._manifest.step}/data", wanted)
        while head.status == 503 and head.retry_s:
            # The source is well, and has as many readers as it lets in.
            error = connection.error_of(head)
            self._pause(board, run, error, head.retry_s)
            head = connection.ask(f"{self._manifest.step}/data", wanted)
        if head.status != 206:
            raise connection.error_of(head)
        if head.nbytes != stop - start:
            raise IntegrityError(f"{connection.name} announced {head.nbytes} bytes for a range")

        def arrived(nbytes: int) -> None:
            run.link.nbytes += nbytes
            self._fetched_nbytes += nbytes

        for chunk in range(run.start, run.stop):
            self.written = True
            start, stop = self._manifest.chunk(chunk)
            # Only so much: a source that lies about its chunks takes no memory by it.
            self._memory.touch(start, min(stop, start + CHUNK_NBYTES))
            connection.read_into(self._memory.part(start, stop), arrived)
            if not self._is_right(chunk):
                text = f"{connection.name} sent wrong bytes in chunk {chunk}"
                raise IntegrityError(text, chunk)
            self.done[chunk] = 1
            board.progress(run)

    def _pause(self, board: Board, run: Run, error: TransportError, retry_s: float) -> None:
        """Wait until a source may be asked again; raises `error` where nobody wants that then."""
        # Those who were told together do not come again together.
        until = time.monotonic() + retry_s * random.uniform(0.02, 1)
        while time.monotonic() < until:
            if not board.still_wants(run):
                raise error
            time.sleep(min(_PAUSE_S, self._clock.left_s()))

    def _is_right(self, chunk: int) -> bool:
        if self._digester is None:
            return True
        found = self._memory.digest(self._manifest, chunk, self._digester)
        return found == self._manifest.digests[chunk]


class _Worker:
    """Fetches runs over one connection, and over a new one after an error."""

    def __init__(
        self, owner: Fetch, board: Board, link: Link, connection: Connection | None
    ) -> None:
        self._owner = owner
        self._board = board
        self._link = link
        self._connection = connection

    def work(self) -> None:
        """Fetch until the board has nothing more for this source."""
        while (run := self._board.take(self._link, self.cut)) is not None:
            try:
                self._fetch(run)
                self._board.finish(run)
            except TransportError as error:
                self._board.finish(run)
                self._board.fail(self._link, error)
                self._close()
            except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
                self._board.finish(run)
                self._board.end(error)
        self._close()

    def cut(self) -> None:
        """End what this worker waits for, from another thread."""
        connection = self._connection
        if connection is not None:
            connection.cut()

    def _fetch(self, run: Run) -> None:
        if self._connection is None:
            self._connection = self._owner.connect(self._link)
        # Asked after the connection can be cut: so none is read from that nobody wants.
        if not self._board.begin(run):
            raise SourceLost(f"{self._link.name} is no longer needed")
        self._owner.fetch(self._board, run, self._connection)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
