"""Write the checkpoints in this folder anew, each with the release that its name tells.

    cd packages/ckptx/tests/data
    python write_checkpoints.py torch                                  # needs torch 2.9.1
    torchrun --nproc-per-node 2 write_checkpoints.py megatron          # needs megatron-core 0.16.1

They are read by tests/formats/test_source_releases.py.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp

# Names without a place: what is written keeps the path that it was written to.
TORCH, SHARDED, MEGATRON = Path("torch-2.9.1"), Path("torch-2.9.1-hf"), Path("megatron-core-0.16.1")


def state() -> dict[str, Any]:
    """Tensors of several dtypes and forms, and values."""
    return {
        "model": {
            "weight": torch.arange(12.0).view(3, 4),
            "turned": torch.arange(6).view(2, 3).t(),
            "half": torch.arange(5, dtype=torch.bfloat16),
            "eight": torch.arange(4.0).to(torch.float8_e4m3fn),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3),
        },
        "optimizer": {"step": torch.tensor(7), "lr": 0.125, "betas": (0.9, 0.95)},
        "epoch": 3,
        "name": "run",
    }


def write_torch() -> None:
    """A directory of torch's distributed checkpoint, and safetensors files with offsets."""
    dcp.save(state(), checkpoint_id=TORCH, no_dist=True)
    writer = import_module("torch.distributed.checkpoint").HuggingFaceStorageWriter
    flat = {f"model.{key}": value.contiguous() for key, value in state()["model"].items()}
    dcp.save(flat, storage_writer=writer(str(SHARDED), save_distributed=True), no_dist=True)


def write_megatron() -> None:
    """A `torch_dist` directory of two tensor-parallel ranks, as Megatron-Core's own save makes."""
    dist.init_process_group("gloo")
    core = import_module("megatron.core.dist_checkpointing")
    # It synchronises CUDA wherever it runs.
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_, **__: None
    import_module("megatron.core.parallel_state").initialize_model_parallel(2)
    rank = dist.get_rank()
    whole = torch.arange(24.0).view(4, 6)
    part = whole[:, 3 * rank : 3 * rank + 3].contiguous()
    bias = torch.arange(5, dtype=torch.bfloat16)
    tensor = core.ShardedTensor.from_rank_offsets
    sharded = {
        "weight": tensor("decoder.weight", part, (1, rank, 2), replica_id=0),
        "bias": tensor("decoder.bias", bias, replica_id=rank),
        "rng": core.ShardedObject("rng_state", {"seed": rank}, (2,), (rank,), replica_id=0),
        "iteration": 11,
        "args": {"lr": 0.5},
    }
    MEGATRON.mkdir(exist_ok=True)
    dist.barrier()
    core.save(sharded, str(MEGATRON), ("torch_dist", 1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    {"torch": write_torch, "megatron": write_megatron}[sys.argv[1]]()
