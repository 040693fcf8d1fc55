"""What trees go through the codec, and what is refused with its key path."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, isnan
from typing import Any

import pytest
import torch
from torch import Tensor

from fttransport.codec import MAX_DEPTH, Codec, Paths, walk
from fttransport.errors import CodecRefused, IntegrityError

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024 - the plain form is what is tested


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Schedule:
    rate: float
    color: Color


def there_and_back(tree: object, codec: Codec | None = None) -> Any:
    codec = codec or Codec()
    tensors: list[Tensor] = []

    def keep(more: Sequence[Tensor]) -> list[int]:
        tensors.extend(more)
        return list(range(len(tensors) - len(more), len(tensors)))

    text = json.dumps(codec.encode(tree, keep), allow_nan=False)
    return codec.decode(json.loads(text), lambda numbers, paths: [tensors[i] for i in numbers])


def no_tensors(numbers: list[Any], paths: Paths) -> list[Tensor]:
    return [torch.zeros(0)] * len(numbers)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        True,
        3,
        2**70,
        -0.5,
        inf,
        "text \u00e9",
        b"\x00\xff",
        [],
        [1, [2.5, None]],
        (1, (2,), ()),
        {},
        {"a": {"b": [1]}, 3: "int key", (1, "t"): "tuple key", None: 0, True: 1},
        OrderedDict([("z", 1), ("a", 2)]),
        Point(1, [2]),
        torch.bfloat16,
        torch.Size([2, 3]),
        torch.device("cuda:1"),
    ],
)
def test_plain_values_come_back_as_they_were(tree: object) -> None:
    found = there_and_back(tree)
    assert found == tree
    assert type(found) is type(tree)


def test_a_nan_comes_back() -> None:
    assert isnan(there_and_back({"loss": float("nan")})["loss"])


def test_tensors_are_found_in_order_with_their_key_paths() -> None:
    one, two, three = torch.zeros(1), torch.ones(1), torch.ones(2)
    tree = {"user": {"w": one, "b": two}, "more": [three], "mixed": {"n": 1, 2: one}}
    node = Codec().encode(tree, lambda tensors: [len(t) + 10 * int(t[0]) for t in tensors])
    seen: list[tuple[int, str]] = []

    def find(numbers: list[Any], paths: Paths) -> list[Tensor]:
        seen.extend(zip(numbers, paths(), strict=True))
        return [one] * len(numbers)

    Codec().decode(node, find)
    assert seen == [
        (1, "['user']['w']"),
        (11, "['user']['b']"),
        (12, "['more'][0]"),
        (1, "['mixed'][2]"),
    ]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_dict_of_tensors_travels_as_columns(kind: type[dict[str, Tensor]]) -> None:
    tree = kind((name, torch.zeros(i)) for i, name in enumerate("zab"))
    node = Codec().encode(tree, lambda tensors: [len(tensor) for tensor in tensors])
    assert node == {"dx" if kind is dict else "odx": [["z", "a", "b"], [0, 1, 2]]}
    found = there_and_back(tree)
    assert type(found) is kind
    assert list(found) == ["z", "a", "b"]
    assert found["b"] is tree["b"]


def test_registered_types_come_back_without_their_constructor() -> None:
    codec = Codec(types=[Schedule, Color])
    tree = {"s": Schedule(0.5, Color.BLUE)}
    assert there_and_back(tree, codec) == tree


@pytest.mark.parametrize("value", [Schedule(1.0, Color.RED), Color.RED, {1, 2}, object(), print])
def test_anything_else_is_refused_with_its_key_path(value: object) -> None:
    with pytest.raises(CodecRefused, match=r"state\['a'\]\[1\]: a "):
        there_and_back({"a": [0, value]})


def test_a_type_that_only_the_source_registered_is_refused() -> None:
    node = Codec(types=[Color]).encode(Color.RED, lambda tensors: [])
    with pytest.raises(CodecRefused, match="not registered"):
        Codec().decode(node, no_tensors)


def test_too_deep_a_tree_is_refused() -> None:
    tree: list[Any] = []
    for _ in range(MAX_DEPTH + 1):
        tree = [tree]
    with pytest.raises(CodecRefused, match="deep"):
        there_and_back(tree)


@pytest.mark.parametrize(
    "node",
    [
        {"unknown": 1},
        {"d": 3},
        {"d": [[1]]},
        {"dx": 3},
        {"dx": [["a"], [0], [0]]},
        {"dx": [["a"], [0, 1]]},
        {"dx": [["a", 1], [0, 1]]},
        {"dx": ["a", [0]]},
        {"odx": [[["a"]], [0]]},
        {"d": [[["list", "key"], 1]]},
        {"t": 1, "d": []},
        {"dtype": "ones"},
        {"b": "not base64!"},
        {"nt": ["os:system", ["x"], []]},
        {"nt": ["m:N", ["not a name"], [1]]},
        {"device": "nowhere"},
    ],
)
def test_malformed_data_are_an_integrity_error(node: object) -> None:
    with pytest.raises((IntegrityError, RuntimeError)):
        Codec().decode(node, no_tensors)


def test_a_pickle_is_not_opened() -> None:
    with pytest.raises(CodecRefused, match="pickle"):
        Codec().decode({"p": "gASVAAAA"}, no_tensors)


def test_a_name_of_a_function_makes_a_plain_namedtuple() -> None:
    made: Any = Codec().decode({"nt": ["os:system", ["x"], [1]]}, no_tensors)
    assert made.x == 1
    assert type(made).__name__ == "system"


def test_walking_a_tree_finds_every_tensor_with_its_key_path() -> None:
    @dataclass
    class Pair:
        first: object
        second: object

    one, two = torch.zeros(1), torch.zeros(2)
    tree = {"a": [one, {"b": two}], "p": Pair(two, 3), 4: (None, one)}
    assert walk(tree) == [
        ("['a'][0]", one),
        ("['a'][1]['b']", two),
        ("['p'].first", two),
        ("[4][1]", one),
    ]
