"""Receive: a state of one step from its sources, in place where wanted, and what to do again.

A receiver keeps what a failed receive has fetched, for the next one of the same content.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from distcore.v1.runtime import is_dtensor
from fttransport.address import split_metadata
from fttransport.board import Link
from fttransport.clock import Clock
from fttransport.codec import Codec, walk
from fttransport.destination import Destination
from fttransport.errors import AuthError, IntegrityError, LayoutMismatch, TransportError
from fttransport.fetch import Fetch, Memory
from fttransport.manifest import Manifest, digester_of, read_manifest
from fttransport.offers import Offer, Offers, alike
from fttransport.relayout import Relayout
from fttransport.report import Report
from fttransport.security import Security
from fttransport.stream import Stream


@dataclass(frozen=True, slots=True)
class Received:
    """A state that has arrived, and the memory that its stream is in where it is there whole."""

    state: object
    report: Report
    manifest: Manifest
    stream: Stream | None


@dataclass(frozen=True, slots=True)
class Choices:
    """How a receiver receives; see `HTTPTransport`."""

    codec: Codec
    security: Security
    state_dict: Callable[[], object] | None
    streams: int
    delta: bool
    progress: Callable[[int, int], None] | None


class Receiver:
    """Receives states, one at a time."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._partial: tuple[Fetch, Destination] | None = None

    def forget(self) -> None:
        """Free what a failed receive has left."""
        self._partial = None

    def receive(self, metadata: str, step: int, clock: Clock) -> Received:
        """Fetch the state of `step` from the sources of `metadata`."""
        begin = time.monotonic()
        clock.left_s()
        reader = uuid.uuid4().hex
        asked = Offers(
            split_metadata(metadata),
            step,
            security=self._choices.security,
            clock=clock,
            reader=reader,
        )
        offers = asked.gather()
        try:
            one = _Receive(self._choices, offers, step, clock, reader)
            one.failures |= {name: str(error) for name, error in asked.failures.items()}
            state, stream = self._state_of(one)
        finally:
            for offer in offers:
                offer.connection.close()
        return Received(state, one.report(time.monotonic() - begin), one.manifest, stream)

    def _state_of(self, one: _Receive) -> tuple[object, Stream | None]:
        state_dict = self._choices.state_dict
        started, self._partial = self._partial, None
        if started is not None and started[0].content_id == one.content_id:
            fetch, destination = started
            one.resume(fetch)
        else:
            target = None if state_dict is None else state_dict()
            try:
                destination = Destination(one.manifest, self._choices.codec, target)
            except LayoutMismatch as error:
                if target is None or not one.has_layouts(target):
                    raise
                return one.relayout(target, error), None
            fetch = one.begin(destination, own_bytes=self._choices.delta and target is not None)
        self._partial = (fetch, destination)
        try:
            one.run(fetch, one.offers)
        except TransportError as error:
            error.dirty = fetch.written and destination.in_place
            if isinstance(error, IntegrityError) and error.chunk is not None:
                error.name_keys(destination.keys_in(error.chunk))
            raise
        self._partial = None
        return destination.finish(), destination.stream


class _Receive:
    """One receive: its offers, and what is told of it afterwards."""

    def __init__(
        self, choices: Choices, offers: list[Offer], step: int, clock: Clock, reader: str
    ) -> None:
        self._choices = choices
        self._step = step
        self._clock = clock
        self._reader = reader
        self._manifests: dict[tuple[str, bytes], Manifest] = {}
        sound, broken = self._sound(offers)
        self.offers, self._others = alike(sound)
        self.content_id = self.offers[0].content_id
        self.manifest = self._manifest_of(self.offers[0])
        self.failures: dict[str, str] = {
            offer.addresses[0]: f"it has content {offer.content_id}, most have {self.content_id}"
            for offer in self._others
        } | {name: str(error) for name, error in broken.items()}
        self._links: list[Link] = []
        self._retried = 0
        self._reused = 0

    def begin(self, destination: Destination, *, own_bytes: bool) -> Fetch:
        """A fetch of everything, or of what differs from the target's own bytes."""
        done = bytearray(self.manifest.num_chunks)
        fetch = self._fetch(self.manifest, destination.stream, self.content_id, done)
        if own_bytes:
            destination.load_own_bytes()
            self._reused = fetch.mark_what_is_there(range(self.manifest.num_chunks))
        return fetch

    def resume(self, fetch: Fetch) -> None:
        """Mark of what an earlier receive has fetched what is still right."""
        kept = [chunk for chunk, mark in enumerate(fetch.done) if mark]
        fetch.done[:] = bytes(len(fetch.done))
        self._reused = fetch.mark_what_is_there(kept)

    def run(self, fetch: Fetch, offers: list[Offer]) -> None:
        """Fetch what is missing."""
        links, retried = fetch.run(
            offers,
            streams=self._choices.streams,
            security=self._choices.security,
            clock=self._clock,
            reader=self._reader,
            progress=self._choices.progress,
        )
        self._links += links
        self._retried += retried
        self.failures |= {ln.name: str(ln.dropped) for ln in links if ln.dropped is not None}

    def has_layouts(self, target: object) -> bool:
        """Whether anything on either side is a DTensor, so that parts may be put together."""
        return any(entry.layout for entry in self.manifest.tensors) or _has_dtensors(target)

    def relayout(self, target: object, mismatch: LayoutMismatch) -> object:
        """Put the target's parts together from those of all source ranks."""
        groups: dict[str, list[Offer]] = {}
        for offer in (*self.offers, *self._others):
            groups.setdefault(offer.content_id, []).append(offer)
        manifests = {key: self._manifest_of(offers[0]) for key, offers in groups.items()}
        try:
            plan = Relayout(list(manifests.values()), self._choices.codec, target)
        except LayoutMismatch as error:
            raise LayoutMismatch(f"{mismatch.text}; and {error.text}") from mismatch
        for key, offers in groups.items():
            rank = plan.rank_of(manifests[key])
            if rank is not None:
                for offer in offers:
                    self.failures.pop(offer.addresses[0], None)
                marks = plan.done_marks(rank)
                self.run(self._fetch(manifests[key], plan.streams[rank], key, marks), offers)
        return plan.finish()

    def report(self, seconds: float) -> Report:
        """What has been done."""
        per_source: dict[str, int] = {}
        for link in self._links:
            per_source[link.name] = per_source.get(link.name, 0) + link.nbytes
        return Report(
            self._step,
            self.content_id,
            self.manifest.nbytes,
            seconds,
            per_source=per_source,
            retried_bytes=self._retried,
            reused_bytes=self._reused,
            failures=self.failures,
        )

    def _sound(self, offers: list[Offer]) -> tuple[list[Offer], dict[str, TransportError]]:
        """The offers whose description can be believed, and what is wrong with the others."""
        sound: list[Offer] = []
        broken: dict[str, TransportError] = {}
        for offer in offers:
            try:
                self._manifest_of(offer)
            except (AuthError, IntegrityError) as error:
                broken[offer.addresses[0]] = error
            else:
                sound.append(offer)
        if not sound:
            raise next(iter(broken.values()))
        return sound, broken

    def _manifest_of(self, offer: Offer) -> Manifest:
        """What a source says of its state; equal descriptions are read once."""
        place = (offer.content_id, bytes(offer.text))
        manifest = self._manifests.get(place)
        if manifest is None:
            manifest = read_manifest(offer.text, offer.content_id, self._choices.security.key)
            if manifest.step != self._step:
                text = f"the source serves step {self._step} and describes {manifest.step}"
                raise IntegrityError(text)
            self._manifests[place] = manifest
        return manifest

    def _fetch(self, manifest: Manifest, memory: Memory, content: str, done: bytearray) -> Fetch:
        digester = digester_of(manifest, self._choices.security.key)
        return Fetch(manifest, memory, content, digester=digester, done=done)


def _has_dtensors(target: object) -> bool:
    return any(is_dtensor(tensor) for _, tensor in walk(target))
