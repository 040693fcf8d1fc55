"""Many runs with a fault in each, from a seed: healed byte for byte, or a typed error in time.

With `FAULT_RUNS=200` in the environment there are 200 runs, and pytest's `--log-cli-level=INFO`
says how those of each kind ended. A destination that was written to is marked so, and what an error
left behind never keeps the next receive from coming to its end.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fttransport import AuthError, HTTPTransport, Security, TransportError, join_metadata
from fttransport.digests import digester_for
from fttransport.manifest import content_id

Make = Callable[..., HTTPTransport[Any]]
Front = Callable[..., Any]

logger = logging.getLogger(__name__)

KINDS = ("flip", "cut", "stall", "drip", "kill", "token", "replay", "hostile", "garbage", "swap")
RUNS = int(os.environ.get("FAULT_RUNS", "30"))
STEP = 7
LIMIT_S = 6.0
SHORT_S = 1.5
"""The deadline where no sound source is left, so that only an error can be expected."""
LATE_S = 1.5
SENDS = timedelta(seconds=10)
HEALED = "healed"
OTHER = "another state, as described"


class Processes:
    """Sources in processes that can be killed."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("source_processes.py")
        self._nursery = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._line()

    def serve(self, **order: Any) -> tuple[int, str]:
        """A new source: its process id and its metadata."""
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(f"{json.dumps(order)}\n")
        self._nursery.stdin.flush()
        pid, metadata = self._line().split()
        return int(pid), metadata

    def close(self) -> None:
        self._nursery.communicate(timeout=10)

    def _line(self) -> str:
        assert self._nursery.stdout is not None
        return self._nursery.stdout.readline()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Sources in processes of their own."""
    made = Processes()
    yield made
    made.close()


class Impostor:
    """Answers every connection with the same bytes, whatever is asked, and closes it."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}/checkpoint/"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
                with sock:
                    sock.settimeout(2)
                    sock.recv(4096)
                    sock.sendall(self._answer)
            except TimeoutError:
                continue
            except OSError:
                if self._listener.fileno() < 0:
                    return


@dataclass
class Case:
    """One run: what its seed has chosen."""

    kind: str
    choose: random.Random
    http: Make
    front: Front
    stack: ExitStack
    processes: Processes
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        choose = self.choose
        self.first = choose.randrange(1 << 20)
        self.numel = choose.choice([0, 1, 1000, 600_000, choose.randrange(1 << 21), 1 << 21])
        self.sound = choose.choice([0, 0, 1, 2])
        self.mac = choose.choice([None, "key"])
        self.verify = choose.choice(["xxh3", "blake2b"])
        self.in_place = choose.random() < 0.6
        self.delta = choose.random() < 0.3
        self.streams = choose.choice([0, 2, 3])
        self.must_raise: type[TransportError] | None = None

    @property
    def state(self) -> dict[str, Any]:
        """What the sources have."""
        return {"w": torch.arange(self.first, self.first + self.numel), "n": self.first}

    def source(self, **options: Any) -> HTTPTransport[Any]:
        """A source that sends what it should."""
        chosen = {"security": Security(mac=self.mac), "verify": self.verify} | options
        source = self.http(bind="127.0.0.1", **chosen)
        source.send_checkpoint([], STEP, self.state, SENDS)
        return source

    def behind(self, address: str, fault: Any, **options: Any) -> str:
        """The address of a source as it is reached through a fault."""
        front = self.front(address, fault, **options)
        self.stack.enter_context(front)
        return str(front.address)

    def somewhere(self) -> int:
        """A byte of a source's answers: in the first head, the description or the data."""
        nbytes = 8 * self.numel + 600
        return self.choose.choice([self.choose.randrange(600), self.choose.randrange(nbytes)])


def flip(case: Case) -> list[str]:
    """One bit is another."""
    at, bit = case.somewhere(), 1 << case.choose.randrange(8)

    def fault(data: bytes, before: int) -> bytes:
        if not before <= at < before + len(data):
            return data
        spoiled = bytearray(data)
        spoiled[at - before] ^= bit
        return bytes(spoiled)

    return [case.behind(case.source().address(), fault)]


def cut(case: Case) -> list[str]:
    """Every answer after so many bytes in all is missing."""
    at = case.somewhere()

    def fault(data: bytes, before: int) -> bytes | None:
        return data if before + len(data) <= at else data[: max(0, at - before)] or None

    return [case.behind(case.source().address(), fault)]


def stall(case: Case) -> list[str]:
    """From a byte on nothing comes, and the connection stays."""
    at = case.somewhere()

    def fault(data: bytes, before: int) -> bytes | None:
        if before + len(data) <= at:
            return data
        case.ended.wait(10)
        return None

    return [case.behind(case.source().address(), fault)]


def drip(case: Case) -> list[str]:
    """From a byte on, a few bytes at a time."""
    at, piece = case.somewhere(), case.choose.choice([1, 100, 3000])

    def fault(data: bytes, before: int) -> bytes | None:
        if before >= at:
            case.ended.wait(0.02)
        return None if case.ended.is_set() else data

    return [case.behind(case.source().address(), fault, piece=piece)]


def kill(case: Case) -> list[str]:
    """A source's process is killed, after a while or at a byte; two others live."""
    case.sound = 0
    order = {"first": case.first, "numel": case.numel, "step": STEP, "mac": case.mac}
    sources = [case.processes.serve(**order) for _ in range(3)]
    for pid, _ in sources:
        case.stack.callback(_kill, pid)
    (victim, address), *others = sources
    if case.choose.random() < 0.5:
        timer = threading.Timer(case.choose.uniform(0, 0.03), _kill, [victim])
        timer.start()
        case.stack.callback(timer.join)
    else:
        at = case.somewhere()

        def fault(data: bytes, before: int) -> bytes:
            if before <= at < before + len(data):
                _kill(victim)
            return data

        address = case.behind(address, fault)
    return [address, *(metadata for _, metadata in others)]


def token(case: Case) -> list[str]:
    """A source asks for a token that the receiver does not have."""
    made = case.source(security=Security(token="another", mac=case.mac))
    case.must_raise = AuthError
    return [made.address()]


def replay(case: Case) -> list[str]:
    """What was sent for an earlier step is served as this one."""
    old, replaying = case.source(), case.http()
    old.send_checkpoint([], STEP - 1, case.state, SENDS)
    replaying._fence.open(STEP, old._fence.snapshot)
    case.must_raise = TransportError
    return [replaying.address()]


def hostile(case: Case) -> list[str]:
    """A description that is none, under its right id; beside it no source, or most of them."""
    case.sound = case.choose.choice([0, 2])
    source = case.source()
    staged = source._fence.snapshot
    assert staged is not None
    text = spoiled_description(staged.text, case.choose)
    digester = digester_for(case.verify, b"another key" if case.mac else b"")
    source._fence.open(STEP, replace(staged, text=text, content_id=content_id(text, digester)))
    case.must_raise = TransportError if case.mac else None
    return [source.address()]


def garbage(case: Case) -> list[str]:
    """Something else answers."""
    head = b"HTTP/1.1 200 OK\r\n"
    impostor = Impostor(
        case.choose.choice(
            [
                b"",
                b"\0" * 100,
                case.choose.randbytes(3000),
                b"SSH-2.0-OpenSSH_9.6\r\n",
                head + b"\r\n<html>",
                head + b"Content-Length: -5\r\n\r\n",
                head + b"Content-Length: 99999999999999999999\r\n\r\n{",
                head + b'Content-Length: 20\r\nETag: "\xff"\r\n\r\n' + b"{" * 20,
                head + b"Content-Length: 2\r\n\r\n{}",
                head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
                head + b"X: " + b"y" * 100_000,
                b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
                b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
                b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n",
                b"HTTP/1.1 400 \xff\r\nContent-Length: 5\r\n\r\n\xff\xff\xff\xff\xff",
            ]
        )
    )
    case.stack.callback(impostor.close)
    case.must_raise = TransportError
    return [impostor.address]


def swap(case: Case) -> list[str]:
    """The source serves something else before all was read."""
    source, at = case.source(), case.somewhere()

    def fault(data: bytes, before: int) -> bytes:
        if before <= at < before + len(data):
            source.send_checkpoint([], STEP, {"w": torch.zeros(case.numel), "n": 0}, SENDS)
        return data

    return [case.behind(source.address(), fault)]


FAULTS = {name: globals()[name] for name in KINDS}


def spoiled_description(text: bytes, choose: random.Random) -> bytes:
    """A description with one part of it replaced, or cut, or a bit of it another."""
    way = choose.randrange(4)
    if way == 0:
        at = choose.randrange(len(text))
        return text[:at] + bytes([text[at] ^ (1 << choose.randrange(8))]) + text[at + 1 :]
    if way == 1:
        return text[: choose.randrange(len(text))]
    try:
        table = json.loads(text)
    except ValueError:
        return choose.randbytes(len(text))
    places = list(_places(table))
    holder, key = choose.choice(places)
    deep: Any = 1
    for _ in range(choose.choice([90, 120, 500])):
        deep = [deep]
    again = holder[key] * 1000 if isinstance(holder[key], list) else "../../etc/passwd"
    numbers = [-1, 0, 1, 8, 1 << 31, 1 << 61, 1 << 62, 1 << 63, 10**30, 1.5, 1e300]
    holder[key] = choose.choice([*numbers, None, True, "", [], {}, {"x": 5}, deep, again])
    return json.dumps(table).encode()


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in list(keys):
        yield node, key
        yield from _places(node[key])


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run(case: Case) -> str:
    """One run; how it ended."""
    faulty = FAULTS[case.kind](case)
    sources = [*faulty, *(case.source().address() for _ in range(case.sound))]
    case.choose.shuffle(sources)
    own = {"w": torch.full((case.numel,), -1)}
    if case.delta:
        own["w"][: case.numel // 2] = case.state["w"][: case.numel // 2]
    before = own["w"].clone()
    receiver = case.http(
        case.streams,
        security=Security(mac=case.mac),
        state_dict=(lambda: own) if case.in_place else None,
        delta=case.delta,
    )
    heals = bool(case.sound) or case.kind == "kill"
    limit = timedelta(seconds=LIMIT_S if heals else SHORT_S)
    error: TransportError | None = None
    found: Any = None
    begin = time.monotonic()
    try:
        found = receiver.recv_checkpoint(0, join_metadata(sources), STEP, limit)
    except TransportError as caught:
        error = caught
    assert time.monotonic() - begin < limit.total_seconds() + LATE_S
    if error is not None:
        assert not heals, f"a sound source was left: {error!r}"
        assert error.dirty or torch.equal(own["w"], before)
        assert isinstance(error, case.must_raise or TransportError)
        found = receiver.recv_checkpoint(0, case.source().address(), STEP, SENDS)
    assert error is not None or heals or case.must_raise is None
    if not _is_right(case, found):
        assert (case.kind, case.sound, error) == ("hostile", 0, None)
        return OTHER
    assert not case.in_place or not case.numel or found["w"] is own["w"]
    return HEALED if error is None else type(error).__name__


def _is_right(case: Case, found: Any) -> bool:
    state = case.state
    return (
        isinstance(found, dict)
        and set(found) == set(state)
        and found["n"] == state["n"]
        and isinstance(found["w"], torch.Tensor)
        and torch.equal(found["w"], state["w"])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_fault_goes_unnoticed(kind: str, http: Make, proxy: Front, processes: Processes) -> None:
    endings: Counter[str] = Counter()
    for index in range(-(-RUNS // len(KINDS))):
        seed = f"{kind} {index}"
        with ExitStack() as stack:
            case = Case(kind, random.Random(seed), http, proxy, stack, processes)
            stack.callback(case.ended.set)
            try:
                endings[run(case)] += 1
            except BaseException as error:
                error.add_note(f"seed {seed!r}: {vars(case)}")
                raise
    logger.info("%s: %s", kind, dict(endings))
