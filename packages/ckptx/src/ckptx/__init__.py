"""Read each byte of a checkpoint once per group of ranks, then exchange what each rank needs."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from distcore.v1 import require

require(1, by="ckptx")

# What a checkpoint holds
from ckptx.checkpoint import Checkpoint, open_checkpoint

# Errors
from ckptx.errors import (
    CheckpointChannelError,
    CheckpointDisagreement,
    CheckpointingException,
    CheckpointPeerError,
    CheckpointPlanError,
    CheckpointTimeout,
    FormatError,
    ReadError,
)

# Planning, without torch
from ckptx.plan import LoadPlan, Read, Round, plan_load
from ckptx.report import LoadReport
from ckptx.stored import Chunk, StoredTensor

if TYPE_CHECKING:
    # Loading
    from ckptx.loader import load

__all__ = [
    "Checkpoint",
    "CheckpointChannelError",
    "CheckpointDisagreement",
    "CheckpointPeerError",
    "CheckpointPlanError",
    "CheckpointTimeout",
    "CheckpointingException",
    "Chunk",
    "FormatError",
    "LoadPlan",
    "LoadReport",
    "Read",
    "ReadError",
    "Round",
    "StoredTensor",
    "load",
    "open_checkpoint",
    "plan_load",
]

__version__ = version("ckptx")


def __getattr__(name: str) -> object:
    """Import torch only when something that needs it is used."""
    if name == "load":
        from ckptx.loader import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
