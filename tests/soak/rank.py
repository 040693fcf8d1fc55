"""One rank of the soak: does what lines of JSON on its input say, and answers each with a line.

    {"do": "join", "store": PATH, "rank": 1, "size": 3}    meet the others in a new group
    {"do": "round", "step": 7, "folder": PATH}             train, save, load, sync, heal one rank
    {"do": "offer", "step": 7}                             serve the state of a step
    {"do": "heal", "step": 7, "metadata": TEXT}            receive it from those who serve it
    {"do": "leave"}                                        give the group up
    {"do": "gauges"}                                       say what this process holds
    {"do": "end"}

The state of a step is known beforehand, so every rank checks every element that it gets.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptx
from distcore.v1 import ChannelError, DisagreementError, PeerError
from distcore.v1.runtime import channel_over
from fttransport import HTTPTransport, Security, TransportError, join_metadata
from reshard import Resharder

SHAPES = {"embed": (1021, 256), "up": (512, 257), "down": (257, 512), "bias": (257,)}
LIMIT = timedelta(seconds=20)
TYPED = (ChannelError, DisagreementError, PeerError, TransportError, ckptx.CheckpointingException)
State = dict[str, torch.Tensor]


def state_of(step: int) -> State:
    """The weights as they are after so many steps."""
    ramps = {key: torch.arange(torch.Size(shape).numel()) for key, shape in SHAPES.items()}
    return {key: (ramp % 1009 + step).float().reshape(SHAPES[key]) for key, ramp in ramps.items()}


def check(found: State, step: int, what: str) -> None:
    for key, wanted in state_of(step).items():
        if not torch.equal(found[key], wanted):
            raise ValueError(f"{what} of step {step}: {key} is wrong")


def gauges() -> dict[str, int]:
    """What this process holds now, without what waits for the collector."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "python_threads": threading.active_count(),
    }


class Rank:
    """A rank: its weights, its transport, and the group that it is in now."""

    def __init__(self) -> None:
        self.weights = state_of(0)
        self.healed = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
        security = Security(token="soak")
        self.source: HTTPTransport[object] = HTTPTransport(
            LIMIT, 0, security=security, bind="127.0.0.1"
        )
        self.receiver: HTTPTransport[object] = HTTPTransport(
            LIMIT, 2, state_dict=lambda: self.healed, security=security, bind="127.0.0.1"
        )

    def join(self, store: str, rank: int, size: int) -> dict[str, object]:
        """Meet the other ranks in a group of their own."""
        found = FileStore(store, size)
        dist.init_process_group("gloo", store=found, rank=rank, world_size=size, timeout=LIMIT)
        self.mesh = DeviceMesh("cpu", list(range(size)))
        return {}

    def leave(self) -> dict[str, object]:
        """Give the group up; it may be broken already."""
        vars(self).pop("mesh", None)
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # the connections close with the last reference to the group
        return {}

    def gauges(self) -> dict[str, object]:
        """What this process holds."""
        return {"gauges": gauges()}

    def offer(self, step: int) -> dict[str, object]:
        """Serve the weights of a step, which are made now."""
        self.source.disallow_checkpoint()
        for key, tensor in state_of(step).items():
            self.weights[key].copy_(tensor)
        self.source.send_checkpoint([], step, self.weights, LIMIT)
        return {"metadata": self.source.metadata()}

    def heal(self, step: int, metadata: str) -> dict[str, object]:
        """Receive the weights of a step."""
        for tensor in self.healed.values():
            tensor.zero_()
        self.receiver.recv_checkpoint(0, metadata, step, LIMIT)
        check(self.healed, step, "heal")
        return {}

    def round(self, step: int, folder: str) -> dict[str, object]:
        """All of it once, for one step."""
        metadata = str(self.offer(step)["metadata"])
        rows, columns, fresh = self.sharded(), self.sharded(-1, 0), self.sharded(0, 0)
        path = Path(folder) / f"step{step}"
        ckptx.save(rows, path, format="dcp" if step % 2 else "safetensors", overwrite=True)
        ckptx.load(fresh, path)
        check_parts(fresh, self.sharded(), "load")
        with Resharder(rows, columns) as resharder:
            resharder.run()
        check_parts(columns, self.sharded(-1), "sync")
        with channel_over(None) as channel:
            found = channel.all_gather(metadata.encode())
            broken = step % channel.size
            if channel.index == broken:
                others = [one.decode() for at, one in enumerate(found) if at != broken]
                self.heal(step, join_metadata(others or [metadata]))
            channel.all_gather(b"healed")
        return {}

    def sharded(self, dim: int = 0, scale: int = 1) -> dict[str, DTensor]:
        """The weights, or zeros, cut along a dim."""
        found = {}
        for key, tensor in self.weights.items():
            placed = [Shard(dim % tensor.dim())]
            found[key] = distribute_tensor(tensor * scale, self.mesh, placed, src_data_rank=None)
        return found

    def close(self) -> None:
        """End all that serves."""
        self.leave()
        for transport in (self.source, self.receiver):
            transport.shutdown()


def check_parts(found: dict[str, DTensor], wanted: dict[str, DTensor], what: str) -> None:
    for key, tensor in found.items():
        if not torch.equal(tensor.to_local(), wanted[key].to_local()):
            raise ValueError(f"{what}: {key} is wrong")


def answer_to(rank: Rank, do: str, task: dict[str, Any]) -> dict[str, object]:
    """Do it; what came of it."""
    try:
        answer: dict[str, object] = getattr(rank, do)(**task)
    except Exception as error:  # noqa: BLE001 - the conductor judges it
        text = f"{type(error).__name__}: {error}"
        return {"error": text, "typed": isinstance(error, TYPED)}
    return answer


def main() -> None:
    torch.set_num_threads(1)
    rank = Rank()
    # What this process prints by chance stays out of the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        task = json.loads(line)
        do = task.pop("do")
        if do == "end":
            break
        answer = answer_to(rank, do, task)
        if "error" in answer:
            rank.leave()  # so that who still waits for this rank notices
        print(json.dumps(answer), file=answers, flush=True)
    rank.close()


if __name__ == "__main__":
    main()
