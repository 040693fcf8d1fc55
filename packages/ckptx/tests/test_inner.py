"""Inner tensors: what a tensor of another class is made of, found without converting it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from ckptx import CheckpointingException
from ckptx.inner import empty_tensor, inner_form, inner_tensors, parts_of


class Tagged(torch.Tensor):
    """A class with memory of its own and nothing inside."""


def test_a_plain_tensor_is_its_own_only_one() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    for value in (tensor, torch.nn.Parameter(tensor), tensor.detach().as_subclass(Tagged)):
        found = inner_tensors(value)
        assert list(found) == [""]
        assert type(found[""]) is torch.Tensor
        assert found[""].data_ptr() == value.data_ptr()
        assert not found[""].requires_grad
        assert inner_form(value) is None


def test_a_class_with_tensors_inside_is_taken_apart_to_the_last() -> None:
    a, b, c = torch.zeros(2), torch.ones(2), torch.ones(2)
    nested = TwoTensor(TwoTensor(a, b), c)
    found = inner_tensors(nested)
    assert list(found) == [".a.a", ".a.b", ".b"]
    assert [part.data_ptr() for part in found.values()] == [t.data_ptr() for t in (a, b, c)]
    form = inner_form(nested)
    assert form is not None
    assert parts_of(form) == [(path, "float32", (2,)) for path in found]
    assert json.loads(form)[0][0].endswith("TwoTensor")


def test_forms_are_equal_where_tensors_may_be_filled_from_each_other() -> None:
    def two(size: int, dtype: torch.dtype = torch.float32) -> TwoTensor:
        return TwoTensor(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype))

    assert inner_form(two(2)) == inner_form(two(2))
    assert inner_form(two(2)) != inner_form(two(3))
    assert inner_form(two(2)) != inner_form(two(2, torch.float16))


def test_a_class_without_memory_that_says_nothing_is_refused() -> None:
    class Hollow(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Hollow:  # noqa: PYI034 - a wrapper is made in __new__
            made: Hollow = torch.Tensor._make_wrapper_subclass(cls, (3,))
            return made

        @classmethod
        def __torch_dispatch__(cls, *_: Any, **__: Any) -> Hollow:
            return cls()

    with pytest.raises(CheckpointingException, match=r"Hollow has no memory"):
        inner_tensors(Hollow())


@pytest.mark.parametrize("shape", [(), (0, 2), (3, 4)])
@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e8m0fnu, torch.bits8])
def test_an_empty_tensor_may_have_any_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = empty_tensor(shape, dtype, "cpu")
    assert (found.dtype, tuple(found.shape)) == (dtype, shape)
    assert found.is_contiguous()
