"""exchange on thread ranks: every algorithm, dtype and form of memory, bit for bit; bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from ckptx import CheckpointPlanError
from ckptx.distribution import ShardDistribution, distribution_of, shard_rows
from ckptx.exchange import ExchangeOptions, ExchangeReport, exchange
from ckptx.full_gather import gather_all
from ckptx.sharded import ShardedTensor, ShardId
from distcore.testing import rank_threads
from distcore.v1 import ITEMSIZES, Channel, PeerError
from distcore.v1.runtime import torch_dtype

Tensors = dict[ShardId, torch.Tensor]
Held = list[dict[str, ShardedTensor]]
ALGORITHMS = ("broadcast", "gather_rounds", "gather_object", "planned")
NEED_ONLY = pytest.mark.parametrize("algorithm", ["broadcast", "gather_rounds", "planned"])
ALL = pytest.mark.parametrize("algorithm", ALGORITHMS)
OPTIONS = ExchangeOptions(timeout_s=10)

# A quantized tensor of torch's own carries a scale beside its memory; it is refused.
DTYPES = [
    torch_dtype(name)
    for name in sorted(ITEMSIZES)
    if isinstance(getattr(torch, name, None), torch.dtype)
    and not name.startswith(("quint", "qint"))
]


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bytes as a tensor of any dtype: NaNs, subnormals and all."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=seeded(seed))
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).view(tuple(shape))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of the elements in row-major order, whatever the strides."""
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = tensor.detach()
    if plain.element_size() in carrier:
        plain = plain.view(carrier[plain.element_size()])
    # One element lies in order whatever its stride, which `view` does not know.
    flat = plain.contiguous().as_strided((plain.numel(),), (1,))
    found: list[int] = flat.view(torch.uint8).tolist()
    return found


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in another order of memory."""
    if how == "transposed" and tensor.ndim >= 2:
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        kind = carrier.get(tensor.element_size(), tensor.dtype)
        other = tensor.view(kind).transpose(0, 1).contiguous().transpose(0, 1)
        return other.view(tensor.dtype)
    if how == "sliced" and tensor.ndim >= 1 and tensor.numel():
        wide = torch.zeros((*tensor.shape, 2), dtype=torch.uint8).repeat_interleave(
            tensor.element_size(), dim=-1
        )
        out = wide.view(tensor.dtype)[..., 0]
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        kind = carrier.get(tensor.element_size(), tensor.dtype)
        out.view(kind).copy_(tensor.view(kind))
        return out
    return tensor


def metadata(
    key: str, like: torch.Tensor, *, offset: tuple[int, ...] | None = None, replica: int = 0
) -> ShardedTensor:
    """A shard of an irregular grid, so that any offset goes."""
    shape = tuple(like.shape)
    offset = (0,) * len(shape) if offset is None else offset
    whole = tuple(n + at for n, at in zip(shape, offset, strict=True))
    return ShardedTensor(key, None, like.dtype, shape, whole, offset, None, replica)


class Case:
    """Who holds which of some tensors; the distribution, and a run of an algorithm over it."""

    def __init__(
        self,
        values: dict[str, torch.Tensor],
        holders: Mapping[str, Sequence[int]],
        size: int | None = None,
    ) -> None:
        self.values = values
        self.size = size or 1 + max(rank for ranks in holders.values() for rank in ranks)
        self.shards = [
            [
                metadata(key, values[key], replica=list(holders[key]).index(rank))
                for key in values
                if rank in holders[key]
            ]
            for rank in range(self.size)
        ]
        self.distribution: ShardDistribution = distribution_of(
            shard_rows(self.shards), self.size, ignore_groups=True
        )

    def loaded(self, rank: int) -> Tensors:
        return {
            name: self.values[name[0]]
            for name, main in self.distribution.main_rank_for_shard.items()
            if main == rank
        }

    def needed(self, rank: int) -> dict[ShardId, ShardedTensor]:
        mine = self.loaded(rank)
        return {s.shard_id: s for s in self.shards[rank] if s.shard_id not in mine}

    def run(
        self, channel: Channel, algorithm: str, options: ExchangeOptions = OPTIONS
    ) -> tuple[Tensors, ExchangeReport | None]:
        loaded, needed = self.loaded(channel.rank), self.needed(channel.rank)
        if algorithm == "gather_object":
            return gather_all(loaded, needed, channel, options=options), None
        return exchange(
            loaded, needed, self.distribution, channel, algorithm=algorithm, options=options
        )

    def keys(self, rank: int, algorithm: str) -> set[str]:
        """The keys that an algorithm must return on a rank."""
        if algorithm == "gather_object":
            return set(self.values)
        return {name[0] for name in [*self.loaded(rank), *self.needed(rank)]}

    def check(self, algorithm: str, options: ExchangeOptions = OPTIONS) -> None:
        def job(channel: Channel) -> None:
            found, report = self.run(channel, algorithm, options)
            assert {name[0] for name in found} == self.keys(channel.rank, algorithm)
            for name, tensor in found.items():
                assert tensor.dtype == self.values[name[0]].dtype
                assert tensor.shape == self.values[name[0]].shape
                assert bits(tensor) == bits(self.values[name[0]]), name
            if report is not None:
                assert report.bytes_received == report.lower_bound_received

        rank_threads(self.size, job).values()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(2, 4))
    ranks = st.lists(st.integers(0, size - 1), min_size=1, max_size=size, unique=True)
    values, holders = {}, {}
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        how = draw(st.sampled_from(["plain", "transposed", "sliced"]))
        values[f"k{number}"] = strided(noise(shape, dtype, number), how)
        holders[f"k{number}"] = draw(ranks)
    return Case(values, holders, size)


@ALL
@settings(
    max_examples=12,
    deadline=None,
    # A failing example costs its timeout: do not look for a smaller one.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(case=cases())
def test_every_algorithm_gives_the_bits_of_a_direct_copy(algorithm: str, case: Case) -> None:
    case.check(algorithm)


@ALL
def test_every_dtype_arrives_bit_for_bit(algorithm: str) -> None:
    values = {
        f"{dtype} {kind}": strided(noise(shape, dtype, at), kind)
        for at, dtype in enumerate(DTYPES)
        for kind, shape in {
            "flat": (6, 5),
            "transposed": (6, 5),
            "0-d": (),
            "empty": (0, 3),
        }.items()
    }
    Case(values, dict.fromkeys(values, (0, 1))).check(algorithm)


# Reports of others that must not come back


@NEED_ONLY
def test_megatron_3738_unequal_sizes_and_mixed_dtypes_in_rounds(algorithm: str) -> None:
    values = {
        "a": noise((7,), torch.bfloat16, 1),
        "b": noise((3, 5), torch.float32, 2),
        "c": noise((1,), torch.bfloat16, 3),
        "d": noise((64,), torch.float32, 4),
        "e": noise((2, 2), torch.bfloat16, 5),
        "f": noise((9,), torch.int8, 6),
        "g": noise((33,), torch.bfloat16, 7),
    }
    Case(values, dict.fromkeys(values, (0, 1, 2))).check(algorithm)


@ALL
def test_pytorch_192920_a_transposed_tensor_keeps_its_logical_order(algorithm: str) -> None:
    value = torch.arange(6).view(2, 3).t()
    case = Case({"w": value}, {"w": (0, 1)})

    def job(channel: Channel) -> list[list[int]]:
        found, _ = case.run(channel, algorithm)
        return found["w", (0, 0), None].tolist()

    assert rank_threads(2, job).values() == ([[0, 3], [1, 4], [2, 5]],) * 2


@ALL
def test_pytorch_163483_channels_last_keeps_its_logical_order(algorithm: str) -> None:
    value = noise((2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last)
    Case({"w": value}, {"w": (0, 1, 2)}).check(algorithm)


@ALL
def test_megatron_1126_float8_is_never_converted(algorithm: str) -> None:
    """All 256 codes, NaNs among them, and in a dtype that gloo refuses to send."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = {
        f"{dtype}": codes.view(dtype)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
    }
    values["uint16"] = noise((5,), torch.uint16)
    Case(values, dict.fromkeys(values, (0, 1))).check(algorithm)


@NEED_ONLY
def test_expert_parallel_bytes_are_the_minimum(algorithm: str) -> None:
    """16 ranks, 64 experts of 100 bytes needed by 2 ranks each, 400 bytes by all: 12 400."""
    values = {f"e{i:02}": noise((100,), torch.uint8, i) for i in range(64)}
    holders: dict[str, Sequence[int]] = {f"e{i:02}": (i // 8, i // 8 + 8) for i in range(64)}
    values["shared"] = noise((400,), torch.uint8, 99)
    holders["shared"] = range(16)
    case = Case(values, holders)

    def job(channel: Channel) -> int:
        _, report = case.run(channel, algorithm)
        assert report is not None
        assert report.bytes_received == report.lower_bound_received
        return report.bytes_received

    assert sum(rank_threads(16, job).values()) == 12_400


@NEED_ONLY
def test_torchtitan_4035_only_those_who_need_a_shard_get_it(algorithm: str) -> None:
    """Three ranks of research's example 8: 4 times A, B once; nothing of U."""
    values = {"A": noise((2,), torch.float32, 1), "B": noise((3,), torch.float32, 2)}
    case = Case(values, {"A": (0, 1, 2), "B": (0, 1)})

    def job(channel: Channel) -> tuple[int, int]:
        _, report = case.run(channel, algorithm)
        assert report is not None
        return report.bytes_sent, report.bytes_received

    found = rank_threads(3, job).values()
    assert sum(sent for sent, _ in found) == sum(got for _, got in found) == 2 * 8 + 12


@ALL
def test_safetensors_280_shapes_without_elements_or_dims(algorithm: str) -> None:
    values = {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0),
        "none": torch.empty(3, 0, dtype=torch.int64),
    }
    Case(values, dict.fromkeys(values, (0, 1))).check(algorithm)


@NEED_ONLY
def test_sglang_29272_a_shard_arrives_on_its_own_device_and_in_place(algorithm: str) -> None:
    value = noise((4, 6), torch.float32)
    case = Case({"w": value}, {"w": (0, 1)})
    name = ("w", (0, 0), None)

    def job(channel: Channel) -> None:
        needed = case.needed(channel.rank)
        data = torch.zeros(6, 4).t()
        if name in needed:
            needed[name].data = data
        found, _ = exchange(
            case.loaded(channel.rank),
            needed,
            case.distribution,
            channel,
            algorithm=algorithm,
            options=OPTIONS,
        )
        if name in needed:
            assert found[name] is data
            assert bits(data) == bits(value)

    rank_threads(2, job).values()


def test_megatron_2339_a_shard_that_is_contiguous_needs_no_second_copy() -> None:
    """Received in place over sockets too: the budget is far below the tensor."""
    value = noise((1 << 20,), torch.float32)
    case = Case({"w": value}, {"w": (0, 1)})
    options = ExchangeOptions(max_staging_bytes=1 << 16, same_host="off", timeout_s=20)
    case.check("planned", options)


def test_inputs_are_left_as_they_were() -> None:
    case = Case({"w": noise((4,), torch.float32)}, {"w": (0, 1)})

    def job(channel: Channel) -> None:
        loaded, needed = case.loaded(channel.rank), case.needed(channel.rank)
        before = dict(loaded), dict(needed)
        exchange(loaded, needed, case.distribution, channel, options=OPTIONS)
        assert (loaded, needed) == before
        assert all(shard.data is None for shard in needed.values())

    rank_threads(2, job).values()


# Quantised tensors


def quantised(seed: int) -> TwoTensor:
    """A tensor of another class, with two tensors inside."""
    inner = noise((4, 3), torch.float32, seed), noise((4, 3), torch.float32, seed + 1)
    return TwoTensor(*inner)


def run_quantised(
    algorithm: str, template: Callable[[], torch.Tensor | None]
) -> Callable[[Channel], torch.Tensor]:
    value = quantised(1)
    case = Case({"w": torch.empty(4, 3)}, {"w": (0, 1)})
    name: ShardId = ("w", (0, 0), None)

    def job(channel: Channel) -> torch.Tensor:
        loaded: Tensors = {name: value} if channel.rank == 0 else {}
        needed = case.needed(channel.rank)
        if name in needed:
            needed[name].data = template()
        if algorithm == "gather_object":
            return gather_all(loaded, needed, channel, options=OPTIONS)[name]
        found, _ = exchange(
            loaded, needed, case.distribution, channel, algorithm=algorithm, options=OPTIONS
        )
        return found[name]

    return job


@ALL
def test_megatron_6666_a_quantised_tensor_moves_as_its_inner_tensors(algorithm: str) -> None:
    found = rank_threads(2, run_quantised(algorithm, lambda: quantised(5))).values()
    for tensor in found:
        assert isinstance(tensor, TwoTensor)
        assert bits(tensor.a) == bits(quantised(1).a)
        assert bits(tensor.b) == bits(quantised(1).b)


@ALL
@pytest.mark.parametrize("plain", [True, False])
def test_a_quantised_tensor_is_refused_where_there_is_none_to_receive_it(
    algorithm: str, plain: bool
) -> None:
    job = run_quantised(algorithm, lambda: torch.zeros(4, 3) if plain else None)
    for error in rank_threads(2, job).raised(PeerError, within_s=5):
        assert list(error.failures) == [1]
        assert "w at [0, 0]" in error.failures[1]
        assert "TwoTensor" in error.failures[1]


# Failing twins


def flip_a_bit(buffer: torch.Tensor) -> None:
    if buffer.numel() > 32:
        buffer[7] ^= 1


def test_torchtitan_4011_a_bit_that_flips_on_the_way_is_found(
    tapped: Callable[..., Any],
) -> None:
    options = ExchangeOptions(verify="xxh3", timeout_s=10)

    def job(channel: Channel) -> None:
        value = {"w": noise((64,), torch.float32)}
        case = Case(value, {"w": (0, 1)})
        wire = tapped(channel, flip_a_bit if channel.rank == 0 else lambda _: None)
        case.run(wire, "planned", options)

    for error in rank_threads(2, job).raised(PeerError, within_s=10):
        assert "w at [0]" in str(error)


@pytest.mark.parametrize("algorithm", ["broadcast", "gather_rounds"])
def test_an_algorithm_that_cannot_verify_says_so(algorithm: str) -> None:
    case = Case({"w": noise((4,), torch.float32)}, {"w": (0, 1)})

    def job(channel: Channel) -> None:
        case.run(channel, algorithm, ExchangeOptions(verify="xxh3", timeout_s=5))

    errors = rank_threads(2, job).raised(CheckpointPlanError, within_s=5)
    assert "does not verify" in str(errors[0])


@ALL
def test_room_that_one_rank_cannot_make_fails_all(algorithm: str) -> None:
    case = Case({"w": noise((4,), torch.float32)}, {"w": (0, 1)})

    def job(channel: Channel) -> None:
        device = "nowhere" if channel.rank == 1 else None
        case.run(channel, algorithm, ExchangeOptions(device=device, timeout_s=5))

    for error in rank_threads(2, job).raised(PeerError, within_s=5):
        assert list(error.failures) == [1]
        assert "nowhere" in error.failures[1]


class Hollow(torch.Tensor):
    """A tensor without memory that does not tell what is inside."""

    @classmethod
    def of(cls, like: torch.Tensor) -> Hollow:
        made: Hollow = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(f"a Hollow has nothing for {func}")


@NEED_ONLY
@pytest.mark.parametrize("count", [1, 80])
def test_a_tensor_that_cannot_be_sent_fails_all_before_anything_moves(
    algorithm: str, count: int
) -> None:
    """Alone, and beside so many small shards that those are packed."""
    tensors = {f"w{at:02}": noise((4,), torch.float32) for at in range(count)}
    case = Case(tensors, dict.fromkeys(tensors, (0, 1)))

    def job(channel: Channel) -> None:
        loaded, needed = case.loaded(channel.rank), case.needed(channel.rank)
        for shard in needed.values():
            shard.data = torch.full((4,), 3.0)
        if channel.rank == 0:
            name = next(iter(loaded))
            loaded[name] = Hollow.of(loaded[name])
        try:
            exchange(
                loaded, needed, case.distribution, channel, algorithm=algorithm, options=OPTIONS
            )
        finally:
            places = [shard.data for shard in needed.values() if shard.data is not None]
            if not all(bool((place == 3).all()) for place in places):
                raise RuntimeError("something moved")

    for error in rank_threads(2, job).raised(PeerError, within_s=5):
        assert list(error.failures) == [0]
        assert "Hollow" in error.failures[0]


@pytest.mark.parametrize("algorithm", ["broadcast", "gather_rounds"])
def test_a_tensor_that_cannot_be_written_fails_all_at_the_end(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here in mid-exchange: the peers' messages still arrive, then all raise."""
    case = Case({"w": noise((4, 2), torch.float32)}, {"w": (0, 1)})
    name = ("w", (0, 0), None)

    def job(channel: Channel) -> None:
        needed = case.needed(channel.rank)
        if name in needed:
            # Strided, so that it is unpacked; and written in the order of an expanded tensor.
            needed[name].data = torch.zeros(4, 1).expand(4, 2)
        exchange(
            case.loaded(channel.rank),
            needed,
            case.distribution,
            channel,
            algorithm=algorithm,
            options=OPTIONS,
        )

    for error in rank_threads(2, job).raised(PeerError, within_s=10):
        assert list(error.failures) == [1]
