"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distcore.testing import RankPool, rank_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks in processes of their own, with a default gloo group."""
    with rank_pool(4) as pool:
        yield pool
