"""Replies: what a server answers to which request. Decides, and sends nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from fttransport.address import PATH
from fttransport.errors import StepMismatch
from fttransport.fence import Closed
from fttransport.snapshot import Snapshot

_RANGE: Final = re.compile(rb"bytes=(\d{1,19})-(\d{1,19})?")
_WAIT: Final = re.compile(rb"wait=(\d{1,9}(?:\.\d{1,9})?)")
MAX_RETRY_S: Final = 1


@dataclass(frozen=True, slots=True)
class Reply:
    """A status, headers, and a body of buffers."""

    status: int
    reason: str
    body: tuple[memoryview | bytes, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def nbytes(self) -> int:
        """The length of the body."""
        return sum(len(part) for part in self.body)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for part of a state: `what` is `manifest`, `data` or the number of a part."""

    step: int
    what: str | int


def refusal(status: int, text: str, *headers: tuple[str, str]) -> Reply:
    """A reply that says no, and why, in its reason phrase and its body."""
    kind = ("Content-Type", "text/plain")
    return Reply(status, text, (text.encode("ascii", "replace"),), (kind, *headers))


def read_target(target: str) -> Asked | Reply:
    """What the target of a request asks for."""
    path = target.partition("?")[0]
    step, _, what = path.removeprefix(PATH).partition("/")
    if not path.startswith(PATH) or not what or "/" in what:
        return refusal(404, "there is nothing here")
    if not re.fullmatch(r"-?[0-9]{1,18}", step):
        return refusal(400, "the step must be a number")
    named = {"manifest": "manifest", "metadata": "manifest", "data": "data", "full": "data"}
    if what in named:
        return Asked(int(step), named[what])
    if not re.fullmatch(r"[0-9]{1,9}", what):
        return refusal(404, "there is nothing here")
    return Asked(int(step), int(what))


def wait_of(prefer: bytes | None, limit_s: float) -> float:
    """How long a request lets itself be kept waiting."""
    found = _WAIT.search(prefer or b"")
    return min(limit_s, float(found[1])) if found else limit_s


def closed_reply(closed: Closed) -> Reply:
    """The reply where nobody is let in."""
    if closed.empty:
        return refusal(409, "no checkpoint is staged")
    text = "timed out waiting for a checkpoint to be allowed"
    return refusal(503, text, ("Retry-After", "0"))


def busy_reply() -> Reply:
    """The reply to one reader too many."""
    return refusal(503, "too many readers", ("Retry-After", str(MAX_RETRY_S)))


def step_reply(serving: int, asked: int) -> Reply:
    """The reply to a request for another step."""
    return refusal(400, StepMismatch.of(serving, asked).text)


def state_reply(
    snapshot: Snapshot, asked: Asked, headers: dict[bytes, bytes], num_chunks: int
) -> Reply:
    """The reply that carries part of a state."""
    tag = f'"{snapshot.content_id}"'
    wanted = headers.get(b"if-match")
    if wanted is not None and wanted != tag.encode():
        return refusal(412, "another checkpoint is served by now")
    common: tuple[tuple[str, str], ...] = (("ETag", tag), ("Accept-Ranges", "bytes"))
    if asked.what == "manifest":
        kind = ("Content-Type", "application/json")
        return Reply(200, "OK", (snapshot.text,), (kind, *common))
    common = (("Content-Type", "application/octet-stream"), *common)
    total = snapshot.manifest.nbytes
    start, stop = 0, total
    if isinstance(asked.what, int):
        if asked.what >= num_chunks:
            return refusal(404, f"there are {num_chunks} parts")
        start, stop = total * asked.what // num_chunks, total * (asked.what + 1) // num_chunks
    ranged = headers.get(b"range")
    if ranged is None:
        return Reply(200, "OK", tuple(snapshot.stream.part(start, stop)), common)
    found = _RANGE.fullmatch(ranged)
    first = start + int(found[1]) if found else stop
    last = min(start + int(found[2]) if found and found[2] else stop - 1, stop - 1)
    if first > last:
        return refusal(416, "no such range", ("Content-Range", f"bytes */{stop - start}"))
    shown = f"bytes {first - start}-{last - start}/{stop - start}"
    body = tuple(snapshot.stream.part(first, last + 1))
    return Reply(206, "Partial Content", body, (*common, ("Content-Range", shown)))
