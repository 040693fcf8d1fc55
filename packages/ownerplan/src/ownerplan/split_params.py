"""Which parameters of a model are stepped as matrices, and which by another optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from torch import nn

Exclusion: TypeAlias = str | type[nn.Module]
"""A pattern for full names of parameters, as `"lm_head.*"`, or a type of modules."""

LOOKED_UP: Final[tuple[type[nn.Module], ...]] = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose weights are tables of rows, not matrices that map."""


def split_params(
    model: nn.Module, exclude: Iterable[Exclusion] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters for `OwnerMuon`, and the others; each list in the order of the model.

    Matrices are all parameters of two dims or more (of the global shape, where they are sharded)
    that belong to no embedding and to nothing in `exclude`. The output projection of a language
    model is often excluded too, by its name. Each tensor appears once; one that is tied, and so
    has several names, counts as excluded where any of them is.

    Frozen parameters are listed too: without a gradient they are not stepped.
    """
    exclusions = tuple(exclude)
    kinds = (*LOOKED_UP, *(kind for kind in exclusions if isinstance(kind, type)))
    patterns = tuple(pattern for pattern in exclusions if isinstance(pattern, str))
    params: dict[nn.Parameter, bool] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        looked_up = isinstance(module, kinds)
        for name, param in module.named_parameters(path, recurse=False, remove_duplicate=False):
            named = any(fnmatchcase(name, pattern) for pattern in patterns)
            is_matrix = param.ndim >= 2 and not looked_up and not named
            params[param] = params.get(param, True) and is_matrix
    matrices = [param for param, is_matrix in params.items() if is_matrix]
    return matrices, [param for param, is_matrix in params.items() if not is_matrix]
