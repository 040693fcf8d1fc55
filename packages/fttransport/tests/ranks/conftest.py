"""Fixtures of the tests that need ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distcore.testing import RankPool, rank_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Two ranks in processes of their own, with a default gloo group."""
    with rank_pool(2) as pool:
        yield pool
