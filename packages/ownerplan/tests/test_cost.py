"""What a matrix step costs."""

from __future__ import annotations

import pytest
import torch

from ownerplan.cost import flop_cost_fn, matrix_of, ns_cost_fn


@pytest.mark.parametrize(
    ("shape", "cost"),
    [
        ((6, 4), 504),
        ((4, 4), 336),
        ((2, 6), 132),
        ((1, 2), 12),
        ((1, 6), 36),
        ((6, 3), 288),
        ((4, 2), 88),
        ((2, 2), 44),
        ((5, 4), 420),
        ((8, 1), 48),
        ((8, 8), 2624),
        ((3, 6), 288),
        ((4, 2, 3), 504),
        ((3, 8), 384),
        ((5,), 30),
        ((0, 4), 0),
    ],
)
def test_the_documents_cost(shape: tuple[int, ...], cost: int) -> None:
    found = ns_cost_fn(5)(shape)
    assert found == cost
    assert type(found) is int
    assert ns_cost_fn(5)(torch.Size(shape)) == cost


def test_steps_count() -> None:
    assert ns_cost_fn(0)((6, 4)) == 24
    assert ns_cost_fn(1)((6, 4)) == 24 * 5
    assert flop_cost_fn(0)((6, 4)) == 0
    assert flop_cost_fn(2)((6, 4)) == 2 * flop_cost_fn(1)((6, 4))


def test_operations_are_counted_product_by_product() -> None:
    """Of (2, 3): X X^T takes 2*2*2*3 = 24, A A 2*2*2*2 = 16, B X 2*2*2*3 = 24."""
    assert flop_cost_fn(1)((2, 3)) == 24 + 16 + 24
    assert flop_cost_fn(1, kernel="symmetric")((2, 3)) == 12 + 8 + 24


def test_the_ratio_of_long_to_square_is_the_true_one() -> None:
    document, flops = ns_cost_fn(5), flop_cost_fn(5)
    assert flops((64, 256)) == 3 * flops((64, 64))
    assert document((64, 256)) == 4 * document((64, 64))


def test_a_matrix_and_its_transpose_cost_the_same() -> None:
    assert flop_cost_fn(5)((3, 7)) == flop_cost_fn(5)((7, 3))
    assert ns_cost_fn(5)((3, 7)) == ns_cost_fn(5)((7, 3))


@pytest.mark.parametrize(
    ("kernel", "petaflops"), [("standard", 0.67), ("symmetric", 0.47)], ids=["standard", "half"]
)
def test_llama_3_8b(kernel: str, petaflops: float) -> None:
    cost = flop_cost_fn(5, kernel=kernel)  # type: ignore[arg-type]
    layer = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3
    assert 32 * sum(map(cost, layer)) / 1e15 == pytest.approx(petaflops, abs=0.005)


def test_more_dims_count_as_rows_and_the_rest() -> None:
    assert matrix_of((4, 2, 3)) == (4, 6)
    assert matrix_of((5,)) == (5, 1)
    assert flop_cost_fn(5)((4, 2, 3)) == flop_cost_fn(5)((4, 6))


def test_what_is_no_matrix_or_no_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="without dims"):
        ns_cost_fn(5)(())
    with pytest.raises(ValueError, match="-1 is negative"):
        ns_cost_fn(-1)
    with pytest.raises(ValueError, match="-1 is negative"):
        flop_cost_fn(-1)
    with pytest.raises(ValueError, match="'gram' is neither"):
        flop_cost_fn(5, kernel="gram")  # type: ignore[arg-type]
