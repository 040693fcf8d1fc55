"""Resharder on ranks that are threads: what it moves, and how every mistake reaches every rank."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distcore.testing import rank_threads
from distcore.testing.strategies import placed_meshes
from distcore.v1 import (
    Channel,
    DisagreementError,
    Layout,
    PeerError,
    Piece,
    PlanError,
    Region,
)
from reshard import (
    Hook,
    Options,
    Placed,
    PlanCache,
    Resharder,
    plan_reshard,
    simulate,
    transfer,
)

FULL = torch.arange(28.0).reshape(4, 7)
ROWS = Layout.from_mesh(shape=(4, 7), dtype="float32", mesh=[0, 1], placements=["S(0)"])
COLUMNS = Layout.from_mesh(shape=(4, 7), dtype="float32", mesh=[1, 2], placements=["S(1)"])
Tree = dict[str, Placed]


def part(layout: Layout, full: torch.Tensor, rank: int) -> torch.Tensor | None:
    """What `rank` holds of `full`, element by element from the layout."""
    if rank not in layout.ranks:
        return None
    local = full.new_zeros(layout.local_shape(rank))
    for piece in layout.pieces(rank):
        local[piece.local.slices()] = full[piece.region.slices()]
    return local


def placed(layout: Layout, full: torch.Tensor, rank: int) -> Placed:
    return Placed(part(layout, full, rank), layout)


def blank(layout: Layout, full: torch.Tensor, rank: int) -> Placed:
    return placed(layout, torch.zeros_like(full), rank)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    as_bytes = (t.contiguous().view(-1).view(torch.uint8).tolist() for t in (one, other))
    return one.shape == other.shape and one.dtype == other.dtype and len({*map(str, as_bytes)}) == 1


# --- what is moved --------------------------------------------------------------------------


def three_runs(channel: Channel) -> tuple[int, ...]:
    rank = channel.rank
    src, dst = placed(ROWS, FULL, rank), blank(COLUMNS, FULL, rank)
    with Resharder({"m": {"w": src}}, {"m": {"w": dst}}, channel) as resharder:
        first = resharder.run()
        assert same(dst.data, part(COLUMNS, FULL, rank))
        if src.data is not None:
            src.data.mul_(2)
        resharder.run(version=7, verify="digest")
        assert same(dst.data, part(COLUMNS, FULL * 2, rank))
        if src.data is not None:
            src.data.mul_(2)
        handle = resharder.start()
        assert handle.wait(10).version == 8
        assert handle.done
        assert same(dst.data, part(COLUMNS, FULL * 4, rank))
        assert handle.progress[0] == handle.progress[1]
        assert (resharder.version, resharder.dirty) == (8, False)
        return first.nbytes_sent, first.nbytes_received, first.bound_received_nbytes


def test_each_run_moves_what_the_sources_hold_then() -> None:
    # Rank 1 keeps rows 2 and 3 of columns 0 to 3 and lacks rows 0 and 1: 8 elements of 4 bytes.
    expected = ((56, 0, 0), (24, 32, 32), (0, 48, 48), (0, 0, 0))
    assert rank_threads(4, three_runs).values() == expected


@dataclass
class Case:
    """Layouts of some tensors on few ranks, and the tensors."""

    src: dict[str, Layout]
    dst: dict[str, Layout]
    full: dict[str, torch.Tensor]
    options: Options
    size: int = field(init=False)

    def __post_init__(self) -> None:
        layouts = [*self.src.values(), *self.dst.values()]
        self.size = max(rank for layout in layouts for rank in layout.ranks) + 1


DTYPES = ("float32", "bfloat16", "int8", "bool", "complex64", "float8_e4m3fn", "uint16")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    src: dict[str, Layout] = {}
    dst: dict[str, Layout] = {}
    full = {}
    for number in range(draw(st.integers(1, 3))):
        key = f"t{number}"
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
        dtype = draw(st.sampled_from(DTYPES))
        for side in (src, dst):
            mesh = draw(placed_meshes(len(shape), max_ranks=4))
            side[key] = Layout.from_mesh(
                shape=shape, dtype=dtype, mesh=mesh.mesh, placements=mesh.placements
            )
        values = torch.arange(torch.Size(shape).numel()).remainder(100).reshape(shape)
        full[key] = values.to(getattr(torch, dtype))
    options = Options(
        stripe_nbytes=1,
        quantum_nbytes=draw(st.sampled_from([1, 8, 1 << 20])),
        fan_out=draw(st.sampled_from(["auto", "direct", "stripe"])),
        max_peers=draw(st.sampled_from([None, 1])),
    )
    return Case(src, dst, full, options)


def play(channel: Channel, case: Case, verify: Any) -> None:
    plan = plan_reshard(case.src, case.dst, options=case.options)
    simulated = simulate(plan, case.full).get(channel.rank, {})
    src = {k: placed(layout, case.full[k], channel.rank) for k, layout in case.src.items()}
    dst = {k: blank(layout, case.full[k], channel.rank) for k, layout in case.dst.items()}
    with Resharder(src, dst, channel, options=case.options) as resharder:
        assert resharder.plan.digest == plan.digest
        report = resharder.run(verify=verify)
    assert report.nbytes_received == report.bound_received_nbytes
    for key, made in dst.items():
        assert same(made.data, part(case.dst[key], case.full[key], channel.rank)), key
        assert same(made.data, simulated.get(key)), key


@given(case=cases(), verify=st.sampled_from([None, "digest"]))
@settings(max_examples=40)
def test_a_run_equals_simulate_and_the_indices(case: Case, verify: Any) -> None:
    rank_threads(case.size, play, case, verify).values()


def plain_tensors(channel: Channel) -> list[float] | None:
    src = torch.tensor([1.0, 2.0, 3.0]) if channel.rank in (1, 2) else None
    dst = torch.zeros(3) if channel.rank in (0, 2) else None
    transfer(src, dst, channel)
    return None if dst is None else dst.tolist()


def test_a_plain_tensor_is_whole_on_the_ranks_that_give_it() -> None:
    values = rank_threads(4, plain_tensors).values()
    assert values == ([1.0, 2.0, 3.0], None, [1.0, 2.0, 3.0], None)


@dataclass
class Mesh:
    mesh: torch.Tensor


class Reference:
    """What other libraries hold instead of a DTensor."""

    def __init__(self, full: torch.Tensor, ranks: list[int], placement: str, rank: int) -> None:
        self.shape, self.dtype = full.shape, full.dtype
        self.device_mesh = Mesh(torch.tensor(ranks))
        self.placements = (placement,)
        layout = Layout.from_mesh(
            shape=tuple(full.shape), dtype="float32", mesh=ranks, placements=[placement]
        )
        self._local_tensor = part(layout, full, rank)


def references(channel: Channel) -> list[object] | None:
    src = Reference(FULL, [1, 0], "S(0)", channel.rank)
    dst = Reference(torch.zeros(4, 7), [2, 3], "S(1)", channel.rank)
    transfer({"w": src}, {"w": dst}, channel)
    return None if dst._local_tensor is None else dst._local_tensor.tolist()


def test_references_need_no_dtensor() -> None:
    values = rank_threads(4, references).values()
    assert values == (None, None, FULL[:, :4].tolist(), FULL[:, 4:].tolist())


def fused(channel: Channel) -> list[float] | None:
    """Rows of gate and up lie in turn in a fused tensor of rank 2; rank 0 and 1 hold one each."""
    halves = [
        Piece(Region((0,), (2,)), (0,)),
        Piece(Region((2,), (4,)), (0,)),
    ]
    src = Layout(shape=(4,), dtype="float32", pieces={0: halves[:1], 1: halves[1:]})
    places = [0, 2, 1, 3]  # element i of the tensor lies at place places[i]
    pieces = [Piece(Region((i,), (i + 1,)), (place,)) for i, place in enumerate(places)]
    dst = Layout(shape=(4,), dtype="float32", pieces={2: pieces})
    data = torch.zeros(4) if channel.rank == 2 else None
    transfer({"w": placed(src, torch.arange(4.0), channel.rank)}, {"w": Placed(data, dst)}, channel)
    return None if data is None else data.tolist()


def test_explicit_pieces_may_interleave() -> None:
    assert rank_threads(3, fused).values() == (None, None, [0.0, 2.0, 1.0, 3.0])


def strided(channel: Channel) -> None:
    src, dst = part(ROWS, FULL, channel.rank), part(COLUMNS, torch.zeros(4, 7), channel.rank)
    src = None if src is None else src.t().contiguous().t()
    dst = None if dst is None else dst.t().contiguous().t()
    transfer({"w": Placed(src, ROWS)}, {"w": Placed(dst, COLUMNS)}, channel)
    assert same(dst, part(COLUMNS, FULL, channel.rank))


def test_tensors_that_are_not_contiguous_travel_by_their_indices() -> None:
    """vllm#50641, miles#1608: a strided view was sent as flat memory."""
    rank_threads(3, strided).values()


# --- dtypes, hooks --------------------------------------------------------------------------


def converted(channel: Channel, src_dtype: str, dst_dtype: str) -> int:
    full = (torch.arange(28.0).reshape(4, 7) / 3).to(getattr(torch, src_dtype))
    src = Layout.from_mesh(shape=(4, 7), dtype=src_dtype, mesh=[0], placements=["R"])
    dst = Layout.from_mesh(shape=(4, 7), dtype=dst_dtype, mesh=[1], placements=["S(0)"])
    target = getattr(torch, dst_dtype)
    made = blank(dst, full.to(target), channel.rank)
    given = {"w": placed(src, full, channel.rank)}, {"w": made}
    report = transfer(*given, channel, cast={"w": "convert"})
    assert same(made.data, part(dst, full.to(target), channel.rank))
    return report.nbytes_received


@pytest.mark.parametrize(
    ("src", "dst", "nbytes"),
    [("float32", "bfloat16", 56), ("bfloat16", "float32", 56), ("float64", "float16", 56)],
)
def test_a_tensor_is_converted_once_where_the_wire_is_narrower(
    src: str, dst: str, nbytes: int
) -> None:
    assert rank_threads(2, converted, src, dst).values() == (0, nbytes)


def unconverted(channel: Channel) -> None:
    other = Layout.from_mesh(shape=(4, 7), dtype="bfloat16", mesh=[1, 2], placements=["S(1)"])
    dst = blank(other, FULL.bfloat16(), channel.rank)
    transfer({"w": placed(ROWS, FULL, channel.rank)}, {"w": dst}, channel)


def test_dtypes_that_differ_are_refused_by_default() -> None:
    for error in rank_threads(3, unconverted).raised(PlanError, within_s=3):
        assert "w: the source is float32 (as on rank 0)" in str(error)


def hooked(channel: Channel) -> list[float] | None:
    def store(received: torch.Tensor, local: torch.Tensor) -> None:
        local.copy_(received.flip(0))

    src = torch.tensor([1.0, 2.0]) if channel.rank == 0 else None
    dst = torch.zeros(2) if channel.rank == 1 else None
    hooks = {"tensor": Hook(before=lambda t: t * 10, after=store)}
    transfer(src, dst, channel, hooks=hooks)
    assert src is None or src.tolist() == [1.0, 2.0]
    return None if dst is None else dst.tolist()


def test_hooks_change_what_is_sent_and_write_what_has_arrived() -> None:
    assert rank_threads(2, hooked).values() == (None, [20.0, 10.0])


def failing_hook(channel: Channel) -> None:
    def fail(local: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no scales for it")

    src = placed(ROWS, FULL, channel.rank)
    dst = blank(COLUMNS, FULL, channel.rank)
    hooks = {"w": Hook(before=fail)} if channel.rank == 1 else {}
    with Resharder({"w": src}, {"w": dst}, channel, hooks=hooks) as resharder:
        try:
            resharder.run()
        finally:
            assert not resharder.dirty
            assert resharder.version == 0
            assert dst.data is None or not dst.data.any()


def test_a_hook_that_fails_is_told_to_all_before_anything_moves() -> None:
    for error in rank_threads(3, failing_hook).raised(PeerError, within_s=3):
        assert "rank 1: RuntimeError: no scales for it" in str(error)


def failing_end(channel: Channel) -> bool:
    def fail(received: torch.Tensor, local: torch.Tensor) -> None:
        raise RuntimeError("disk full")

    src, dst = placed(ROWS, FULL, channel.rank), blank(COLUMNS, FULL, channel.rank)
    hooks = {"w": Hook(after=fail)} if channel.rank == 2 else {}
    with Resharder({"w": src}, {"w": dst}, channel, hooks=hooks) as resharder:
        with pytest.raises(PeerError, match="rank 2: RuntimeError: disk full"):
            resharder.run()
        assert resharder.version == 0
        return resharder.dirty


def test_a_version_is_published_only_where_every_rank_has_written() -> None:
    """tokenspeed#672, sglang-omni#784, trl#5932: a version was published after a failed update."""
    assert rank_threads(3, failing_end).values() == (True, True, True)


# --- memory ---------------------------------------------------------------------------------


def swapped_in_place(channel: Channel) -> list[float]:
    """Source and destination are one buffer on each rank, and the halves change places."""
    data = torch.arange(2.0) + 2 * channel.rank
    src = Layout.from_mesh(shape=(4,), dtype="float32", mesh=[0, 1], placements=["S(0)"])
    dst = Layout.from_mesh(shape=(4,), dtype="float32", mesh=[1, 0], placements=["S(0)"])
    with Resharder({"w": Placed(data, src)}, {"w": Placed(data, dst)}, channel) as resharder:
        report = resharder.run()
        assert report.kept_nbytes == 8
        first = data.tolist()
        resharder.run()
        assert data.tolist() == [0.0 + 2 * channel.rank, 1.0 + 2 * channel.rank]
        return first


def test_sources_may_share_memory_with_destinations() -> None:
    assert rank_threads(2, swapped_in_place).values() == ([2.0, 3.0], [0.0, 1.0])


def columns_of_one_buffer(channel: Channel) -> list[list[float]]:
    """Two destinations are columns of one buffer: they share its extent, but no byte."""
    whole = torch.zeros(2, 2)
    src = {"a": torch.full((2, 1), 1.0), "b": torch.full((2, 1), 2.0)}
    given = src if channel.rank == 0 else None
    transfer(given, {"a": whole[:, :1], "b": whole[:, 1:]}, channel)
    return whole.tolist()


def test_views_side_by_side_in_one_buffer_are_apart() -> None:
    """torchtitan#4706: a fused tensor is filled through views of the live memory."""
    whole = [[1.0, 2.0], [1.0, 2.0]]
    assert rank_threads(2, columns_of_one_buffer).values() == (whole, whole)


def overlapping(channel: Channel) -> None:
    whole = torch.zeros(3)
    transfer({"a": torch.ones(2), "b": torch.ones(2)}, {"a": whole[:2], "b": whole[1:]}, channel)


def test_destinations_that_overlap_are_refused() -> None:
    for error in rank_threads(2, overlapping).raised(PlanError, within_s=3):
        assert "a: this destination and 'b' share memory" in str(error)


def tied(channel: Channel, tied_source: bool) -> tuple[int, list[float]]:
    embed, made = torch.arange(4.0), torch.zeros(4)
    head = embed if tied_source else embed + 1
    src = {"embed": embed, "head": head} if channel.rank == 0 else None
    dst = {"embed": made, "head": made} if channel.rank == 1 else None
    report = transfer(src, dst, channel)
    return report.nbytes_received, made.tolist()


def test_a_tied_tensor_is_moved_once() -> None:
    values = rank_threads(2, tied, True).values()
    assert values[1] == (16, [0.0, 1.0, 2.0, 3.0])


def test_destinations_that_are_tied_need_tied_sources() -> None:
    for error in rank_threads(2, tied, False).raised(PlanError, within_s=3):
        assert "head: shares the memory of 'embed' on ranks [1]" in str(error)


# --- mistakes -------------------------------------------------------------------------------


def faulty(channel: Channel, fault: str) -> None:
    """Every rank but 2 is right; the destination must stay as it is."""
    src: dict[str, Any] = {"v": placed(ROWS, FULL, channel.rank)}
    layout = Layout.replicated(shape=(4, 7), dtype="float32", ranks=[0, 1, 2])
    src["w"] = placed(layout, FULL, channel.rank)
    dst = {key: blank(COLUMNS, FULL, channel.rank) for key in src}
    if channel.rank == 2:
        if fault == "shape":
            other = Layout.replicated(shape=(7, 4), dtype="float32", ranks=[0, 1, 2])
            src["w"] = placed(other, FULL.t(), 2)
        elif fault == "dtype":
            other = Layout.replicated(shape=(4, 7), dtype="float64", ranks=[0, 1, 2])
            src["w"] = placed(other, FULL.double(), 2)
        elif fault == "local shape":
            src["w"] = Placed(FULL[:3], layout)
        elif fault == "missing":
            del src["w"]
        elif fault == "no destination":
            del dst["w"]
        elif fault == "order":
            dst = {"w": dst["w"], "v": dst["v"]}
        elif fault == "placement":
            other = Layout.from_mesh(
                shape=(4, 7), dtype="float32", mesh=[0, 1, 2], placements=["S(0)"]
            )
            src["w"] = placed(other, FULL, 2)
        elif fault == "type":
            src["w"] = "not a tensor"
        else:
            src["w"] = Broken()
    try:
        transfer(src, dst, channel)
    finally:
        for made in dst.values():
            assert made.data is None or not made.data.any()
        assert channel.all_gather(b"still usable") == (b"still usable",) * 3


class Broken:
    """A reference whose own code raises."""

    @property
    def shape(self) -> object:
        raise RuntimeError("the engine is asleep")


FAULTS: dict[str, type[Exception]] = {
    "shape": DisagreementError,
    "dtype": DisagreementError,
    "local shape": PeerError,
    "missing": PlanError,
    "no destination": PlanError,
    "order": DisagreementError,
    "placement": DisagreementError,
    "type": PeerError,
    "exception": PeerError,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_on_one_rank_raises_on_all_and_names_rank_and_key(fault: str) -> None:
    for error in rank_threads(3, faulty, fault).raised(FAULTS[fault], within_s=3):
        assert "rank 2" in str(error)
        assert "w" in str(error).replace("between", "")


def strange_keys(channel: Channel) -> None:
    transfer({"a": torch.ones(2)}, {"b": torch.ones(2)}, channel)


def test_keys_on_one_side_only_are_all_named() -> None:
    """Torchstore skips what is missing in silence, and stale weights stay."""
    for error in rank_threads(2, strange_keys).raised(PlanError, within_s=3):
        assert "a: ranks [0, 1] give a source, but no rank gives a destination" in str(error)
        assert "b: ranks [0, 1] give a destination, but no rank gives a source" in str(error)


def other_shapes(channel: Channel) -> None:
    transfer({"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2)}, channel)


def test_shapes_of_the_two_sides_must_be_equal() -> None:
    for error in rank_threads(2, other_shapes).raised(PlanError, within_s=3):
        assert "w: the source is (2, 3) (as on rank 0), the destination (3, 2)" in str(error)


def other_options(channel: Channel) -> None:
    cast: Any = "convert" if channel.rank == 1 else "error"
    transfer({"w": torch.ones(2)}, {"w": torch.ones(2)}, channel, cast=cast)


def test_options_must_be_equal_on_all_ranks() -> None:
    """vllm#31943: a size taken from local memory made the two sides differ."""
    for error in rank_threads(2, other_options).raised(DisagreementError, within_s=3):
        assert "('*', 'convert')" in str(error)


def other_versions(channel: Channel) -> tuple[int, bool]:
    src, dst = placed(ROWS, FULL, channel.rank), blank(COLUMNS, FULL, channel.rank)
    with Resharder({"w": src}, {"w": dst}, channel) as resharder:
        with pytest.raises(DisagreementError):
            resharder.run(version=5 + channel.rank)
        resharder.run(version=5)
        assert same(dst.data, part(COLUMNS, FULL, channel.rank))
        return resharder.version, resharder.dirty


def test_versions_that_differ_are_refused_and_the_next_run_works() -> None:
    assert rank_threads(3, other_versions).values() == ((5, False),) * 3


def nothing_at_all(channel: Channel) -> int:
    with Resharder(None, {}, channel) as resharder:
        return resharder.run().nbytes_sent


def test_an_empty_state_dict_is_moved_at_once() -> None:
    """checkpoint-engine#104: an empty set of receivers made an endless loop."""
    assert rank_threads(2, nothing_at_all).values() == (0, 0)


def meta_only(channel: Channel) -> int:
    made = torch.zeros(4, 7, device="meta")
    src = {"w": made} if channel.rank == 0 else None
    dst = {"w": torch.zeros(4, 7)} if channel.rank == 1 else None
    with Resharder(src, dst, channel) as resharder:
        with pytest.raises(PlanError, match="meta device"):
            resharder.run()
        return resharder.stats["wire_bytes"]


def test_on_the_meta_device_there_is_a_plan_and_no_run() -> None:
    assert rank_threads(2, meta_only).values() == (112, 112)


def closed(channel: Channel) -> None:
    resharder = Resharder({"w": torch.ones(2)}, {"w": torch.zeros(2)}, channel)
    resharder.close()
    resharder.close()
    resharder.run()


def test_a_closed_resharder_refuses_to_run() -> None:
    for error in rank_threads(2, closed).raised(PlanError, within_s=3):
        assert "closed" in str(error)


def twice_at_once(channel: Channel) -> bool:
    def wait(local: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return local

    hooks = {"w": Hook(before=wait)}
    src, dst = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    with Resharder(src, dst, channel, hooks=hooks) as resharder:
        handle = resharder.start()
        with pytest.raises(PlanError, match="under way"):
            resharder.run()
        return handle.wait().version == 1


def test_one_run_at_a_time() -> None:
    assert rank_threads(2, twice_at_once).values() == (True, True)


def same_memory(channel: Channel) -> tuple[int, int]:
    """The bytes that torch holds after the first and after the tenth run."""
    big = torch.arange(64_000.0).reshape(64, 1000)
    rows = Layout.from_mesh(shape=(64, 1000), dtype="float32", mesh=[0, 1], placements=["S(0)"])
    columns = Layout.from_mesh(shape=(64, 1000), dtype="float32", mesh=[0, 1], placements=["S(1)"])
    src, dst = placed(rows, big, channel.rank), blank(columns, big, channel.rank)
    with Resharder({"w": src}, {"w": dst}, channel, max_staging_bytes=1 << 17) as resharder:
        report = resharder.run()
        compiled = resharder._compiled
        resharder.run()
        again = resharder.run()
        assert resharder._compiled is compiled
        assert same(dst.data, part(columns, big, channel.rank))
        assert again.staging_nbytes == report.staging_nbytes
        return report.staging_nbytes, report.kept_nbytes


def test_staging_stays_within_its_bound_and_is_kept() -> None:
    """vllm#52950: buffers made on each sync were never given back."""
    for staging, kept in rank_threads(2, same_memory).values():
        assert 0 < staging <= 1 << 17
        assert kept == 0


def another_way_to_verify(channel: Channel) -> list[int]:
    """The staging of runs that verify, and do not, in turn; each has the whole budget."""
    big = torch.arange(64_000.0).reshape(64, 1000)
    rows = Layout.from_mesh(shape=(64, 1000), dtype="float32", mesh=[0, 1], placements=["S(0)"])
    columns = Layout.from_mesh(shape=(64, 1000), dtype="float32", mesh=[0, 1], placements=["S(1)"])
    src, dst = placed(rows, big, channel.rank), blank(columns, big, channel.rank)
    found = []
    with Resharder({"w": src}, {"w": dst}, channel, max_staging_bytes=1 << 17) as resharder:
        for verify in (None, "digest", "digest", None):
            before = resharder._compiled
            held = [one._slots for one in before._executors if one] if before else []
            report = resharder.run(verify=verify)
            assert report.verified == (verify is not None)
            assert same(dst.data, part(columns, big, channel.rank))
            if before is not None and before is not resharder._compiled:
                assert any(held)
                assert not any(one._slots for one in before._executors if one)
            found.append(report.staging_nbytes)
    return found


def test_staging_stays_within_its_bound_where_runs_verify() -> None:
    for found in rank_threads(2, another_way_to_verify).values():
        assert all(0 < nbytes <= 1 << 17 for nbytes in found), found


def planned_once(channel: Channel) -> tuple[int, int]:
    """Other tensors of the same layouts each time; rank 1 keeps no plans."""
    cache = PlanCache() if channel.rank != 1 else None
    for step in range(3):
        full = FULL + step
        src, dst = placed(ROWS, full, channel.rank), blank(COLUMNS, full, channel.rank)
        if step < 2:
            transfer({"w": src}, {"w": dst}, channel, cache=cache)
        else:
            with Resharder({"w": src}, {"w": dst}, channel, cache=cache) as resharder:
                assert resharder.run().version == 1
        assert same(dst.data, part(COLUMNS, full, channel.rank))
    return (0, 0) if cache is None else (cache.hits, cache.misses)


def test_layouts_that_come_again_are_planned_once() -> None:
    assert set(rank_threads(4, planned_once).values()) == {(2, 1), (0, 0)}


def failing_in_background(channel: Channel) -> bool:
    def fail(received: torch.Tensor, local: torch.Tensor) -> None:
        raise RuntimeError("disk full")

    src, dst = placed(ROWS, FULL, channel.rank), blank(COLUMNS, FULL, channel.rank)
    hooks = {"w": Hook(after=fail)} if channel.rank == 2 else {}
    with Resharder({"w": src}, {"w": dst}, channel, hooks=hooks) as resharder:
        handle = resharder.start()
        with pytest.raises(PeerError, match="rank 2: RuntimeError: disk full"):
            handle.wait(10)
        return handle.done and resharder.dirty


def test_a_failure_in_the_background_is_raised_on_all_by_wait() -> None:
    assert rank_threads(3, failing_in_background).values() == (True, True, True)


def unknown_cast(channel: Channel) -> None:
    transfer({"w": torch.ones(2)}, {"w": torch.zeros(2)}, channel, cast={"v": "convert"})


def test_a_cast_of_an_unknown_tensor_is_refused() -> None:
    for error in rank_threads(2, unknown_cast).raised(PlanError, within_s=3):
        assert "v: no rank gives a tensor of this name" in str(error)
