"""Models: the tensors of well-known models, to plan for without having them.

A Weight says of one tensor what decides its layout: its shape, the dim that tensor parallelism
cuts, its layer and, in a mixture of experts, its expert.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from distcore.v1 import PlanError, Problem, itemsize


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a model.

    `tp_dim` is the dim that tensor parallelism cuts, None where it repeats the tensor. `layer` is
    the index of its layer among all, None outside of layers; `expert` its index among the experts
    of the layer, None for what is no expert's.
    """

    shape: tuple[int, ...]
    tp_dim: int | None = None
    layer: int | None = None
    expert: int | None = None
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Model:
    """The tensors of a model by key, its number of layers, and of experts in each (0: none)."""

    weights: Mapping[str, Weight]
    num_layers: int
    num_experts: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        total = 0
        for weight in self.weights.values():
            size = itemsize(weight.dtype)
            for length in weight.shape:
                size *= length
            total += size
        return total


def _dense(*, layers: int, hidden: int, ffn: int, kv: int, vocab: int) -> Callable[[], Model]:
    """A decoder of the Llama kind; `kv` is the width of keys and of values."""

    def make() -> Model:
        weights = _ends(hidden, vocab)
        for layer in range(layers):
            weights |= _attention(layer, hidden, hidden, kv)
            weights |= _ffn(f"model.layers.{layer}.mlp", hidden, ffn, layer)
        return Model(weights, layers)

    return make


def _ends(hidden: int, vocab: int) -> dict[str, Weight]:
    return {
        "model.embed_tokens.weight": Weight((vocab, hidden), 0),
        "model.norm.weight": Weight((hidden,)),
        "lm_head.weight": Weight((vocab, hidden), 0),
    }


def _attention(
    layer: int, hidden: int, width: int, kv: int, head: int | None = None
) -> dict[str, Weight]:
    name = f"model.layers.{layer}"
    found = {
        f"{name}.self_attn.q_proj.weight": Weight((width, hidden), 0, layer),
        f"{name}.self_attn.k_proj.weight": Weight((kv, hidden), 0, layer),
        f"{name}.self_attn.v_proj.weight": Weight((kv, hidden), 0, layer),
        f"{name}.self_attn.o_proj.weight": Weight((hidden, width), 1, layer),
        f"{name}.input_layernorm.weight": Weight((hidden,), None, layer),
        f"{name}.post_attention_layernorm.weight": Weight((hidden,), None, layer),
    }
    if head is not None:
        for norm in ("q_norm", "k_norm"):
            found[f"{name}.self_attn.{norm}.weight"] = Weight((head,), None, layer)
    return found


def _latent_attention(layer: int, hidden: int, heads: int) -> dict[str, Weight]:
    """Attention over compressed keys and values, as in DeepSeek-V3."""
    name = f"model.layers.{layer}"
    attention = f"{name}.self_attn"
    return {
        f"{attention}.q_a_proj.weight": Weight((1536, hidden), None, layer),
        f"{attention}.q_a_layernorm.weight": Weight((1536,), None, layer),
        f"{attention}.q_b_proj.weight": Weight((heads * 192, 1536), 0, layer),
        f"{attention}.kv_a_proj_with_mqa.weight": Weight((576, hidden), None, layer),
        f"{attention}.kv_a_layernorm.weight": Weight((512,), None, layer),
        f"{attention}.kv_b_proj.weight": Weight((heads * 256, 512), 0, layer),
        f"{attention}.o_proj.weight": Weight((hidden, heads * 128), 1, layer),
        f"{name}.input_layernorm.weight": Weight((hidden,), None, layer),
        f"{name}.post_attention_layernorm.weight": Weight((hidden,), None, layer),
    }


def _ffn(
    name: str, hidden: int, ffn: int, layer: int, expert: int | None = None
) -> dict[str, Weight]:
    return {
        f"{name}.gate_proj.weight": Weight((ffn, hidden), 0, layer, expert),
        f"{name}.up_proj.weight": Weight((ffn, hidden), 0, layer, expert),
        f"{name}.down_proj.weight": Weight((hidden, ffn), 1, layer, expert),
    }


def _experts(layer: int, hidden: int, ffn: int, count: int) -> dict[str, Weight]:
    name = f"model.layers.{layer}.mlp"
    found = {f"{name}.gate.weight": Weight((count, hidden), None, layer)}
    for expert in range(count):
        found |= _ffn(f"{name}.experts.{expert}", hidden, ffn, layer, expert)
    return found


def _qwen3_30b_a3b() -> Model:
    weights = _ends(2048, 151_936)
    for layer in range(48):
        weights |= _attention(layer, 2048, 4096, 512, head=128)
        weights |= _experts(layer, 2048, 768, 128)
    return Model(weights, 48, 128)


def _latent(
    *, layers: int, hidden: int, heads: int, vocab: int, dense: int, ffn: int, moe: tuple[int, int]
) -> Callable[[], Model]:
    """A mixture of experts with latent attention: `dense` layers of width `ffn` come first.

    `moe` is the number of experts in every other layer, and their width.
    """
    count, width = moe

    def make() -> Model:
        weights = _ends(hidden, vocab)
        for layer in range(layers):
            weights |= _latent_attention(layer, hidden, heads)
            name = f"model.layers.{layer}.mlp"
            if layer < dense:
                weights |= _ffn(name, hidden, ffn, layer)
                continue
            weights |= _experts(layer, hidden, width, count)
            weights |= _ffn(f"{name}.shared_experts", hidden, width, layer)
        return Model(weights, layers, count)

    return make


MODELS: Final[Mapping[str, Callable[[], Model]]] = {
    "llama-3-8b": _dense(layers=32, hidden=4096, ffn=14_336, kv=1024, vocab=128_256),
    "llama-3-70b": _dense(layers=80, hidden=8192, ffn=28_672, kv=1024, vocab=128_256),
    "qwen3-30b-a3b": _qwen3_30b_a3b,
    "deepseek-v3": _latent(
        layers=61, hidden=7168, heads=128, vocab=129_280, dense=3, ffn=18_432, moe=(256, 2048)
    ),
    "moe-1t": _latent(
        layers=94, hidden=6144, heads=64, vocab=163_840, dense=0, ffn=0, moe=(352, 1664)
    ),
}
"""Ready models by name; `moe-1t` has a trillion parameters in 100 000 tensors."""


def model_of(source: str) -> Model:
    """The model named `source`, or the tensors of a safetensors or JSON file at that path.

    A JSON file maps keys to a shape, or to `{"shape": [...], "dtype": "..."}`. What is in a file
    is cut by tensor parallelism along dim 0, or dim 1 where the key has `o_proj` or `down_proj`;
    what has one dim is repeated. PlanError where there is neither.
    """
    if source in MODELS:
        return MODELS[source]()
    path = Path(source)
    if not path.is_file():
        text = f"neither a file nor one of {', '.join(MODELS)}"
        raise PlanError(Problem(source, "model", text))
    table = _header(path) if path.suffix == ".safetensors" else json.loads(path.read_text())
    if not isinstance(table, dict):
        raise PlanError(Problem(source, "form", "expected an object of key to shape"))
    weights = {key: _weight(key, entry) for key, entry in table.items() if key != "__metadata__"}
    layers = {weight.layer for weight in weights.values() if weight.layer is not None}
    experts = {weight.expert for weight in weights.values() if weight.expert is not None}
    return Model(weights, max(layers, default=-1) + 1, max(experts, default=-1) + 1)


_MAX_HEADER_NBYTES: Final = 100 << 20
_DTYPES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def _header(path: Path) -> Any:
    with path.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        if nbytes > _MAX_HEADER_NBYTES:
            raise PlanError(Problem(str(path), "form", f"a header of {nbytes} bytes"))
        return json.loads(file.read(nbytes))


def _weight(key: str, entry: Any) -> Weight:
    if isinstance(entry, list):
        entry = {"shape": entry}
    try:
        shape = tuple(int(length) for length in entry["shape"])
        dtype = str(entry.get("dtype", "bfloat16"))
    except (KeyError, TypeError, ValueError, AttributeError):
        text = f"expected a list of lengths or an object with 'shape', got {entry!r}"
        raise PlanError(Problem(key, "form", text)) from None
    parts = key.split(".")
    tp_dim = None
    if len(shape) > 1:
        tp_dim = 1 if {"o_proj", "down_proj"} & set(parts) else 0
    return Weight(
        shape,
        tp_dim,
        _number_after(parts, "layers"),
        _number_after(parts, "experts"),
        _DTYPES.get(dtype, dtype),
    )


def _number_after(parts: list[str], word: str) -> int | None:
    if word in parts[:-1]:
        found = parts[parts.index(word) + 1]
        return int(found) if found.isdecimal() else None
    return None
