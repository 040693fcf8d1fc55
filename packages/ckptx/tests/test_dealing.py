"""dealing: every byte goes to one rank that needs it, evenly, and in file order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptx.cell import Cell
from ckptx.dealing import deal
from ckptx.stored import Chunk
from ckptx.unit import Unit
from distcore.v1 import Region


def unit(key: str, begin: int, nbytes: int, *ranks: int, file: str = "dir/f") -> Unit:
    """Bytes of a file that some ranks need."""
    region = Region((0,), (nbytes,))
    return Unit(key, Chunk(region, file, begin), region, (Cell(region, ranks),), 1, staged=False)


def in_a_row(*sizes: tuple[int, tuple[int, ...]]) -> list[Unit]:
    found, begin = [], 0
    for number, (nbytes, ranks) in enumerate(sizes):
        found.append(unit(f"u{number:02}", begin, nbytes, *ranks))
        begin += nbytes
    return found


def loads(dealt: list[tuple[int, Unit]], ranks: list[int]) -> list[int]:
    return [sum(part.nbytes for to, part in dealt if to == rank) for rank in ranks]


def test_each_rank_gets_one_run_of_the_file() -> None:
    both = (3, 5)
    units = in_a_row(*[(10, both)] * 8)
    dealt, slowest = deal(units, [3, 5], 1)
    assert [(rank, part.key) for rank, part in dealt] == [
        *((3, f"u{i:02}") for i in range(4)),
        *((5, f"u{i:02}") for i in range(4, 8)),
    ]
    assert slowest == 40


def test_a_large_unit_is_cut_and_a_small_one_is_not() -> None:
    units = in_a_row((100, (0, 1)))
    assert loads(deal(units, [0, 1], 10)[0], [0, 1]) == [50, 50]
    assert sorted(loads(deal(units, [0, 1], 51)[0], [0, 1])) == [0, 100]


def test_who_has_much_of_its_own_takes_less_of_the_rest() -> None:
    units = in_a_row((300, (0,)), (100, (0, 1, 2)), (300, (0, 1, 2)), (60, (2,)))
    dealt, slowest = deal(units, [0, 1, 2], 1)
    assert slowest == 300
    assert max(loads(dealt, [0, 1, 2])) <= 306
    assert all(rank in part.ranks for rank, part in dealt)


def test_where_even_shares_are_not_the_best_the_best_counts() -> None:
    """Ranks 0 and 1 share one set, 1 and 2 another; rank 1 must leave both to the others."""
    units = in_a_row((100, (0, 1)), (100, (1, 2)), (100, (1,)))
    dealt, slowest = deal(units, [0, 1, 2], 1)
    assert slowest == 100
    assert max(loads(dealt, [0, 1, 2])) <= 104


def test_directories_do_not_change_the_order() -> None:
    def keys(a: str, b: str) -> list[str]:
        units = [unit("x", 0, 8, 0, file=f"{b}/one"), unit("y", 0, 8, 0, file=f"{a}/two")]
        return [part.key for _, part in deal(units, [0], 1)[0]]

    assert keys("p", "q") == keys("q", "p") == ["x", "y"]


@given(st.data())
def test_every_byte_goes_to_one_rank_that_needs_it(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    ranks = data.draw(st.permutations([7, 2, 9, 4]))[:size]
    chosen = st.sets(st.sampled_from(ranks), min_size=1).map(tuple)
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 50), chosen), max_size=8))
    units = in_a_row(*sizes)
    dealt, slowest = deal(units, ranks, data.draw(st.integers(1, 20)))
    assert all(rank in part.ranks for rank, part in dealt)
    places = sorted((part.offset, part.offset + part.nbytes) for _, part in dealt)
    end = 0
    for low, high in places:
        assert low == end
        end = high
    assert end == sum(nbytes for nbytes, _ in sizes)
    assert max(loads(dealt, ranks), default=0) >= slowest
