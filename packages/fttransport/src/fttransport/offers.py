"""Offers: which sources serve a step, and what each of them says that it has."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from fttransport.clock import Clock
from fttransport.errors import (
    AuthError,
    IntegrityError,
    NotServing,
    SourceLost,
    StepMismatch,
    TransportError,
)
from fttransport.http.client import Connection
from fttransport.manifest import MAX_MANIFEST_NBYTES
from fttransport.security import Security

_RETRY_S = 0.02


@dataclass(frozen=True, slots=True)
class Offer:
    """What one source has: its addresses, the content id and text of its manifest.

    `connection` is open; whoever holds the offer closes it.
    """

    addresses: tuple[str, ...]
    content_id: str
    text: bytes
    connection: Connection


class Offers:
    """The offers of the sources for one step, asked all at once."""

    def __init__(
        self,
        sources: Sequence[Sequence[str]],
        step: int,
        *,
        security: Security,
        clock: Clock,
        reader: str,
    ) -> None:
        self._step = step
        self._security = security
        self._clock = clock
        self._reader = reader
        self._answers: queue.Queue[tuple[str, Offer | TransportError]] = queue.Queue()
        self.failures: dict[str, TransportError] = {}
        self._num_sources = len(sources)
        self._over = threading.Event()
        # In threads also where it is one: to look up a name may take longer than the deadline.
        for addresses in sources:
            name = f"fttransport-ask-{addresses[0]}"
            threading.Thread(
                target=self._ask, args=(tuple(addresses),), name=name, daemon=True
            ).start()

    def gather(self) -> list[Offer]:
        """The offers of all sources, in the order of their answers; `failures` has the others.

        Once one source has answered, the others have as long again as a silent source has.
        Raises the most telling error where none has an offer.
        """
        found: list[Offer] = []
        until: float | None = None
        for _ in range(self._num_sources):
            try:
                end = self._clock.deadline if until is None else until
                left = end - time.monotonic()
                name, answer = self._answers.get(timeout=max(0.001, left))
            except queue.Empty:
                break
            if isinstance(answer, Offer):
                found.append(answer)
                until = until or time.monotonic() + self._clock.stall_s
            else:
                self.failures[name] = answer
        self._over.set()
        if not found:
            self._raise()
        return found

    def _raise(self) -> NoReturn:
        if not self.failures:
            self._clock.left_s()
            raise SourceLost("no source has answered")
        raise min(self.failures.values(), key=_how_telling)

    def _ask(self, addresses: tuple[str, ...]) -> None:
        try:
            answer: Offer | TransportError = self._offer(addresses)
        except TransportError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - what a source answers costs that source only
            answer = IntegrityError(f"{addresses[0]} answered what is not understood: {error!r}")
        if self._over.is_set() and isinstance(answer, Offer):
            answer.connection.close()
            return
        self._answers.put((addresses[0], answer))

    def _offer(self, addresses: tuple[str, ...]) -> Offer:
        """Ask a source until it serves the step.

        Each question is short beside the silence after which the source would count as lost.
        """
        connection = Connection(
            addresses, security=self._security, clock=self._clock, reader=self._reader
        )
        try:
            while not self._over.is_set():
                wait_s = min(self._clock.stall_s / 2, self._left_s())
                prefer = ("Prefer", f"wait={wait_s:.3f}")
                head = connection.ask(f"{self._step}/manifest", [prefer])
                if head.status == 200:
                    return self._read(connection, addresses, head.nbytes, head.headers)
                error = connection.error_of(head)
                if head.status != 503:
                    raise error
                self._wait_again(error)
            raise NotServing(f"{addresses[0]} was not needed")
        except TransportError:
            connection.close()
            raise

    def _left_s(self) -> float:
        """The time left, less what an answer needs to arrive."""
        return max(0.0, self._clock.deadline - time.monotonic() - 2 * _RETRY_S)

    def _wait_again(self, error: TransportError) -> None:
        left = self._clock.deadline - time.monotonic()
        if left <= 3 * _RETRY_S:
            raise NotServing(f"timed out: {error.text}")
        time.sleep(_RETRY_S)

    def _read(
        self,
        connection: Connection,
        addresses: tuple[str, ...],
        nbytes: int,
        headers: dict[bytes, bytes],
    ) -> Offer:
        if nbytes > MAX_MANIFEST_NBYTES:
            raise IntegrityError(f"{addresses[0]} announces a description of {nbytes} bytes")
        tag = headers.get(b"etag", b"").decode("ascii", "replace").strip('"')
        return Offer(addresses, tag, connection.read(nbytes), connection)


def _how_telling(error: TransportError) -> int:
    """Errors that say most of what to do come first."""
    order = (AuthError, StepMismatch, IntegrityError, NotServing, SourceLost)
    return next((i for i, kind in enumerate(order) if isinstance(error, kind)), len(order))


def alike(offers: Sequence[Offer]) -> tuple[list[Offer], list[Offer]]:
    """The offers with the content that most have (the first, where two tie), and the others."""
    contents = [offer.content_id for offer in offers]
    best = max(contents, key=contents.count)
    return (
        [offer for offer in offers if offer.content_id == best],
        [offer for offer in offers if offer.content_id != best],
    )
