"""Four ranks for the tests of this folder, as processes that stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distcore.testing import RankPool, rank_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as ranks:
        yield ranks
