"""Shapes: the names and shapes of a model's tensors, read from a file without its data.

Safetensors files need the library `safetensors` and numpy (the extra `cli`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from distcore.v1 import PlanError, Problem

Shapes = dict[str, tuple[int, ...]]

_NUMBER = re.compile(r"(?:^|\.)\d+(?:\.|$)")


def read_shapes(path: Path) -> Shapes:
    """Return name -> shape for what `path` describes.

    That is a safetensors file; an index of such files (`*.index.json`); a directory with such
    files; or JSON with one object, name -> list of dims.

    Raises:
        PlanError: the file says something else.
        OSError: it cannot be read.
    """
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise PlanError(Problem(str(path), "missing", "has no safetensors files"))
        return _from_all(files)
    if path.suffix != ".json":
        return _from_safetensors(path)
    form = _read_object(path)
    if isinstance(names := form.get("weight_map"), dict):
        return _from_all(sorted({path.with_name(str(name)) for name in names.values()}))
    return {name: _read_shape(name, dims) for name, dims in form.items()}


def group_by_layer(shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """The shapes in one group per layer, and one for what is in no layer.

    A layer is what has its name in common up to the first number.

    >>> group_by_layer({"emb": (9, 2), "h.0.a": (2, 2), "h.1.a": (2, 2), "h.0.b": (2,)})
    [{'emb': (9, 2)}, {'h.0.a': (2, 2), 'h.0.b': (2,)}, {'h.1.a': (2, 2)}]
    """
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        found = _NUMBER.search(name)
        groups.setdefault(name[: found.end()] if found else "", {})[name] = shape
    return list(groups.values())


def _from_all(paths: list[Path]) -> Shapes:
    found: Shapes = {}
    for path in paths:
        found |= _from_safetensors(path)
    return found


def _from_safetensors(path: Path) -> Shapes:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        text = "reading a safetensors file needs: pip install 'ownerplan[cli]'"
        raise ImportError(text) from error
    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise PlanError(Problem(str(path), "format", f"is no safetensors file: {error}")) from error


def _read_object(path: Path) -> dict[str, object]:
    try:
        form = json.loads(path.read_text())
    except ValueError as error:
        raise PlanError(Problem(str(path), "format", f"is no JSON: {error}")) from error
    if not isinstance(form, dict):
        text = "must be one object, name -> list of dims"
        raise PlanError(Problem(str(path), "format", text))
    return form


def _read_shape(name: str, dims: object) -> tuple[int, ...]:
    if isinstance(dims, list) and all(type(side) is int and side >= 0 for side in dims):
        return tuple(dims)
    raise PlanError(Problem(name, "shape", f"{dims!r} is not a list of dims"))
