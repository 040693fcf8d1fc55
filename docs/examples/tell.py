"""What a rank tells the process that started it: one line of JSON each, through a pipe."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Any

from figures import Act, Moved


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a rank told, or that was seen of it, at `time` (as of `time.time`)."""

    rank: int
    time: float
    kind: str
    fields: dict[str, Any]


class Teller:
    """Tells of one rank."""

    def __init__(self, rank: int, pipe: int) -> None:
        self.rank = rank
        self._pipe = pipe

    def doing(self, act: str, what: str = "") -> None:
        """From now on this rank does that."""
        self._tell("doing", act=act, what=what)

    def act(self, act: Act) -> None:
        """What was moved, and what holds."""
        moved = [asdict(one) for one in act.moved]
        self._tell("act", act=act.name, moved=moved, verdicts=act.verdicts)

    def progress(self, done: int, of: int) -> None:
        """So many bytes of what is on its way have come."""
        self._tell("progress", done=done, of=of)

    def gauge(self, way: str, nbytes: int, seconds: float) -> None:
        """How fast this rank read, wrote or copied."""
        self._tell("gauge", way=way, nbytes=nbytes, seconds=seconds)

    def floor(self, name: str, seconds: float) -> None:
        """What a step of the story takes at least."""
        self._tell("floor", name=name, seconds=seconds)

    def note(self, text: str) -> None:
        """A text for whoever looks on."""
        self._tell("note", text=text)

    def picture(self, name: str, **fields: object) -> None:
        """Figures for a picture of the report."""
        self._tell("picture", name=name, fields=fields)

    def doomed(self) -> None:
        """This rank may be killed now."""
        self._tell("doomed")

    def _tell(self, kind: str, **fields: object) -> None:
        line = json.dumps({"time": time.time(), "kind": kind, "fields": fields}) + "\n"
        data = memoryview(line.encode())
        while data:
            data = data[os.write(self._pipe, data) :]


def heard(rank: int, line: bytes) -> Event:
    """The event of one line."""
    table = json.loads(line)
    return Event(rank, table["time"], table["kind"], table["fields"])


def act_of(event: Event) -> Act:
    """The act that an event of that kind tells of."""
    fields = event.fields
    moved = [Moved(**one) for one in fields["moved"]]
    return Act(fields["act"], moved, [(text, holds) for text, holds in fields["verdicts"]])
