"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from distcore.testing import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks in processes of their own, with a default gloo group."""
    from distcore.testing import rank_pool  # late, so that planners' tests load no torch

    with rank_pool(4) as pool:
        yield pool
