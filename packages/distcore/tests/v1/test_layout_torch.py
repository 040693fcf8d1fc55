"""Layout against torch: what torch itself holds on every rank, as far as it says without ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from distcore.v1 import ITEMSIZES, Layout, Mesh, Placement, Reading, itemsize
from distcore.v1.placement import cutting_order

DIMS = 2


def arranged(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor in which every element says where it lies."""
    return torch.arange(prod(shape)).reshape(shape)


def local_of(layout: Layout, rank: int) -> torch.Tensor:
    whole, local = arranged(layout.shape), torch.full(layout.local_shape(rank), -1)
    for piece in layout.pieces(rank):
        local[piece.local.slices()] = whole[piece.region.slices()]
    return local


def chunked(tensor: torch.Tensor, parts: int, part: int, dim: int) -> torch.Tensor:
    """The `part`-th result of torch.chunk, empty where torch gives fewer."""
    chunks = tensor.chunk(parts, dim)
    return chunks[part] if part < len(chunks) else tensor.narrow(dim, 0, 0)


def meshed(
    shape: tuple[int, ...], sizes: Sequence[int], forms: list[str], reading: Reading = "order"
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The place in the mesh and the local tensor of every rank of our layout."""
    mesh: Mesh = torch.arange(prod(sizes)).reshape(list(sizes)).tolist()
    layout = Layout.from_mesh(
        shape=shape, dtype="int64", mesh=mesh, placements=forms, reading=reading
    )
    places = product(*map(range, sizes))
    for rank, place in enumerate(places):
        yield place, local_of(layout, rank)


def torch_placement(form: str) -> Replicate | Shard | _StridedShard:
    placement = Placement.parse(form, DIMS)
    if placement.dim is None:
        return Replicate()
    if placement.split_factor == 1:
        return Shard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.split_factor)


def split_by_torch(
    tensor: torch.Tensor, sizes: Sequence[int], forms: list[str], place: tuple[int, ...]
) -> torch.Tensor:
    """What `distribute_tensor(src_data_rank=None)` does: every placement splits, left to right."""
    for form, size, index in zip(forms, sizes, place, strict=True):
        placement = torch_placement(form)
        if not isinstance(placement, Replicate):
            tensor = placement._split_tensor(tensor, size, with_padding=False)[0][index]
    return tensor


shapes = st.tuples(*[st.integers(0, 13)] * DIMS)
plain = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from(["R", "S(0)", "S(1)"])), min_size=1, max_size=3
)
strided = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.sampled_from(["R", "S(0)", "S(1)", "_S(0,2)", "_S(0,3)", "_S(0,5)", "_S(1,4)"]),
    ),
    min_size=1,
    max_size=3,
)


@given(shapes, plain)
def test_plain_cuts_are_nested_chunks(shape: tuple[int, int], axes: list[tuple[int, str]]) -> None:
    sizes, forms = [size for size, _ in axes], [form for _, form in axes]
    for place, local in meshed(shape, sizes, forms):
        expected = arranged(shape)
        for form, size, index in zip(forms, sizes, place, strict=True):
            if form != "R":
                expected = chunked(expected, size, index, int(form[2]))
        assert torch.equal(local, expected)


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 6))
@example(7, 3, 2)
@example(5, 4, 2)
@example(13, 2, 4)
def test_fsdp_over_tensor_parallelism_chunks_what_tensor_parallelism_chunked(
    rows: int, dp: int, tp: int
) -> None:
    strided = f"_S(0,{tp})" if tp > 1 else "S(0)"
    for (dp_index, tp_index), local in meshed((rows, 2), [dp, tp], [strided, "S(0)"]):
        expected = chunked(arranged((rows, 2)), tp, tp_index, 0)
        assert torch.equal(local, chunked(expected, dp, dp_index, 0))


@given(st.integers(0, 40), *[st.integers(1, 4)] * 3)
def test_two_axes_under_fsdp_are_chunked_in_their_order(
    rows: int, dp: int, ep: int, tp: int
) -> None:
    # FSDP2 over expert and tensor parallelism on one dim: ep, tp, then dp.
    forms = [f"_S(0,{ep * tp})", "S(0)", "S(0)"]
    for (dp_index, ep_index, tp_index), local in meshed((rows, 1), [dp, ep, tp], forms):
        expected = chunked(arranged((rows, 1)), ep, ep_index, 0)
        expected = chunked(expected, tp, tp_index, 0)
        assert torch.equal(local, chunked(expected, dp, dp_index, 0))


@given(shapes, strided)
@example((7, 1), [(3, "_S(0,2)"), (2, "S(0)")])
@example((3, 1), [(2, "_S(0,5)")])
@example((13, 1), [(3, "_S(0,2)"), (2, "_S(0,3)"), (3, "_S(0,2)")])
@example((2, 1), [(3, "_S(0,3)"), (3, "_S(0,5)"), (2, "S(0)")])
def test_the_index_reading_is_what_torch_splits(
    shape: tuple[int, int], axes: list[tuple[int, str]]
) -> None:
    sizes, forms = [size for size, _ in axes], [form for _, form in axes]
    for place, local in meshed(shape, sizes, forms, "index"):
        assert torch.equal(local, split_by_torch(arranged(shape), sizes, forms, place))


@given(shapes, strided)
def test_what_has_no_order_is_read_by_index_as_torch_does(
    shape: tuple[int, int], axes: list[tuple[int, str]]
) -> None:
    sizes, forms = [size for size, _ in axes], [form for _, form in axes]
    placements = [Placement.parse(form, DIMS) for form in forms]
    if None in [cutting_order(dim, placements, sizes) for dim in range(DIMS)]:
        for place, local in meshed(shape, sizes, forms):
            assert torch.equal(local, split_by_torch(arranged(shape), sizes, forms, place))


class SizedMesh:
    """As much of a DeviceMesh as torch's decoding of strided placements asks for."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes

    def size(self, axis: int) -> int:
        return self.sizes[axis]


@pytest.mark.skipif(
    not hasattr(DTensorSpec, "_maybe_convert_StridedShard_to_shard_order"),
    reason="this torch cannot decode strided placements",
)
@given(strided)
@example([(4, "_S(0,2)"), (3, "_S(0,2)"), (2, "S(0)")])
@example([(1, "S(0)"), (2, "_S(0,2)"), (1, "S(0)"), (2, "S(0)")])
def test_the_order_of_the_cuts_is_the_one_that_torch_decodes(axes: list[tuple[int, str]]) -> None:
    sizes, forms = [size for size, _ in axes], [form for _, form in axes]
    placements = [Placement.parse(form, DIMS) for form in forms]
    decoded = DTensorSpec._maybe_convert_StridedShard_to_shard_order(
        tuple(map(torch_placement, forms)),
        SizedMesh(sizes),  # type: ignore[arg-type]
    )
    ours = {dim: cutting_order(dim, placements, sizes) for dim in range(DIMS)}
    if decoded is None:
        assert None in ours.values()
    else:
        theirs = {entry.tensor_dim: entry.mesh_dims for entry in decoded}
        assert ours == {dim: theirs.get(dim, ()) for dim in range(DIMS)}


DTYPES = sorted({str(d)[6:] for d in vars(torch).values() if isinstance(d, torch.dtype)})


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_torch_has_its_size(name: str) -> None:
    assert itemsize(name) == getattr(torch, name).itemsize


def test_no_dtype_is_made_up() -> None:
    assert [name for name in ITEMSIZES if not hasattr(torch, name)] == []
