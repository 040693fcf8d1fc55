"""Chronicle: what was told and seen of a run so far, in the order of time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from figures import Ledger
from tell import Event, act_of

ACTS = {
    "start": "processes start",
    "load": "real weights, each byte read once, and exchanged",
    "save": "two formats, read back by ckptx and by their owners",
    "train": "OwnerMuon, each matrix stepped by one rank",
    "rollout": "weights to a tensor-parallel model, as training goes on",
    "spread": "weights and optimizer state to a mesh of replicas",
    "heal": "a rank is killed; a new one heals from all that live",
    "compare": "one process that was never hurt does the same",
    "shrink": "saved by all ranks, loaded by one less",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One rank does one thing, from `start` to `stop`, in seconds of the run."""

    rank: int
    act: str
    what: str
    start: float
    stop: float

    @property
    def is_waiting(self) -> bool:
        return self.what.startswith("waits")


class Chronicle:
    """A run of `size` ranks.

    `now` has what each rank does at present, `spans` what each did before, `kills` the ranks that
    were killed and when, `pictures` figures by name and rank, `notes` texts.
    """

    def __init__(self, size: int) -> None:
        self.begin = time.time()
        self.size = size
        self.ledger = Ledger()
        self.now = {rank: Span(rank, "start", "starts a process", 0.0, 0.0) for rank in range(size)}
        self.spans: list[Span] = []
        self.kills: list[tuple[int, float]] = []
        self.pictures: dict[str, dict[int, dict[str, Any]]] = {}
        self.notes: list[str] = []
        self.progress: dict[int, tuple[int, int]] = {}

    def add(self, event: Event) -> None:
        """Take in what was told."""
        rank, fields, at = event.rank, event.fields, event.time - self.begin
        match event.kind:
            case "doing":
                self._turn(Span(rank, fields["act"], fields["what"], at, at))
            case "act":
                self.ledger.add(rank, act_of(event))
            case "progress":
                self.progress[rank] = (fields["done"], fields["of"])
            case "gauge":
                self.ledger.gauge(rank, **fields)
            case "floor":
                self.ledger.floors[fields["name"]] = fields["seconds"]
            case "note":
                self.notes.append(fields["text"])
            case "picture":
                self.pictures.setdefault(fields["name"], {})[rank] = fields["fields"]
            case "killed":
                self.kills.append((rank, at))
                self._turn(Span(rank, "start", "was killed; a new process starts", at, at))
            case "ended":
                self._turn(Span(rank, "", "has ended", at, at))

    def elapsed(self) -> float:
        return time.time() - self.begin

    def seconds(self, act: str) -> float:
        """How long at least one rank was in an act."""
        elapsed = self.elapsed()
        running = [replace(span, stop=elapsed) for span in self.now.values()]
        found = [span for span in [*self.spans, *running] if span.act == act]
        seconds = until = 0.0
        for span in sorted(found, key=lambda span: span.start):
            seconds += max(0.0, span.stop - max(until, span.start))
            until = max(until, span.stop)
        return seconds

    def acts(self) -> list[str]:
        """The acts that have begun."""
        seen = {span.act for span in self.spans} | {span.act for span in self.now.values()}
        return [act for act in ACTS if act in seen]

    def is_running(self, act: str) -> bool:
        return any(span.act == act for span in self.now.values())

    def _turn(self, span: Span) -> None:
        before = self.now[span.rank]
        self.spans.append(replace(before, stop=span.start))
        self.now[span.rank] = span
        self.progress.pop(span.rank, None)
