"""Execute: afterwards every destination holds what the plan gives it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distcore.testing import rank_threads
from distcore.v1 import Channel, Message, Pending, Piece, Plan, Region, Transfer
from distcore.v1.dtypes import ITEMSIZES
from distcore.v1.errors import PeerError
from distcore.v1.runtime import Executor, GroupChannel, Shard, execute, torch_dtype

KIB, MIB = 1 << 10, 1 << 20
SameHost = Literal["auto", "off"]
Tensors = dict[str, torch.Tensor]

# Quantized tensors carry a scale beside their memory; they are refused.
DTYPES = sorted(
    name
    for name in ITEMSIZES
    if isinstance(getattr(torch, name, None), torch.dtype)
    and not name.startswith(("quint", "qint"))
)
MODES = pytest.mark.parametrize(
    ("same_host", "verify"), [("off", None), ("off", "xxh3"), ("auto", None), ("auto", "xxh3")]
)


def whole(*shape: int) -> Region:
    return Region.of_shape(shape)


def noise(shape: Sequence[int], dtype: str, seed: int = 0) -> torch.Tensor:
    """Random bytes as a tensor of any dtype: NaNs, subnormals and all."""
    nbytes = ITEMSIZES[dtype]
    for n in shape:
        nbytes *= n
    found = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=seeded(seed))
    return found.view(torch_dtype(dtype)).view(tuple(shape))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def empty(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return (
        torch.zeros(noise(shape, dtype).nbytes, dtype=torch.uint8)
        .view(torch_dtype(dtype))
        .view(tuple(shape))
    )


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of the elements in row-major order, whatever the strides."""
    item = tensor.element_size()
    plain = tensor.detach().resolve_conj().resolve_neg()
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(item)
    plain = plain if carrier is None else plain.view(carrier)
    return plain.contiguous().view(-1).view(torch.uint8).tolist()


# Every dtype


@MODES
def test_every_dtype_arrives_bit_for_bit(same_host: SameHost, verify: Any) -> None:
    shapes = {"flat": (6, 5), "scalar": (), "turned": (6, 5), "none": (0, 3)}
    plan = Plan(
        Transfer(f"{dtype} {kind}", 0, 1, whole(*shape))
        for dtype in DTYPES
        for kind, shape in shapes.items()
    )

    def move(channel: Channel) -> Tensors:
        sources: Tensors = {}
        destinations: Tensors = {}
        for dtype in DTYPES:
            for kind, shape in shapes.items():
                key = f"{dtype} {kind}"
                if channel.rank == 0:
                    sources[key] = noise(shape, dtype)
                else:
                    turned = empty(shape[::-1], dtype).t() if kind == "turned" else None
                    destinations[key] = empty(shape, dtype) if turned is None else turned
        execute(plan, channel, sources, destinations, same_host=same_host, verify=verify)
        return {**sources, **destinations}

    sent, received = rank_threads(2, move).values()
    assert {key: bits(tensor) for key, tensor in received.items()} == {
        key: bits(tensor) for key, tensor in sent.items()
    }
    assert len(DTYPES) >= 35


# Every form of memory


def strided() -> torch.Tensor:
    return torch.arange(240.0).view(4, 6, 10)[::2, :, 1::3]  # (2, 6, 3)


FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.rand(2, 6, 3),
    "transposed": lambda: torch.rand(3, 6, 2).transpose(0, 2),
    "strided": strided,
    "expanded": lambda: torch.rand(2, 1, 3).expand(2, 6, 3),
    "offset": lambda: torch.rand(37)[1:].view(2, 6, 3),
    "channels_last": lambda: (
        torch.rand(2, 3, 6, 1).to(memory_format=torch.channels_last)[..., 0].transpose(1, 2)
    ),
    "parameter": lambda: torch.nn.Parameter(torch.rand(2, 6, 3)),
    "part of a graph": lambda: torch.rand(2, 6, 3, requires_grad=True) * 2,
    "conjugate": lambda: torch.rand(2, 6, 3, dtype=torch.complex64).conj(),
    "conjugate, transposed": lambda: torch.rand(3, 6, 2, dtype=torch.complex64).conj().T,
    "negative": lambda: torch.rand(2, 6, 3, dtype=torch.complex128).conj().imag,
    "half conjugate": lambda: torch.rand(2, 6, 3).to(torch.complex32).conj(),
    "one element, wide stride": lambda: torch.rand(9, 5)[3:4, 2:3],
    "inference": lambda: torch.rand(2, 6, 3),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental", "ignore:The use of")
@pytest.mark.parametrize("verify", [None, "xxh3"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_memory_is_read_and_written(form: str, verify: Any) -> None:
    mode = torch.inference_mode if form.startswith("inference") else nullcontext
    with mode():
        source = FORMS[form]()
        written = FORMS["contiguous" if form == "expanded" else form]().to(source.dtype)
        local = FORMS["contiguous" if form == "expanded" else form]().to(source.dtype)
        plain = torch.zeros(source.shape, dtype=source.dtype)
    region = Region.of_shape(tuple(source.shape))
    plan = Plan(
        [
            Transfer("out", 0, 1, region),
            Transfer("in", 0, 1, region),
            Transfer("own", 0, 0, region),
        ]
    )

    def move(channel: Channel) -> None:
        sources = {"out": source, "in": source, "own": source}
        destinations = {"out": plain, "in": written, "own": local}
        execute(plan, channel, sources, destinations, verify=verify, max_staging_bytes=64 * KIB)

    rank_threads(2, move).values()
    for moved in (plain, written, local):
        assert bits(moved) == bits(source)


def test_what_lies_beside_a_strided_destination_stays() -> None:
    around = torch.zeros(6, 8)
    plan = Plan([Transfer("w", 0, 1, Region((1, 2), (3, 4)))])

    def move(channel: Channel) -> None:
        execute(plan, channel, {"w": torch.ones(3, 4)}, {"w": around[::2, ::2]})

    rank_threads(2, move).values()
    assert around.sum() == 4
    assert around[2:5:2, 4:8:2].tolist() == [[1, 1], [1, 1]]


# Every kind of rank


def test_shards_with_several_pieces_are_read_and_written() -> None:
    # Rank 0 holds rows 0, 1, 4, 5; rank 1 rows 2, 3, 6, 7: each wants what the other has.
    rows = {0: ((0, 2), (4, 6)), 1: ((2, 4), (6, 8))}
    data = torch.arange(32).view(8, 4)

    def pieces(rank: int) -> tuple[Piece, ...]:
        return tuple(
            Piece(Region((low, 0), (high, 4)), (2 * place, 0))
            for place, (low, high) in enumerate(rows[rank])
        )

    # Rows 1 to 5 touch both pieces of rank 0; it has 1, 4 and 5 of them.
    plan = Plan(
        [
            Transfer("w", 0, 1, Region((0, 0), (2, 4))),
            Transfer("w", 0, 1, Region((4, 1), (6, 3))),
            Transfer("w", 1, 0, Region((3, 0), (4, 4))),
        ]
    )

    def move(channel: Channel) -> list[list[int]]:
        mine = torch.cat([data[low:high] for low, high in rows[channel.rank]])
        other = Shard(torch.zeros_like(mine), pieces(1 - channel.rank))
        execute(plan, channel, {"w": Shard(mine, pieces(channel.rank))}, {"w": other})
        return other.data.tolist()

    assert rank_threads(2, move).values() == (
        [[0] * 4, [12, 13, 14, 15], [0] * 4, [0] * 4],
        [[0, 1, 2, 3], [4, 5, 6, 7], [0, 17, 18, 0], [0, 21, 22, 0]],
    )


def test_a_region_may_lie_in_several_pieces_at_both_ends() -> None:
    source = Shard(
        torch.tensor([2, 3, 0, 1]),
        (Piece(Region((0,), (2,)), (2,)), Piece(Region((2,), (4,)), (0,))),
    )
    target = Shard(
        torch.zeros(5, dtype=torch.int64),
        (
            Piece(Region((0,), (1,)), (4,)),
            Piece(Region((1,), (3,)), (1,)),
            Piece(Region((3,), (4,)), (0,)),
        ),
    )
    plan = Plan([Transfer("w", 0, 1, whole(4)), Transfer("w", 0, 0, whole(4))])

    def move(channel: Channel) -> list[int]:
        own = Shard(torch.zeros_like(target.data), target.pieces)
        execute(plan, channel, {"w": source}, {"w": own}, verify="xxh3")
        return own.data.tolist()

    assert rank_threads(2, move).values() == ([3, 1, 2, 0, 0],) * 2


def test_one_rank_copies_to_itself() -> None:
    plan = Plan([Transfer("w", 0, 0, Region((1, 0), (3, 2)))])

    def move(channel: Channel) -> tuple[list[list[int]], int, int]:
        target = torch.zeros(3, 2, dtype=torch.uint16)
        source = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.uint16)
        report = execute(plan, channel, {"w": source}, {"w": target})
        return target.tolist(), report.nbytes_local, report.staging_nbytes

    assert rank_threads(1, move).values() == (([[0, 0], [2, 3], [4, 5]], 8, 0),)


def test_ranks_may_have_any_numbers_and_no_part_in_the_plan() -> None:
    ranks = (11, 4, 7, 2)
    plan = Plan([Transfer("w", 2, 11, whole(3)), Transfer("w", 11, 2, whole(3))])

    def move(channel: GroupChannel) -> list[int]:
        own = GroupChannel(channel.group, ranks=ranks)
        target = torch.zeros(3, dtype=torch.int64)
        execute(plan, own, {"w": torch.full((3,), own.rank)}, {"w": target})
        return target.tolist()

    assert rank_threads(4, move).values() == ([2] * 3, [0] * 3, [0] * 3, [11] * 3)


def test_an_empty_plan_is_a_meeting() -> None:
    def move(channel: Channel) -> int:
        return execute(Plan(), channel, {}, {}).rounds

    assert rank_threads(3, move).values() == (0, 0, 0)


def test_a_source_may_be_a_destination_where_both_hold_the_same() -> None:
    plan = Plan([Transfer("w", src, 1 - src, Region((2 * src,), (2 * src + 2,))) for src in (0, 1)])

    def move(channel: Channel) -> list[int]:
        shared = torch.zeros(4, dtype=torch.int64)
        shared[2 * channel.rank : 2 * channel.rank + 2] = channel.rank + 5
        execute(plan, channel, {"w": shared}, {"w": shared})
        return shared.tolist()

    assert rank_threads(2, move).values() == ([5, 5, 6, 6],) * 2


# Any budget


@MODES
@pytest.mark.parametrize("staging", [64 * KIB, MIB])
def test_regions_larger_than_the_staging_arrive(
    staging: int, same_host: SameHost, verify: Any
) -> None:
    plan = Plan(
        [
            *(Transfer("turned", 0, dst, whole(120, 201)) for dst in (1, 2)),
            *(Transfer("flat", 1, dst, whole(120, 201)) for dst in (0, 2)),
            *(Transfer(f"small {n}", 2, 0, whole(n)) for n in range(300)),
        ]
    )

    def tensors(rank: int) -> Tensors:
        made = {
            "turned": torch.zeros(201, 120, dtype=torch.float64).t(),
            "flat": torch.zeros(120, 201, dtype=torch.float64),
            **{f"small {n}": torch.zeros(n, dtype=torch.int16) for n in range(300)},
        }
        for n, tensor in enumerate(made.values()):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 1009 + n + rank)
        return made

    def move(channel: Channel) -> Tensors:
        destinations = tensors(0)
        report = execute(
            plan,
            channel,
            tensors(channel.rank),
            destinations,
            max_staging_bytes=staging,
            verify=verify,
            same_host=same_host,
        )
        assert report.staging_nbytes <= staging
        return destinations

    moved = rank_threads(3, move).values()
    for key, src, receivers in (("turned", 0, (1, 2)), ("flat", 1, (0, 2)), ("small 299", 2, (0,))):
        for dst in receivers:
            assert torch.equal(moved[dst][key], tensors(src)[key])


# What is told


def test_the_report_counts_the_bytes_of_the_plan() -> None:
    plan = Plan(
        [
            Transfer("a", 0, 1, whole(10)),
            Transfer("a", 0, 0, whole(10)),
            Transfer("b", 1, 0, whole(3)),
            Transfer("b", 1, 0, whole(0)),
        ]
    )

    def move(channel: Channel) -> tuple[int, ...]:
        tensors = {"a": torch.zeros(10), "b": torch.zeros(3, dtype=torch.bool)}
        report = execute(plan, channel, tensors, {key: t.clone() for key, t in tensors.items()})
        assert 0 < report.seconds < 20
        return (
            report.nbytes_sent,
            report.nbytes_received,
            report.nbytes_local,
            report.messages,
            report.rounds,
        )

    assert rank_threads(2, move).values() == ((40, 3, 40, 1, 1), (3, 40, 0, 1, 1))


def test_progress_grows_to_the_total_of_the_rank() -> None:
    plan = Plan([Transfer("w", 0, 1, whole(100_000))])

    def move(channel: Channel) -> list[tuple[int, int]]:
        told: list[tuple[int, int]] = []
        execute(
            plan,
            channel,
            {"w": torch.zeros(200_000)[::2]},
            {"w": torch.zeros(100_000)},
            max_staging_bytes=64 * KIB,
            progress=lambda done, total: told.append((done, total)),
        )
        return told

    for told in rank_threads(2, move).values():
        done = [pair[0] for pair in told]
        assert len(done) == 25  # 400 000 bytes in parts of 16 KiB
        assert done == sorted(set(done))
        assert told[-1] == (400_000, 400_000)
        assert {total for _, total in told} == {400_000}


# Proof of what arrived


class Flipping:
    """Carries bytes over another channel, and flips a bit of one buffer that it receives."""

    def __init__(self, inner: Channel, message: int, buffer: int, at: int) -> None:
        self._inner = inner
        self._where = message, buffer, at
        self._messages = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(
        self, sends: Sequence[Message], receives: Sequence[Message], *, timeout_s: float | None
    ) -> Pending:
        pending = self._inner.start(sends, receives, timeout_s=timeout_s)
        number, self._messages = self._messages, self._messages + len(receives)
        message, buffer, at = self._where
        if number <= message < self._messages:
            return _Flipped(pending, receives[message - number].buffers[buffer], at)
        return pending


class _Flipped:
    def __init__(self, pending: Pending, buffer: torch.Tensor, at: int) -> None:
        self._pending, self._buffer, self._at = pending, buffer, at

    def wait(self) -> None:
        self._pending.wait()
        self._buffer[self._at] ^= 1


# Key, message (they come by rank of the sender), buffer, byte.
CORRUPTIONS = {
    "a part in its own memory": ("flat", 0, 0, 12_345),
    "a staged part": ("turned", 1, 0, 7),
    "a packed part": ("packed 3", 2, 0, 16 * 3),
    "the digests": ("flat", 0, 1, 0),
}


def corruptible(channel: Channel, verify: Any, where: tuple[int, int, int]) -> None:
    shapes = {"flat": (MIB + 5,), **{f"packed {n}": (16,) for n in range(6)}, "turned": (30, 20)}
    plan = Plan(
        [Transfer("flat", 0, 1, whole(*shapes["flat"]))]
        + [Transfer(f"packed {n}", 3, 1, whole(16)) for n in range(6)]
        + [Transfer("turned", 2, 1, whole(30, 20))]
    )
    sources = {key: torch.full(shape, 3, dtype=torch.uint8) for key, shape in shapes.items()}
    destinations = {key: torch.zeros(shape, dtype=torch.uint8) for key, shape in shapes.items()}
    destinations["turned"] = torch.zeros(20, 30, dtype=torch.uint8).t()
    carrier: Any = Flipping(channel, *where) if channel.rank == 1 else channel
    execute(plan, carrier, sources, destinations, verify=verify, timeout=10, same_host="off")


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_flipped_bit_is_found_and_named(corruption: str) -> None:
    key, message, buffer, at = CORRUPTIONS[corruption]
    outcomes = rank_threads(4, corruptible, "xxh3", (message, buffer, at))
    src = {"flat": 0, "turned": 2}.get(key, 3)
    for error in outcomes.raised(PeerError, within_s=5):
        assert set(error.failures) == {1}
        assert f"rank {src}: {key!r} " in error.failures[1]
        assert "not those that were sent" in error.failures[1]


def test_without_proof_a_flipped_bit_goes_unseen() -> None:
    """The corruption above is real."""
    rank_threads(4, corruptible, None, (0, 0, 12_345)).values()


# An executor


class Fresh(TorchDispatchMode):
    """Counts the bytes of the storages that operations of this thread make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(found):
            if tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return found


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


@MODES
def test_a_second_run_moves_the_new_values_and_allocates_nothing(
    same_host: SameHost, verify: Any
) -> None:
    plan = Plan(
        [
            Transfer("turned", 0, 1, whole(400, 500)),
            Transfer("flat", 1, 0, whole(MIB)),
            *(Transfer(f"small {n}", 0, 1, whole(1000)) for n in range(50)),
        ]
    )
    shapes = {"turned": (400, 500), "flat": (MIB,), **{f"small {n}": (1000,) for n in range(50)}}

    def move(channel: Channel) -> tuple[int, int]:
        sources = {key: torch.zeros(shape) for key, shape in shapes.items()}
        sources["turned"] = torch.zeros(500, 400).t()
        destinations = {key: torch.zeros(shape) for key, shape in shapes.items()}
        right = 0
        largest = 0
        with Executor(
            plan, channel, sources, destinations, verify=verify, same_host=same_host
        ) as executor:
            for run in range(3):
                for n, source in enumerate(sources.values()):
                    source.fill_(100 * run + n + 1)
                with Fresh() as fresh:
                    executor.run()
                largest = max(largest, fresh.largest)
                wanted = {"flat"} if channel.rank == 0 else set(shapes) - {"flat"}
                right += all(
                    bool((destinations[key] == 100 * run + n + 1).all()) == (key in wanted)
                    for n, key in enumerate(shapes)
                )
        return right, largest

    for right, largest in rank_threads(2, move).values():
        assert right == 3
        # What agreements take: rows of some bytes, each in a frame of 16 KiB.
        assert largest <= 2 * 17 * KIB


def test_the_count_of_allocations_finds_one() -> None:
    with Fresh() as fresh:
        torch.zeros(1000).view(10, 100)[2:].add_(1)
    assert fresh.largest == 4000


def test_an_error_in_one_run_leaves_the_next_working() -> None:
    plan = Plan([Transfer("w", 0, 1, whole(8))])

    def fail(done: int, total: int) -> None:
        raise ValueError("no more")

    def move(channel: Channel) -> list[float]:
        source, target = torch.zeros(8), torch.zeros(8)
        executor = Executor(plan, channel, {"w": source}, {"w": target})
        source.fill_(1)
        with pytest.raises(PeerError, match="rank 1: ValueError: no more"):
            executor.run(progress=fail if channel.rank == 1 else None, timeout_s=5)
        source.fill_(2)
        executor.run(timeout_s=5)
        executor.close()
        executor.close()
        return target.tolist()

    assert rank_threads(2, move).values()[1] == [2.0] * 8
