"""Client: one connection to a source, whose answers go straight into the receiver's memory."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from socket import IPPROTO_TCP, SHUT_RDWR, TCP_NODELAY, create_connection, socket
from typing import Final
from urllib.parse import urlsplit

import h11

from fttransport.clock import Clock
from fttransport.errors import (
    AuthError,
    IntegrityError,
    NotServing,
    SourceLost,
    StepMismatch,
    TransportError,
)
from fttransport.http.server import READER_HEADER
from fttransport.http.wire import receive_all
from fttransport.security import Security

# What is read with a head and belongs to the body has to be copied.
_HEAD_NBYTES: Final = 4096
_TEXT_NBYTES: Final = 4096
_MAX_RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an answer; its body is still to be read."""

    status: int
    reason: str
    headers: dict[bytes, bytes]
    nbytes: int

    @property
    def retry_s(self) -> float:
        """After how many seconds to ask again; 0 where the answer does not say."""
        said = self.headers.get(b"retry-after", b"")
        return min(float(said), _MAX_RETRY_S) if said.isdigit() else 0.0


class Connection:
    """A connection to one source, by the first of its addresses that answers.

    Not for several threads, but for `cut`, which ends it from any.
    """

    def __init__(
        self, addresses: Sequence[str], *, security: Security, clock: Clock, reader: str
    ) -> None:
        self._security = security
        self._clock = clock
        self._reader = reader
        self._early = b""
        self._left = 0
        self.name, self._sock = self._connect(addresses)

    def ask(self, path: str, headers: Iterable[tuple[str, str]] = ()) -> Head:
        """Send a GET for `path` below the source's address; give the head of the answer."""
        parts = urlsplit(self.name)
        request = h11.Request(
            method="GET",
            target=f"{parts.path}{path}",
            headers=[
                ("Host", parts.netloc),
                (READER_HEADER, self._reader),
                *self._security.header(),
                *headers,
            ],
        )
        grammar = h11.Connection(h11.CLIENT)
        with _errors_of(self.name, self._clock):
            self._sock.settimeout(self._clock.wait_s())
            self._sock.sendall(grammar.send(request) + grammar.send(h11.EndOfMessage()))
            return self._head(grammar)

    def read_into(self, parts: Sequence[memoryview], on_bytes: Callable[[int], None]) -> None:
        """Fill buffers with the next bytes of the answer's body."""
        nbytes = sum(len(part) for part in parts)
        if nbytes > self._left:
            raise IntegrityError(f"{self.name} announced fewer bytes than were asked for")
        self._left -= nbytes
        rest = self._take_early(parts, on_bytes)

        def arrived(got: int) -> None:
            on_bytes(got)
            if self._clock.left_s() < self._clock.stall_s:
                self._sock.settimeout(self._clock.wait_s())

        with _errors_of(self.name, self._clock):
            receive_all(self._sock, rest, arrived)

    def read(self, nbytes: int) -> bytes:
        """The next `nbytes` of the answer's body."""
        found = bytearray(nbytes)
        self.read_into([memoryview(found)], lambda got: None)
        return bytes(found)

    def error_of(self, head: Head) -> TransportError:
        """What a refusal means, in the words of the source."""
        text = self.read(min(head.nbytes, _TEXT_NBYTES)).decode("ascii", "replace")
        if head.status == 400:
            return StepMismatch(text)
        said = f"{self.name}: {text}"
        if head.status in (401, 403):
            return AuthError(said)
        if head.status in (409, 503):
            return NotServing(said, head.status)
        if head.status == 412:
            return IntegrityError(said)
        return SourceLost(f"{self.name} answered {head.status} {text}")

    def cut(self) -> None:
        """End the connection under whoever reads from it."""
        try:
            socket.shutdown(self._sock, SHUT_RDWR)
        except OSError:
            # It has ended already, which is what is wanted.
            return

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._sock.close()

    def _connect(self, addresses: Sequence[str]) -> tuple[str, socket]:
        failures = []
        kind: type[SourceLost] = SourceLost
        cause: BaseException | None = None
        for address in addresses:
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port or 0
            try:
                with _errors_of(address, self._clock):
                    sock = create_connection((host, port), timeout=self._clock.wait_s())
                    sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
                    return address, self._secured(sock, parts.scheme, host)
            except SourceLost as error:
                failures.append(error.text)
                kind, cause = type(error), error.__cause__
        raise kind("; ".join(failures)) from cause

    def _secured(self, sock: socket, scheme: str, host: str) -> socket:
        if scheme == "http":
            if self._security.tls is None:
                return sock
            sock.close()
            raise AuthError("this side asks for TLS, and the source's address is http")
        context = self._security.client_context or ssl.create_default_context()
        try:
            return context.wrap_socket(sock, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            raise AuthError(f"the source's certificate is not trusted: {error}") from error
        finally:
            if sock.fileno() >= 0 and not isinstance(sock, ssl.SSLSocket):
                sock.close()

    def _head(self, grammar: h11.Connection) -> Head:
        while True:
            event = grammar.next_event()
            if event is h11.NEED_DATA:
                self._sock.settimeout(self._clock.wait_s())
                data = self._sock.recv(_HEAD_NBYTES)
                if not data:
                    raise EOFError("the source closed the connection before it answered")
                grammar.receive_data(data)
            elif isinstance(event, h11.Response):
                break
            elif not isinstance(event, h11.InformationalResponse):
                raise EOFError("the source did not answer")
        headers = dict(event.headers)
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or b"transfer-encoding" in headers:
            raise EOFError("the source does not say how long its answer is")
        self._early = grammar.trailing_data[0]
        self._left = int(length)
        return Head(event.status_code, event.reason.decode("ascii", "replace"), headers, self._left)

    def _take_early(
        self, parts: Sequence[memoryview], on_bytes: Callable[[int], None]
    ) -> list[memoryview]:
        """Put what came along with the head where it belongs; give the buffers still empty."""
        rest = []
        for part in parts:
            n = min(len(part), len(self._early))
            if n:
                part[:n] = self._early[:n]
                self._early = self._early[n:]
                on_bytes(n)
            rest.append(part[n:])
        return rest


class _errors_of:  # noqa: N801 - used as a statement
    """Turns what sockets and the grammar raise into errors of a transfer."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, TransportError):
            return
        if isinstance(error, TimeoutError):
            raise self._clock.silence(self._name) from error
        if isinstance(error, OSError | EOFError | h11.RemoteProtocolError):
            raise SourceLost(f"{self._name}: {error}") from error
