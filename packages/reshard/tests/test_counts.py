"""Counts: ints with names, as attributes and as a mapping."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from reshard.counts import Counts


@dataclass(frozen=True, slots=True)
class Pair(Counts):
    later: int
    sooner: int


def test_fields_are_items_in_their_order() -> None:
    pair = Pair(later=2, sooner=1)
    assert list(pair.items()) == [("later", 2), ("sooner", 1)]
    assert len(pair) == 2
    assert "sooner" in pair
    assert dict(pair) == {"sooner": 1, "later": 2}
    for name in ("latest", "items"):
        with pytest.raises(KeyError):
            pair[name]
