"""Heals a replica through torchft's own Manager with a transport of this package.

Exit status 1 if it does not come to be as the other. Two replicas, threads of this process, train
one model: the second joins some steps later, with other weights, and crashes once. Started by
`test_http_transport_torchft.py`, as a process of its own, with the name of the transport.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from fttransport import HTTPTransport, PGTransport, Security

LIMIT = timedelta(seconds=20)
LAST_STEP = 14
JOINS_AT, CRASHES_AT = 2, 7
WAIT_S = 60.0


class Crash(Exception):
    """The end of a replica before its time."""


class Replica:
    """One replica, trained by a thread until all have made the last step."""

    def __init__(self, name: str, kind: str, lighthouse: str) -> None:
        self.name = name
        self.kind = kind
        self.lighthouse = lighthouse
        self.step = 0
        self.received = 0
        self.losses: list[float] = []
        self.model = torch.nn.Linear(0, 0)

    def start(self, seed: int) -> None:
        """What a new process does: a model with weights of its own."""
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(300, 100)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def state(self) -> dict[str, Any]:
        """What the other heals from."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Heal."""
        self.received += 1
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])

    def train(self, crashes_at: int) -> None:
        """Train until the last step; Crash at `crashes_at`."""
        group = import_module("torchft.process_group").ProcessGroupGloo(timeout=LIMIT)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = import_module("torchft.manager").Manager(
            pg=group,
            min_replica_size=1,
            load_state_dict=self.load,
            state_dict=self.state,
            replica_id=self.name,
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=self.lighthouse,
            hostname="127.0.0.1",
            timeout=LIMIT,
            quorum_timeout=LIMIT,
            use_async_quorum=False,
            checkpoint_transport=transport_of(self.kind, group),
        )
        try:
            while (step := manager.current_step()) < LAST_STEP:
                self.step = step
                if step == crashes_at:
                    raise Crash
                self.train_one(manager)
        finally:
            manager.shutdown(wait=False)

    def train_one(self, manager: Any) -> None:
        """One step, with the gradients of all replicas averaged."""
        manager.start_quorum()
        self.optimizer.zero_grad()
        inputs = torch.full((4, 300), 1.0 + manager.current_step())
        loss = self.model(inputs).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            self.optimizer.step()
        time.sleep(0.05)


def transport_of(kind: str, group: Any) -> Any:
    """The transport of that name."""
    if kind == "PGTransport":
        return PGTransport(group, LIMIT, torch.device("cpu"))
    security = Security(token="shared", mac=True)
    return HTTPTransport(LIMIT, 2, security=security, bind="127.0.0.1")


def wait_for(replica: Replica, step: int) -> None:
    """Wait until a replica has come to a step."""
    until = time.monotonic() + WAIT_S
    while replica.step < step:
        if time.monotonic() > until:
            raise TimeoutError(f"{replica.name} has not come to step {step}")
        time.sleep(0.02)


def main(kind: str) -> int:
    """Run both replicas, the second of them twice."""
    lighthouse = import_module("torchft.coordination").LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=200
    )
    address = lighthouse.address()
    first, second = (Replica(name, kind, address) for name in ("first", "second"))
    first.start(seed=1)
    thread = threading.Thread(target=first.train, args=(-1,), daemon=True)
    thread.start()
    wait_for(first, JOINS_AT)
    for seed, crashes_at in ((2, CRASHES_AT), (3, -1)):
        second.start(seed)
        try:
            second.train(crashes_at)
        except Crash:
            wait_for(first, CRASHES_AT + 2)
    thread.join(WAIT_S)
    lighthouse.shutdown()
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    sys.stdout.write(f"{kind}: healed {second.received} times, equal: {same}\n")
    return 0 if same and second.received == 2 and first.received == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
