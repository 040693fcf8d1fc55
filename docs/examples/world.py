"""World: the ranks that run together, from one loss to the next."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

LIMIT = timedelta(seconds=180)


@dataclass(frozen=True, slots=True)
class World:
    """A group of ranks, the `number`th; `lost` are those that others stood in for before it.

    Its ranks meet in the store under its number, so that nothing of an earlier one is in the way.
    """

    store: TCPStore
    rank: int
    size: int
    number: int = 0
    lost: tuple[int, ...] = ()

    def join(self) -> None:
        """Make the default process group. Collective."""
        prefix = PrefixStore(f"ranks of group {self.number}", self.store)
        dist.init_process_group(
            "gloo", store=prefix, rank=self.rank, world_size=self.size, timeout=LIMIT
        )

    def leave(self) -> None:
        """Take all process groups down. Collective."""
        dist.destroy_process_group()

    def after_loss(self) -> World:
        """Hang up, wait for word who was lost, and join the group that comes after. Collective."""
        self.hang_up()
        dist.destroy_process_group()
        return self.announced(self.store, self.rank, self.number + 1)

    def hang_up(self) -> None:
        """Close all connections but that to the store, so that peers who wait for this rank stop.

        gloo keeps them open for as long as anything, a model too, refers to its groups; and who
        waits for a rank that waits for the lost one would not learn of it before the time is up.
        """
        for entry in os.listdir("/dev/fd"):
            try:
                with socket.socket(fileno=os.dup(int(entry))) as found:
                    if found.getpeername()[1:2] != (self.store.port,):
                        found.shutdown(socket.SHUT_RDWR)
            except OSError:  # a file, a pipe, or a socket that listens
                continue

    @classmethod
    def announced(cls, store: TCPStore, rank: int, number: int) -> World:
        """Join the group of that number, as soon as there is one. Collective."""
        news = json.loads(store.get(f"group {number}"))
        found = cls(store, rank, news["size"], number, tuple(news["lost"]))
        found.join()
        return found

    def shrunk(self, size: int) -> World | None:
        """Leave, and join a group of the first ranks; None where this rank is not in it."""
        self.leave()
        found = World(self.store, self.rank, size, self.number + 1)
        if self.rank >= size:
            return None
        found.join()
        return found

    def publish(self, name: str, value: str) -> None:
        """Tell all ranks something under this rank's name."""
        self.store.set(f"{name} of rank {self.rank} in group {self.number}", value)

    def published(self, name: str, rank: int) -> str:
        """What another rank tells; waits for it."""
        return str(self.store.get(f"{name} of rank {rank} in group {self.number}").decode())

    def mesh(self) -> DeviceMesh:
        """Two replicas, each sharded over half of the ranks; one where they cannot be halved."""
        replicas = 2 if self.size % 2 == 0 else 1
        return self._mesh(replicas, self.size // replicas)

    def mesh_of_replicas(self) -> DeviceMesh:
        """Every rank a replica of the whole."""
        return self._mesh(self.size, 1)

    def _mesh(self, copies: int, shards: int) -> DeviceMesh:
        return init_device_mesh("cpu", (copies, shards), mesh_dim_names=("copy", "shard"))
