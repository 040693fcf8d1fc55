"""Shards and Boxes: where the bytes of a Region lie in a local tensor, and how they are copied."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from distcore.v1 import Layout, Piece, Region
from distcore.v1.errors import PlanError
from distcore.v1.runtime import Shard

WHOLE = Region((0, 0), (4, 6))


def counted() -> torch.Tensor:
    return torch.arange(24, dtype=torch.int32).view(4, 6)


def shard_of(*pieces: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> Shard:
    """A Shard of a tensor of 4 x 6 with pieces from start, stop and place."""
    return Shard(counted(), tuple(Piece(Region(a, b), place) for a, b, place in pieces))


def read(shard: Shard, region: Region) -> list[int]:
    staging = torch.full((region.numel * 4,), 255, dtype=torch.uint8)
    shard.box(region).read_into(staging)
    return staging.view(torch.int32).tolist()


# What a Shard is


def test_a_plain_tensor_is_one_whole_piece() -> None:
    tensor = counted()
    shard = Shard.of(tensor, rank=3)
    assert shard.data is tensor
    assert shard.pieces == (Piece(WHOLE, (0, 0)),)
    assert Shard.of(shard, rank=0) is shard


def test_a_scalar_has_one_element_and_an_empty_tensor_none() -> None:
    assert Shard.of(torch.tensor(7), 0).box(Region((), ())).nbytes == 8
    empty = Shard.of(torch.zeros(0, 3), 0)
    assert empty.holds(Region((0, 0), (0, 3)))
    assert empty.box(Region((0, 1), (0, 2))).nbytes == 0


def test_a_parameter_leaves_its_graph() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    shard = Shard.of(parameter, 0)
    assert not shard.data.requires_grad
    assert shard.data.data_ptr() == parameter.data_ptr()


def test_a_layout_says_where_the_pieces_lie() -> None:
    layout = Layout.from_mesh(shape=(8,), dtype="int64", mesh=[0, 1], placements=["_S(0,2)"])
    shard = Shard.of(torch.arange(4), 1, layout)
    assert [(p.region.start, p.place) for p in shard.pieces] == [((2,), (0,)), ((6,), (2,))]


def test_many_values_become_shards_by_key() -> None:
    shards = Shard.all_of({"a": torch.zeros(2), "b": Shard.of(torch.zeros(3), 0)}, 0)
    assert {key: shard.pieces[0].region.shape for key, shard in shards.items()} == {
        "a": (2,),
        "b": (3,),
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "got a list"),
        (None, "got a NoneType"),
        (torch.zeros(3).to_sparse(), "sparse"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "nested"),
    ],
    ids=["list", "None", "sparse", "meta", "nested"],
)
def test_what_has_no_memory_of_its_own_is_refused(value: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Shard.of(value, 0)
    with pytest.raises(PlanError, match=text):
        Shard(value, ())


@pytest.mark.parametrize(
    "pieces",
    [
        [((0, 0), (5, 6), (0, 0))],
        [((0, 0), (4, 6), (0, 1))],
        [((0,), (4,), (0,))],
        [((0, 0), (2, 6), (0, 0)), ((1, 0), (3, 6), (2, 0))],
        [((0, 0), (2, 6), (0, 0)), ((2, 0), (4, 6), (1, 0))],
    ],
    ids=["too long", "out of place", "other dims", "overlap", "overlap in memory"],
)
def test_pieces_that_do_not_fit_are_refused(pieces: list[Any]) -> None:
    with pytest.raises(PlanError) as caught:
        shard_of(*pieces)
    assert caught.value.problems


# What it holds


def test_a_region_is_held_by_one_piece_or_by_several() -> None:
    shard = shard_of(((0, 0), (2, 6), (2, 0)), ((4, 0), (6, 6), (0, 0)))
    assert shard.holds(Region((0, 0), (2, 6)))
    assert shard.holds(Region((1, 2), (2, 3)))
    assert shard.holds(Region((5, 0), (6, 6)))
    assert not shard.holds(Region((1, 0), (5, 6)))
    assert not shard.holds(Region((2, 0), (3, 6)))
    assert not shard.holds(Region((0,), (1,)))
    touching = shard_of(((0, 0), (2, 6), (2, 0)), ((2, 0), (4, 6), (0, 0)))
    assert touching.holds(Region((1, 1), (3, 4)))
    assert len(touching.box(Region((1, 1), (3, 4))).views) == 2


def test_a_box_of_what_is_not_held_is_refused() -> None:
    with pytest.raises(PlanError, match="holds nothing"):
        Shard(counted(), ()).box(WHOLE)


# Where the bytes lie


def test_what_lies_in_order_is_handed_out_as_it_is() -> None:
    shard = Shard.of(counted(), 0)
    for region, offset in ((WHOLE, 0), (Region((1, 0), (3, 6)), 24), (Region((2, 2), (3, 5)), 56)):
        flat = shard.box(region).flat("cpu")
        assert flat is not None
        assert (flat.dtype, flat.ndim, flat.numel()) == (torch.uint8, 1, region.numel * 4)
        assert flat.data_ptr() == shard.data.data_ptr() + offset


def test_what_does_not_lie_in_order_has_no_flat_memory() -> None:
    assert Shard.of(counted(), 0).box(Region((0, 0), (4, 5))).flat("cpu") is None
    assert Shard.of(counted().t(), 0).box(Region((0, 0), (6, 4))).flat("cpu") is None
    complexes = torch.zeros(3, dtype=torch.complex64)
    assert Shard.of(complexes.conj(), 0).box(Region((0,), (3,))).flat("cpu") is None
    assert Shard.of(complexes.conj().imag, 0).box(Region((0,), (3,))).flat("cpu") is None
    pieces = shard_of(((0, 0), (2, 6), (0, 0)), ((2, 0), (4, 6), (2, 0)))
    assert pieces.box(WHOLE).flat("cpu") is None


def test_one_element_lies_in_order_whatever_its_strides() -> None:
    flat = Shard.of(counted()[2:3, 3:4], 0).box(Region((0, 0), (1, 1))).flat("cpu")
    assert flat is not None
    assert flat.view(torch.int32).tolist() == [15]


def test_memory_on_another_device_is_not_handed_out() -> None:
    box = Shard.of(counted(), 0).box(WHOLE)
    assert box.flat("cuda:0") is None
    assert box.flat("cuda") is None
    assert box.flat("cpu") is not None


# Copies


def test_elements_are_read_in_row_major_order() -> None:
    region = Region((1, 1), (3, 3))
    assert read(Shard.of(counted(), 0), region) == [7, 8, 13, 14]
    assert read(Shard.of(counted().t(), 0), Region((1, 1), (3, 3))) == [7, 13, 8, 14]
    assert read(shard_of(((2, 0), (4, 6), (0, 0)), ((0, 0), (2, 6), (2, 0))), region) == [
        19,
        20,
        1,
        2,
    ]


def test_elements_are_written_where_they_belong() -> None:
    shard = shard_of(((2, 0), (4, 6), (0, 0)), ((0, 0), (2, 6), (2, 0)))
    shard.data.zero_()
    values = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    shard.box(Region((1, 1), (3, 3))).write_from(values.view(torch.uint8))
    assert shard.data.nonzero().tolist() == [[0, 1], [0, 2], [3, 1], [3, 2]]
    assert shard.data[shard.data != 0].tolist() == [3, 4, 1, 2]


@pytest.mark.parametrize("turned", [False, True])
def test_a_box_is_copied_into_another(turned: bool) -> None:
    source = shard_of(((2, 0), (4, 6), (0, 0)), ((0, 0), (2, 6), (2, 0)))
    data = torch.zeros(6, 4, dtype=torch.int32).t() if turned else torch.zeros(4, 6).int()
    target = Shard.of(data, 0)
    region = Region((1, 1), (3, 3))
    target.box(region).copy_from(source.box(region))
    assert read(target, region) == read(source, region) == [19, 20, 1, 2]
    assert int((data != 0).sum()) == 4


@pytest.mark.parametrize("source_kind", ["plain", "conj", "turned conj"])
@pytest.mark.parametrize("target_kind", ["plain", "conj", "turned conj"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugate_views_are_copied_by_value(
    source_kind: str, target_kind: str, dtype: torch.dtype
) -> None:
    def made(kind: str) -> torch.Tensor:
        data = torch.view_as_complex(torch.rand(3, 3, 2, dtype=torch.float64)).to(dtype)
        return data if kind == "plain" else data.conj() if kind == "conj" else data.conj().t()

    source, target = made(source_kind), made(target_kind)
    region = Region((0, 0), (3, 3))
    Shard.of(target, 0).box(region).copy_from(Shard.of(source, 0).box(region))
    assert torch.equal(source, target)


@pytest.mark.parametrize("negative", ["source", "target", "both"])
def test_negative_views_are_copied_by_value(negative: str) -> None:
    def made(name: str) -> torch.Tensor:
        data = torch.rand(4, dtype=torch.complex64).conj().imag
        return data if negative in (name, "both") else data.clone()

    source, target = made("source"), made("target")
    Shard.of(target, 0).box(Region((0,), (4,))).copy_from(
        Shard.of(source, 0).box(Region((0,), (4,)))
    )
    assert torch.equal(source, target)


def test_a_copy_into_itself_changes_nothing() -> None:
    for data in (counted(), counted().t()):
        box = Shard.of(data, 0).box(Region.of_shape(tuple(data.shape)))
        before = data.clone()
        box.copy_from(Shard.of(data, 0).box(Region.of_shape(tuple(data.shape))))
        assert torch.equal(data, before)


def test_bits_are_kept_where_values_would_not_be() -> None:
    """A signalling NaN, and bytes that are no bool."""
    nan = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    odd = torch.tensor([2, 255], dtype=torch.uint8).view(torch.bool)
    for source in (nan, odd):
        for target in (
            torch.zeros_like(source),
            torch.zeros(9, 2).to(source.dtype)[: len(source), 0],
        ):
            region = Region((0,), (len(source),))
            Shard.of(target, 0).box(region).copy_from(Shard.of(source, 0).box(region))
            carrier = torch.int32 if source.dtype == torch.float32 else torch.uint8
            assert target.view(carrier).tolist() == source.view(carrier).tolist()


def test_regions_are_found_quickly_among_many_pieces() -> None:
    """4 000 rows that lie in another order: each is found without a look at the others."""
    rows = 4000
    places = [(row * 7) % rows for row in range(rows)]
    pieces = tuple(
        Piece(Region((row, 0), (row + 1, 2)), (place, 0)) for row, place in enumerate(places)
    )
    shard = Shard(torch.arange(2 * rows).reshape(rows, 2), pieces)
    begin = time.process_time()
    for row, place in enumerate(places):
        (_, view), *rest = shard.box(Region((row, 0), (row + 1, 2))).views
        assert not rest
        assert view.tolist() == [[2 * place, 2 * place + 1]]
    assert time.process_time() - begin < 2  # 0.1 s where nothing else runs
    assert len(shard.box(Region((10, 1), (13, 2))).views) == 3
    assert shard.find(Region((rows - 1, 0), (rows + 1, 2))) is None
