"""Ranks learn each other's layouts, and which of them asks for something else."""

from __future__ import annotations

import pytest
import torch

from ckptx.consensus import agree_on_layouts
from distcore.testing import rank_threads
from distcore.v1 import Channel, DisagreementError, Layout, Piece, Region


def agreed(
    layouts: dict[str, Layout], channel: Channel, terms: dict[str, str | int] | None = None
) -> dict[str, Layout]:
    tensors = {key: torch.zeros(0) for key in layouts}
    return agree_on_layouts(terms or {}, layouts, tensors, channel, given=layouts, timeout_s=None)


def test_equal_layouts_are_taken_as_they_are() -> None:
    layout = Layout.from_mesh(shape=(8,), dtype="int8", mesh=[0, 1], placements=["S(0)"])
    calls = []

    class Counting:
        """Counts what is gathered."""

        def __init__(self, inner: Channel) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
            calls.append(len(row))
            return self.inner.all_gather(row, timeout_s=timeout_s)

    def job(channel: Channel) -> None:
        assert agreed({"w": layout}, Counting(channel)) == {"w": layout}  # type: ignore[arg-type]

    rank_threads(2, job).values()
    assert calls == [64] * 4  # two small rows per rank, however many tensors


def test_layouts_of_which_each_rank_knows_its_own_are_put_together() -> None:
    def job(channel: Channel) -> dict[str, Layout]:
        own = Region((4 * channel.rank,), (4 * channel.rank + 4,))
        mine = Layout(shape=(8,), dtype="int8", pieces={channel.rank: (Piece(own, (0,)),)})
        other = Layout.replicated(shape=(2, 2), dtype="int8", ranks=[channel.rank])
        return agreed({"w": mine, "b": other}, channel)

    whole = Layout.from_mesh(shape=(8,), dtype="int8", mesh=[0, 1], placements=["S(0)"])
    both = Layout.replicated(shape=(2, 2), dtype="int8", ranks=[0, 1])
    for found in rank_threads(2, job).values():
        assert found == {"w": whole, "b": both}


@pytest.mark.parametrize("what", ["key", "shape", "dtype", "term"])
def test_what_differs_is_named_on_every_rank(what: str) -> None:
    def job(channel: Channel) -> None:
        odd = channel.rank == 1
        shape = (9,) if odd and what == "shape" else (8,)
        dtype = "uint8" if odd and what == "dtype" else "int8"
        key = "v" if odd and what == "key" else "w"
        layout = Layout.replicated(shape=shape, dtype=dtype, ranks=channel.ranks)
        agreed({key: layout}, channel, {"<term>": int(odd and what == "term")})

    named = "<term>" if what == "term" else "'w'"
    for error in rank_threads(3, job).raised(DisagreementError, within_s=3):
        assert named in error.values[1]
        assert set(error.values) == {0, 1, 2}
