"""Packed shards between thread ranks: bit for bit, within the budget, and the failing twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptx.distribution import distribution_of, shard_rows
from ckptx.exchange import ExchangeOptions, exchange
from ckptx.sharded import ShardedTensor, ShardId
from distcore.testing import rank_threads
from distcore.v1 import Channel, DisagreementError, PeerError

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex64]
Values = dict[str, torch.Tensor]


def values_of(count: int) -> Values:
    found: Values = {}
    for at in range(count):
        dtype = DTYPES[at % len(DTYPES)]
        shape = (at % 4, 3) if at % 7 else ()
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        raw = (torch.arange(nbytes) * 31 + at).to(torch.uint8)
        found[f"t{at:03}"] = raw.view(dtype).view(shape)
    return found


def bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return list(flat.view(torch.uint8).tolist())


def run(
    values: Values,
    channel: Channel,
    options: ExchangeOptions,
    data: dict[str, torch.Tensor] | None = None,
) -> tuple[dict[ShardId, torch.Tensor], int]:
    """Exchange replicas of all values; `data` are tensors to receive in."""
    shards = [
        ShardedTensor.from_rank_offsets(key, tensor, replica_id=channel.rank)
        for key, tensor in values.items()
    ]
    others = [[shard.without_data() for shard in shards]] * channel.size
    distribution = distribution_of(shard_rows(others), channel.size, ignore_groups=True)
    mains = distribution.main_rank_for_shard
    loaded = {s.shard_id: values[s.key] for s in shards if mains[s.shard_id] == channel.index}
    needed = {s.shard_id: s.without_data() for s in shards if s.shard_id not in loaded}
    for shard in needed.values():
        shard.data = (data or {}).get(shard.key)
    found, report = exchange(loaded, needed, distribution, channel, options=options)
    assert report.bytes_received == report.lower_bound_received
    return found, report.bytes_received


@pytest.mark.parametrize("same_host", ["auto", "off"])
@pytest.mark.parametrize("budget", [1 << 16, 1 << 26])
@pytest.mark.parametrize("count", [40, 150])
def test_packed_or_not_the_bits_are_the_same(count: int, budget: int, same_host: str) -> None:
    values = values_of(count)
    options = ExchangeOptions(
        max_staging_bytes=budget,
        timeout_s=10,
        same_host=same_host,  # type: ignore[arg-type]
    )

    def job(channel: Channel) -> None:
        found, _ = run(values, channel, options)
        assert {name[0] for name in found} == set(values)
        for name, tensor in found.items():
            assert tensor.dtype == values[name[0]].dtype
            assert bits(tensor) == bits(values[name[0]]), name

    rank_threads(3, job).values()


def test_packed_shards_arrive_in_their_own_strided_data() -> None:
    values = values_of(100)
    data = {"t009": torch.zeros(3, 1, dtype=values["t009"].dtype).t()}

    def job(channel: Channel) -> bool:
        own = {key: tensor.clone() for key, tensor in data.items()}
        found, _ = run(values, channel, ExchangeOptions(timeout_s=10), own)
        tensor = found["t009", (0, 0), None]
        assert bits(tensor) == bits(values["t009"])
        return tensor is own["t009"]

    assert sorted(rank_threads(2, job).values()) == [False, True]


def test_ranks_that_take_a_packed_shard_for_another_dtype_see_which() -> None:
    def job(channel: Channel) -> None:
        values = values_of(100)
        if channel.rank == 1:
            values["t050"] = values["t050"].view(torch.int32)
        run(values, channel, ExchangeOptions(timeout_s=10))

    for error in rank_threads(2, job).raised(DisagreementError, within_s=10):
        assert "t050" in str(error)
        assert "t051" not in str(error)


def test_a_packed_shard_that_cannot_be_written_fails_all_ranks() -> None:
    values = values_of(100) | {"wide": torch.ones(4, 2)}

    def job(channel: Channel) -> None:
        wide = torch.zeros(4, 1).expand(4, 2)
        run(values, channel, ExchangeOptions(timeout_s=10), {"wide": wide})

    for error in rank_threads(2, job).raised(PeerError, within_s=10):
        assert len(error.failures) == 1


def test_a_thousand_small_shards_are_a_few_messages(tapped: Callable[..., Any]) -> None:
    """One collective per tensor costs a millisecond each, whatever its size."""
    values = {f"t{at:04}": torch.full((1024,), float(at)) for at in range(1000)}

    def job(channel: Channel) -> int:
        buffers: list[torch.Tensor] = []
        wire = tapped(channel, buffers.append)
        run(values, wire, ExchangeOptions(same_host="off", timeout_s=10))
        return len(buffers)

    assert rank_threads(2, job).values() == (1, 1)
