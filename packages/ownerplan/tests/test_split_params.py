"""Which parameters of a model are matrices."""

from __future__ import annotations

import torch
from torch import nn

from ownerplan.split_params import Exclusion, split_params


class Model(nn.Module):
    """An embedding, a convolution, a layer norm, a projection and a head."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def names(model: Model, exclude: tuple[Exclusion, ...] = ()) -> tuple[list[str], list[str]]:
    by_param = {id(param): name for name, param in model.named_parameters()}
    matrices, others = split_params(model, exclude)
    return [by_param[id(param)] for param in matrices], [by_param[id(p)] for p in others]


def test_matrices_are_what_maps() -> None:
    assert names(Model()) == (
        ["conv.weight", "up.weight", "head.weight"],
        ["embed.weight", "conv.bias", "norm.weight", "norm.bias"],
    )


def test_a_tied_weight_is_there_once_and_excluded_where_any_name_is() -> None:
    matrices, others = names(Model(tied=True))
    assert matrices == ["conv.weight", "up.weight"]
    assert others.count("embed.weight") == 1
    model = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    model["two"].weight = model["one"].weight
    assert [len(found) for found in split_params(model)] == [1, 0]
    assert [len(found) for found in split_params(model, ["two.*"])] == [0, 1]


def test_names_and_types_are_excluded() -> None:
    assert names(Model(), ("head.*",))[0] == ["conv.weight", "up.weight"]
    assert names(Model(), (nn.Linear, "conv.weight"))[0] == []


def test_a_shared_module_counts_under_all_its_names() -> None:
    shared = nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"body": shared, "head": shared})
    assert [len(found) for found in split_params(model, ["head.*"])] == [0, 1]


def test_frozen_parameters_are_listed() -> None:
    model = Model()
    model.up.weight.requires_grad_(False)
    assert model.up.weight in set(split_params(model)[0])


def test_a_parameter_without_data_goes_by_its_shape() -> None:
    with torch.device("meta"):
        model = Model()
    assert len(split_params(model)[0]) == 3
