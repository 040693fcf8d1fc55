"""What healing over loopback costs: fttransport, torchft's HTTP transport and a bare socket.

Each round runs all ways in turn, with the source in a process of its own; the best round counts.
Seconds are those of `send_checkpoint` and the receive together. In place, the receiver's own
tensors are filled (by torchft's receive plus a copy); fresh, new ones are made. The floor is one
socket that fills memory that is there and warm, and copies nothing; the fresh floor fills new
memory. CPU seconds are the receiver's. Extra memory is the highest resident size of the receiver
above what it had before. torchft is left out where it is not installed.

The large state is 4 tensors of `--mib` MiB together (1024 unless said otherwise), the
small one 4096 tensors of 4 KiB.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from fttransport import HTTPTransport, join_metadata

LIMIT = timedelta(seconds=60)
MIB = 1 << 20
GIB = 1 << 30
State = dict[str, torch.Tensor]
Receive = Callable[[list[str]], object]

PEERS_IN_PLACE = 2.0
FLOOR_FRESH = 0.8
PEERS_SMALL = 12.0
CPU_S_PER_GIB_AT_MOST = 0.5
EXTRA_MIB_AT_MOST = 64.0
ONE_OVER_TWO_SOURCES = 1.0


@dataclass(frozen=True)
class Kind:
    """A state: so many tensors of so many bytes each."""

    count: int
    nbytes: int

    @property
    def total(self) -> int:
        return self.count * self.nbytes

    def __str__(self) -> str:
        size = f"{self.nbytes // MIB} MiB" if self.nbytes >= MIB else f"{self.nbytes // 1024} KiB"
        return f"{self.count} x {size}"

    def state(self) -> State:
        numel = self.nbytes // 4
        return {f"w{i}": torch.full((numel,), float(i)) for i in range(self.count)}


@dataclass(frozen=True)
class Figure:
    """Seconds of one way, and CPU seconds of its receiver."""

    seconds: float
    cpu_s: float


def serve(way: str, kind: Kind) -> None:
    """The source: sends once per line of its input, and prints where and in how many seconds."""
    state = kind.state()
    if way == "floor":
        serve_floor(state)
        return
    transport = transport_of(way)
    for _ in sys.stdin:
        begin = time.perf_counter()
        transport.send_checkpoint([], 1, state, LIMIT)
        print(json.dumps([transport.metadata(), time.perf_counter() - begin]), flush=True)
    transport.shutdown()


def serve_floor(state: State) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    for _ in sys.stdin:
        print(json.dumps([str(listener.getsockname()[1]), 0.0]), flush=True)
        connection, _ = listener.accept()
        with connection:
            for tensor in state.values():
                connection.sendall(bytes_of(tensor))
    listener.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]


def transport_of(way: str, **options: Any) -> Any:
    if way == "torchft":
        module = importlib.import_module("torchft.checkpointing.http_transport")
        return module.HTTPTransport(LIMIT, 0)
    return HTTPTransport(LIMIT, 0, **options)


def receivers(own: State) -> dict[str, Receive]:
    """For each way what receives once from sources."""
    fresh, in_place = transport_of("ours"), transport_of("ours", state_dict=lambda: own)

    def fill(metadata: list[str], tensors: State) -> None:
        with socket.create_connection(("127.0.0.1", int(metadata[0]))) as connection:
            for tensor in tensors.values():
                view = bytes_of(tensor)
                while len(view):
                    view = view[connection.recv_into(view) :]

    def copied(metadata: list[str]) -> None:
        found = peer.recv_checkpoint(0, metadata[0], 1, LIMIT)
        for key, tensor in own.items():
            tensor.copy_(found[key])

    ways: dict[str, Receive] = {
        "floor": lambda found: fill(found, own),
        "fresh floor": lambda found: fill(found, {k: torch.empty_like(t) for k, t in own.items()}),
        "in place": lambda found: in_place.recv_checkpoint(0, join_metadata(found), 1, LIMIT),
        "two sources": lambda found: in_place.recv_checkpoint(0, join_metadata(found), 1, LIMIT),
        "fresh": lambda found: fresh.recv_checkpoint(0, join_metadata(found), 1, LIMIT),
    }
    if importlib.util.find_spec("torchft") is not None:
        peer = transport_of("torchft")
        ways["torchft in place"] = copied
        ways["torchft fresh"] = lambda found: peer.recv_checkpoint(0, found[0], 1, LIMIT)
    return ways


class Source:
    """A source in a process of its own."""

    def __init__(self, way: str, kind: Kind) -> None:
        command = [sys.executable, __file__, "--serve", way, str(kind.count), str(kind.nbytes)]
        pipe = subprocess.PIPE
        # torchft prints a line for each request.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def send(self) -> tuple[str, float]:
        """Stage the state; where it is, and how long that took."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the source has no pipes")
        self._process.stdin.write("send\n")
        self._process.stdin.flush()
        metadata, seconds = json.loads(self._process.stdout.readline())
        return str(metadata), float(seconds)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class Round:
    """The ways of healing one kind of state, and their sources."""

    def __init__(self, kind: Kind) -> None:
        own = {key: torch.zeros_like(tensor) for key, tensor in kind.state().items()}
        self.ways = receivers(own)
        names = {way: self._name_of(way) for way in self.ways}
        alone = {name: Source(name, kind) for name in sorted(set(names.values()))}
        self._sources = {way: [alone[name]] for way, name in names.items()}
        self._second = Source("ours", kind)
        self._sources["two sources"].append(self._second)

    @staticmethod
    def _name_of(way: str) -> str:
        return next((name for name in ("floor", "torchft") if name in way), "ours")

    def once(self, way: str) -> Figure:
        """Send and receive once."""
        sent = [source.send() for source in self._sources[way]]
        cpu, begin = time.process_time(), time.perf_counter()
        self.ways[way]([metadata for metadata, _ in sent])
        seconds = time.perf_counter() - begin + sent[0][1]
        return Figure(seconds, time.process_time() - cpu)

    def extra_nbytes(self, way: str) -> int:
        """How far the receiver's resident memory rises during a receive."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = status_nbytes("VmRSS")
        self.once(way)
        return status_nbytes("VmHWM") - before

    def close(self) -> None:
        """End all sources."""
        for source in {id(s): s for group in self._sources.values() for s in group}.values():
            source.close()


def status_nbytes(field: str) -> int:
    """A size from what the system says of this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the system does not tell {field}")
    return int(found[1]) * 1024


def measure(kind: Kind, repeats: int) -> tuple[dict[str, Figure], dict[str, int]]:
    """The best round of each way, and the extra memory of ours."""
    heals = Round(kind)
    best: dict[str, Figure] = {}
    try:
        for _ in range(repeats):
            for way in heals.ways:
                figure = heals.once(way)
                best[way] = min(best.get(way, figure), figure, key=lambda one: one.seconds)
        extra = {way: heals.extra_nbytes(way) for way in ("in place", "two sources", "fresh")}
    finally:
        heals.close()
    return best, extra


def over(name: str, found: dict[str, Figure], slow: str, fast: str, **more: Any) -> dict[str, Any]:
    """A row: how many times as long `slow` takes as `fast`."""
    if slow not in found:
        return {"name": name, "skipped": "torchft is not installed", **more}
    value = round(found[slow].seconds / found[fast].seconds, 2)
    return {"name": name, "value": value, "cpu_s": round(found[fast].cpu_s, 4), **more}


def large_rows(
    kind: Kind, found: dict[str, Figure], extra: dict[str, int]
) -> list[dict[str, object]]:
    per_gib = round(found["in place"].cpu_s * GIB / kind.total, 3)
    mib = round(extra["in place"] / MIB, 1)
    return [
        over(
            f"{kind} in place: torchft's time over ours",
            found,
            "torchft in place",
            "in place",
            target=PEERS_IN_PLACE,
        ),
        over(f"{kind} fresh: torchft's time over ours", found, "torchft fresh", "fresh"),
        over(
            f"{kind} fresh: a bare socket's time over ours",
            found,
            "floor",
            "fresh",
            target=FLOOR_FRESH,
        ),
        over(f"{kind} fresh: the same into new memory", found, "fresh floor", "fresh"),
        over(f"{kind} in place: a bare socket's time over ours", found, "floor", "in place"),
        over(
            f"{kind} in place: one source's time over that of two",
            found,
            "in place",
            "two sources",
            target=ONE_OVER_TWO_SOURCES,
        ),
        {
            "name": f"{kind} in place: the receiver's CPU",
            "value": per_gib,
            "unit": "s/GiB",
            "target": CPU_S_PER_GIB_AT_MOST,
            "at_most": True,
        },
        {
            "name": f"{kind} in place: extra memory",
            "value": mib,
            "unit": "MiB",
            "target": EXTRA_MIB_AT_MOST,
            "at_most": True,
            "peak_nbytes": extra["in place"],
        },
    ]


def small_rows(kind: Kind, found: dict[str, Figure]) -> list[dict[str, object]]:
    return [
        over(
            f"{kind} {way}: torchft's time over ours",
            found,
            f"torchft {way}",
            way,
            target=PEERS_SMALL,
        )
        for way in ("in place", "fresh")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", nargs=3, metavar=("WAY", "COUNT", "NBYTES"))
    parser.add_argument("--only", choices=["large", "small"])
    parser.add_argument("--mib", type=int, default=1024, help="of the large state")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.serve:
        way, count, nbytes = chosen.serve
        serve(way, Kind(int(count), int(nbytes)))
        return
    kinds = {"large": Kind(4, chosen.mib * MIB // 4), "small": Kind(4096, 4096)}
    for name, kind in kinds.items():
        if chosen.only in (None, name):
            found, extra = measure(kind, chosen.repeats)
            rows = large_rows(kind, found, extra) if name == "large" else small_rows(kind, found)
            seconds = {way: round(figure.seconds, 4) for way, figure in found.items()}
            cpu = {way: round(figure.cpu_s, 4) for way, figure in found.items()}
            load = round(os.getloadavg()[0], 1)
            told = {"state": str(kind), "load": load, "seconds": seconds, "cpu_s": cpu}
            print(json.dumps({**told, "extra_nbytes": extra, "rows": rows}, indent=1), flush=True)


if __name__ == "__main__":
    main()
