"""Server: serves what a fence lets out, a thread per connection.

Blocking sockets, because a call of the system that moves megabytes holds the interpreter's lock
only once, which matters in a process whose main thread trains.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket
from typing import Final

import h11

from fttransport.fence import Closed, Fence, Visitor
from fttransport.http.replies import (
    Asked,
    Reply,
    busy_reply,
    closed_reply,
    read_target,
    refusal,
    state_reply,
    step_reply,
    wait_of,
)
from fttransport.http.wire import send_all
from fttransport.security import Security
from fttransport.snapshot import Snapshot

logger = logging.getLogger(__name__)

READER_HEADER: Final = "X-Reader"
_HEAD_NBYTES: Final = 1 << 14
_HANDSHAKE_S: Final = 10.0
_ACCEPT_AGAIN_S: Final = 0.1


class Server:
    """Accepts connections on `listener` until `close`, and serves what `fence` lets out.

    At most `max_readers` requests are answered with a state's bytes at once; the next is told to
    come again. `timeout_s` bounds how long a request is kept waiting for a step to be allowed,
    how long a send may make no progress, and how long an idle connection is kept.
    """

    def __init__(
        self,
        listener: socket,
        fence: Fence,
        *,
        security: Security,
        num_chunks: int,
        max_readers: int,
        timeout_s: float,
    ) -> None:
        self._listener = listener
        self._fence = fence
        self._security = security
        self._num_chunks = num_chunks
        self._timeout_s = timeout_s
        self._reading = threading.BoundedSemaphore(max_readers)
        self._connected = threading.BoundedSemaphore(8 * max_readers + 64)
        self._thread = threading.Thread(target=self._accept, name="fttransport-accept", daemon=True)
        self._thread.start()

    def close(self, wait: bool) -> None:
        """Accept nobody more and cut everybody off; with `wait`, return when all have ended."""
        self._fence.end()
        try:
            # Closing alone does not wake a thread that waits in accept.
            self._listener.shutdown(2)
        except OSError as error:
            logger.debug("the listener was closed already: %s", error)
        self._listener.close()
        if wait:
            self._thread.join()
            self._fence.join(self._timeout_s)

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._fence.ended:
                    return
                # Such as too many open files: others may be closed meanwhile.
                logger.warning("a connection could not be accepted: %s", error)
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            if not self._connected.acquire(blocking=False):
                sock.close()
                continue
            thread = threading.Thread(
                target=self._converse, args=(sock, peer), name="fttransport-reader", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("a reader could not be served: %s", error)
                self._connected.release()
                sock.close()

    def _converse(self, raw: socket, peer: tuple[object, ...]) -> None:
        """Answer the requests of one connection until it ends."""
        begin = time.monotonic()
        try:
            with self._secured(raw) as sock, self._fence.visit(sock) as visitor:
                connection = h11.Connection(h11.SERVER)
                try:
                    while self._answer_one(connection, visitor):
                        connection.start_next_cycle()
                finally:
                    _log_served(visitor.nbytes, peer, time.monotonic() - begin)
        except (OSError, h11.RemoteProtocolError) as error:
            # A receiver that leaves is no event for the source; its own side knows why.
            logger.debug("a reader has gone: %s", error)
        finally:
            self._connected.release()

    @contextmanager
    def _secured(self, raw: socket) -> Iterator[socket]:
        context = self._security.server_context
        sock = raw
        try:
            raw.settimeout(min(_HANDSHAKE_S, self._timeout_s))
            if context is not None:
                sock = context.wrap_socket(raw, server_side=True)
            sock.settimeout(self._timeout_s)
            yield sock
        finally:
            sock.close()

    def _answer_one(self, connection: h11.Connection, visitor: Visitor) -> bool:
        """Answer one request; False where the connection is over."""
        request = _read_request(connection, visitor.sock)
        if request is None:
            return False
        headers = dict(request.headers)
        if request.method not in (b"GET", b"HEAD"):
            reply = refusal(405, "only GET and HEAD", ("Allow", "GET, HEAD"))
        elif b"content-length" in headers or b"transfer-encoding" in headers:
            reply = refusal(413, "a request has no body here", ("Connection", "close"))
        else:
            target = request.target.decode("ascii", "replace")
            if target == "/healthz":
                reply = Reply(200, "OK", (b"ok\n",), (("Content-Type", "text/plain"),))
            elif not self._security.admits(headers.get(b"authorization")):
                reply = refusal(
                    401, "the token is missing or wrong", ("WWW-Authenticate", "Bearer")
                )
            else:
                asked = read_target(target)
                if isinstance(asked, Asked):
                    return self._serve(connection, visitor, request, asked)
                reply = asked
        return _send(connection, visitor.sock, reply, request.method)

    def _serve(
        self, connection: h11.Connection, visitor: Visitor, request: h11.Request, asked: Asked
    ) -> bool:
        """Answer a request for part of a state, inside the fence."""
        headers = dict(request.headers)
        reader = headers.get(READER_HEADER.lower().encode(), b"").decode("ascii", "replace")
        wait_s = wait_of(headers.get(b"prefer"), self._timeout_s)
        with self._fence.enter(visitor, reader, wait_s, lambda step: step == asked.step) as found:
            if isinstance(found, Closed):
                reply = closed_reply(found)
            elif not isinstance(found, Snapshot):
                reply = step_reply(found, asked.step)
            elif not self._reading.acquire(blocking=False):
                reply = busy_reply()
            else:
                try:
                    reply = state_reply(found, asked, headers, self._num_chunks)
                    goes_on = _send(connection, visitor.sock, reply, request.method)
                    visitor.nbytes += reply.nbytes if request.method == b"GET" else 0
                    return goes_on
                finally:
                    self._reading.release()
        return _send(connection, visitor.sock, reply, request.method)


def _log_served(nbytes: int, peer: tuple[object, ...], seconds: float) -> None:
    """Tell what one connection has brought its reader."""
    if nbytes:
        mb = nbytes / 1e6
        text = "sent %.1f MB to %s port %s in %.3f s, %.0f MB/s"
        logger.info(text, mb, peer[0], peer[1], seconds, mb / max(seconds, 1e-6))


class _Extent:
    """Stands for a body in the grammar, which only asks how long it is."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes


def _read_request(connection: h11.Connection, sock: socket) -> h11.Request | None:
    """The next request, all of which comes within the socket's timeout; None where there is none.

    So that nobody holds a connection by a byte now and then.
    """
    timeout_s = sock.gettimeout() or 0.0
    until = time.monotonic() + timeout_s
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                sock.settimeout(max(0.001, until - time.monotonic()))
                connection.receive_data(sock.recv(_HEAD_NBYTES))
            elif isinstance(event, h11.Request):
                return event
            elif not isinstance(event, h11.EndOfMessage):
                return None
    finally:
        sock.settimeout(timeout_s)


def _send(connection: h11.Connection, sock: socket, reply: Reply, method: bytes) -> bool:
    """Send a reply; True where another request may follow on the connection."""
    headers = [*reply.headers, ("Content-Length", str(reply.nbytes))]
    head = connection.send(
        h11.Response(status_code=reply.status, reason=reply.reason.encode(), headers=headers)
    )
    parts: list[memoryview | bytes] = [head]
    if method != b"HEAD" and reply.nbytes:
        # The grammar counts the bytes; they go to the socket as they are.
        extent: bytes = _Extent(reply.nbytes)  # type: ignore[assignment]
        connection.send_with_data_passthrough(h11.Data(data=extent))
        parts.extend(reply.body)
    send_all(sock, parts)
    connection.send(h11.EndOfMessage())
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA or event is h11.PAUSED:
            break
        if isinstance(event, h11.ConnectionClosed):
            return False
    return connection.our_state is h11.DONE and connection.their_state is h11.DONE
