"""protocols: each is filled by a plain class or function, and asks for nothing more."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from distcore.v1 import (
    Layout,
    Plan,
    Progress,
    Region,
    Resharder,
    StateTransport,
    Transfer,
)


class WholeTensors:
    """A Resharder that takes every tensor whole from the first rank that holds it."""

    def plan(self, src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> Plan:
        return Plan(
            Transfer(key, src[key].ranks[0], rank, Region.of_shape(layout.shape))
            for key, layout in sorted(dst.items())
            for rank in layout.ranks
        )


class InMemory:
    """A StateTransport within one process."""

    def __init__(self) -> None:
        self.served: dict[int, object] = {}

    def metadata(self) -> str:
        return "here"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: object, timeout: timedelta
    ) -> None:
        self.served[step] = state_dict

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> object:
        return self.served[step]

    def disallow_checkpoint(self) -> None:
        self.served.clear()

    def shutdown(self, wait: bool = True) -> None:
        self.served.clear()


def test_a_resharder_plans_from_layouts() -> None:
    resharder: Resharder = WholeTensors()
    src = {"w": Layout.replicated(shape=(4,), dtype="int8", ranks=[0, 1])}
    dst = {"w": Layout.replicated(shape=(4,), dtype="int8", ranks=[2, 3])}
    whole = Region((0,), (4,))
    assert list(resharder.plan(src, dst)) == [
        Transfer("w", 0, 2, whole),
        Transfer("w", 0, 3, whole),
    ]


def test_a_transport_carries_a_state() -> None:
    transport: StateTransport = InMemory()
    soon = timedelta(seconds=1)
    transport.send_checkpoint([1], 7, {"w": 1}, soon)
    assert transport.recv_checkpoint(0, transport.metadata(), 7, soon) == {"w": 1}
    transport.disallow_checkpoint()
    transport.shutdown(wait=False)


def test_a_function_is_a_progress_whatever_its_parameters_are_called() -> None:
    seen: list[tuple[int, int]] = []

    def told(done: int, total: int) -> None:
        seen.append((done, total))

    progress: Progress = told
    progress(3, 9)
    assert seen == [(3, 9)]


def test_each_protocol_asks_for_what_the_stand_in_has_and_no_more() -> None:
    for protocol, stand_in in ((Resharder, WholeTensors), (StateTransport, InMemory)):
        assert protocol not in stand_in.__mro__
        asked = {name for name in vars(protocol) if not name.startswith("_")}
        assert asked == {name for name in vars(stand_in) if not name.startswith("_")}
