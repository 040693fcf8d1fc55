"""What a PGTransport is before any transfer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from fttransport.pg_transport import BUCKET_NBYTES, PGTransport, _buckets


def test_nothing_is_asked_of_the_group_until_a_transfer() -> None:
    transport: PGTransport[Any] = PGTransport(object(), timedelta(seconds=1), torch.device("cpu"))
    assert transport.metadata() == "<n/a>"
    transport.disallow_checkpoint()
    transport.shutdown()


def test_buckets_have_one_size_but_the_last() -> None:
    assert _buckets(0) == []
    assert _buckets(5) == [(0, 5)]
    size = BUCKET_NBYTES
    assert _buckets(2 * size + 1) == [(0, size), (size, 2 * size), (2 * size, 2 * size + 1)]
