"""Any order of send, allow, disallow, receive and shutdown, with readers at the same time.

Whatever a reader gets is what was staged for the step that it asked for: a change after
`disallow_checkpoint` has returned never reaches it.
"""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fttransport import HTTPTransport, TransportError

LIMIT = timedelta(seconds=5)
SHORT = timedelta(seconds=0.2)
NUMEL = 1_000_000


def begun(address: str, step: int) -> socket.socket:
    """A connection that has been let in, and has taken only the beginning of its answer."""
    parts = urlsplit(address)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    sock.settimeout(5)
    sock.connect((parts.hostname, parts.port))
    sock.sendall(f"GET {parts.path}{step}/full HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert sock.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
    return sock


def the_rest(sock: socket.socket) -> set[int]:
    """The different words of an answer, as far as it still comes."""
    data = bytearray()
    with sock:
        try:
            while len(data) < 8 * NUMEL and (piece := sock.recv(1 << 20)):
                data += piece
        except ConnectionError:
            pass
    body = data.partition(b"\r\n\r\n")[2]
    whole = len(body) // 8
    return set(torch.frombuffer(body, dtype=torch.int64, count=whole).tolist()) if whole else set()


class Fencing(RuleBasedStateMachine):
    """A source that is used in every order, and what its readers may see."""

    def __init__(self) -> None:
        super().__init__()
        # Without digests, so that a reader would really see a change.
        self.source: HTTPTransport[Any] = HTTPTransport(timedelta(seconds=0.15), 0, verify=None)
        self.receiver: HTTPTransport[Any] = HTTPTransport(timedelta(seconds=2), 2)
        self.pool = ThreadPoolExecutor(3)
        self.w = torch.zeros(NUMEL, dtype=torch.int64)
        self.version = 0
        self.open = False
        self.ended = False
        # What a reader of a step may see; a step is staged with one version only.
        self.staged: dict[int, int] = {}
        self.step = -1
        self.readers: list[tuple[int, Future[Any]]] = []
        # Those that have begun to read and go on much later.
        self.slow: list[tuple[int, socket.socket]] = []

    @precondition(lambda self: not self.open and not self.ended)
    @rule()
    def send(self) -> None:
        """Stage a new version; it stays as it is until the fence is closed."""
        self.version += 1
        self.w.fill_(self.version)
        self.step = self.version
        self.staged[self.step] = self.version
        self.source.send_checkpoint([], self.step, {"w": self.w}, LIMIT)
        self.open = True

    @precondition(lambda self: self.open)
    @rule()
    def send_another_over_it(self) -> None:
        """Stage a new version in place of the one that is served, in other memory."""
        self.version += 1
        self.w = torch.full((NUMEL,), self.version)
        self.step = self.version
        self.staged[self.step] = self.version
        self.source.send_checkpoint([], self.step, {"w": self.w}, LIMIT)

    @precondition(lambda self: self.ended)
    @rule()
    def send_after_the_end(self) -> None:
        """Nothing is served any more, and who tries is told."""
        with pytest.raises(RuntimeError, match="shut down"):
            self.source.send_checkpoint([], 1, {"w": self.w}, LIMIT)
        with pytest.raises(RuntimeError, match="shut down"):
            self.source.allow_checkpoint(1)

    @precondition(lambda self: self.open and len(self.slow) < 3)
    @rule()
    def begin_to_read(self) -> None:
        """Ask for everything, and take only the beginning of it."""
        sock = begun(self.source.address(), self.step)
        self.slow.append((self.staged[self.step], sock))

    @precondition(lambda self: self.slow)
    @rule()
    def read_on(self) -> None:
        """Read what still comes: all of it is of the version that was asked for."""
        version, sock = self.slow.pop(0)
        assert the_rest(sock) <= {version}

    @precondition(lambda self: self.open)
    @rule()
    def allow_another_step(self) -> None:
        """The same version under a later step."""
        self.step = 1000 + self.step
        self.staged[self.step] = self.version
        self.source.allow_checkpoint(self.step)

    @rule()
    def disallow(self) -> None:
        """Close the fence; from then on the state may be changed, which is done at once."""
        self.source.disallow_checkpoint()
        self.open = False
        self.w.fill_(-1)

    @rule(known=st.booleans())
    def read(self, known: bool) -> None:
        """Start a reader of the current step, or of one that is not there."""
        asked = self.step if known else 999_999

        def receive() -> Any:
            own: HTTPTransport[Any] = HTTPTransport(LIMIT, 2)
            try:
                return own.recv_checkpoint(0, self.source.metadata(), asked, SHORT)
            finally:
                own.shutdown()

        if len(self.readers) < 3:
            self.readers.append((asked, self.pool.submit(receive)))

    @precondition(lambda self: self.open)
    @rule()
    def receive(self) -> None:
        """A receive while the fence is open succeeds."""
        found = self.receiver.recv_checkpoint(0, self.source.metadata(), self.step, LIMIT)
        assert self._values(found) == {self.staged[self.step]}

    @rule()
    def shut_down(self) -> None:
        """The end; may come twice."""
        if len(self.staged) > 2:
            self.source.shutdown()
            self.ended, self.open = True, False

    @invariant()
    def whoever_has_read_has_read_what_was_staged(self) -> None:
        """Look at the readers that have come to their end."""
        for reader in [reader for reader in self.readers if reader[1].done()]:
            self.readers.remove(reader)
            self._look_at(*reader)

    def teardown(self) -> None:
        """Let every reader come to its end, and look at it."""
        for reader in self.readers:
            self._look_at(*reader)
        while self.slow:
            self.read_on()
        self.source.shutdown()
        self.receiver.shutdown()
        self.pool.shutdown()

    def _look_at(self, asked: int, future: Future[Any]) -> None:
        error = future.exception(10)
        if error is None:
            assert self._values(future.result()) == {self.staged[asked]}
        else:
            assert isinstance(error, TransportError)

    def _values(self, found: Any) -> set[int]:
        return {int(found["w"].min()), int(found["w"].max())}


TestFencing = Fencing.TestCase
TestFencing.settings = settings(max_examples=10, stateful_step_count=10, deadline=None)


def test_a_change_never_reaches_a_reader_in_the_middle() -> None:
    """It is cut off before `disallow_checkpoint` returns, and not told more."""
    w = torch.ones(5 * NUMEL, dtype=torch.int64)
    source: HTTPTransport[Any] = HTTPTransport(timedelta(seconds=0.15), 0, verify=None)
    source.send_checkpoint([], 1, {"w": w}, LIMIT)
    sock = begun(source.address(), 1)
    source.disallow_checkpoint()
    w.fill_(2)
    assert the_rest(sock) == {1}
    source.shutdown()
