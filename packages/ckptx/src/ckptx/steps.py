"""Steps: an exchange in the order of its tensors, each step awaited before the next.

The plain way, beside the executor's packed rounds: slower where tensors are small, easy to follow,
and with no more memory held than one step takes. Every tensor moves as its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, zip_longest
from operator import attrgetter

import torch

from distcore.v1 import Channel, Message, Plan, Region, Transfer
from distcore.v1.runtime import Shard, run_together

Step = Sequence[Transfer]


def steps_by_tensor(plan: Plan) -> list[Step]:
    """One tensor after the other, each from its loader to all that need it.

    The transfers of a tensor must follow each other in the plan.
    """
    return [list(step) for _, step in groupby(plan, key=attrgetter("key"))]


def steps_by_round(plan: Plan, dtypes: Mapping[str, str]) -> list[Step]:
    """One dtype after the other, by name; of each, the k-th tensors of all loaders together."""
    queues: dict[str, dict[int, list[Step]]] = {}
    for step in steps_by_tensor(plan):
        queue = queues.setdefault(dtypes[step[0].key], {})
        queue.setdefault(step[0].src, []).append(step)
    return [
        [transfer for step in turn if step is not None for transfer in step]
        for dtype in sorted(queues)
        for turn in zip_longest(*(queues[dtype][src] for src in sorted(queues[dtype])))
    ]


def play(
    steps: Iterable[Step],
    channel: Channel,
    sources: Mapping[str, torch.Tensor],
    places: Mapping[str, torch.Tensor],
    *,
    timeout_s: float | None = None,
) -> tuple[int, int]:
    """Carry out steps; the bytes that this rank sent and received. Collective.

    The regions are whole tensors. Where packing or unpacking fails on a rank, it goes on for its
    peers' sake, and at the end all ranks raise PeerError.
    """
    passage = _Passage(channel, sources, places, timeout_s)
    for step in steps:
        passage.play(step)
    run_together("finish the exchange", passage.settle, channel, timeout_s=timeout_s)
    return passage.sent, passage.received


class _Passage:
    """What one rank does in all steps, and the first thing that went wrong."""

    def __init__(
        self,
        channel: Channel,
        sources: Mapping[str, torch.Tensor],
        places: Mapping[str, torch.Tensor],
        timeout_s: float | None,
    ) -> None:
        self._channel = channel
        self._sources = sources
        self._places = places
        self._timeout_s = timeout_s
        self._failure: Exception | None = None
        self.sent = 0
        self.received = 0

    def play(self, step: Step) -> None:
        """Send and receive what this rank has in a step."""
        outgoing: dict[str, torch.Tensor] = {}
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[torch.Tensor]] = {}
        after: list[Callable[[], None]] = []
        with torch.inference_mode():
            for transfer in step:
                if transfer.src == self._channel.rank:
                    if transfer.key not in outgoing:
                        outgoing[transfer.key] = self._packed(self._sources[transfer.key])
                    sends.setdefault(transfer.dst, []).append(outgoing[transfer.key])
                    self.sent += outgoing[transfer.key].numel()
                elif transfer.dst == self._channel.rank:
                    buffer = self._landing(self._places[transfer.key], after)
                    receives.setdefault(transfer.src, []).append(buffer)
                    self.received += buffer.numel()
            if not sends and not receives:
                return
            self._channel.start(
                [Message(peer, tuple(buffers)) for peer, buffers in sends.items()],
                [Message(peer, tuple(buffers)) for peer, buffers in receives.items()],
                timeout_s=self._timeout_s,
            ).wait()
            for unpack in after:
                self._guard(unpack)

    def settle(self) -> None:
        """Raise what went wrong on this rank."""
        if self._failure is not None:
            raise self._failure

    def _packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of a tensor in row-major order, on the channel's device."""
        box = Shard.of(tensor, self._channel.rank).box(Region.of_shape(tuple(tensor.shape)))
        memory = box.flat(self._channel.device)
        if memory is None:
            memory = torch.empty(box.nbytes, dtype=torch.uint8, device=self._channel.device)
            self._guard(lambda: box.read_into(memory))
        return memory

    def _landing(self, tensor: torch.Tensor, after: list[Callable[[], None]]) -> torch.Tensor:
        """Where the bytes of a tensor arrive: in place, or in a buffer that is copied `after`."""
        box = Shard.of(tensor, self._channel.rank).box(Region.of_shape(tuple(tensor.shape)))
        memory = box.flat(self._channel.device)
        if memory is not None:
            return memory
        staging = torch.empty(box.nbytes, dtype=torch.uint8, device=self._channel.device)
        after.append(lambda: box.write_from(staging))
        return staging

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - told to all ranks at the end
            if self._failure is None:
                self._failure = error
