"""Read each byte of a checkpoint once per group of ranks, then exchange what each rank needs."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from distcore.v1 import on_first_use, require

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
    WriteError,
)

# Planning, without torch
from ckptx.placing import SavePlan, Write, plan_save
from ckptx.plan import LoadPlan, Read, Round, plan_load
from ckptx.report import LoadReport, SaveReport
from ckptx.stored import Chunk, StoredTensor, StoredValue

if TYPE_CHECKING:
    # What needs torch: exchanging shards, converting, loading, saving
    from ckptx.cache import StalePlanError
    from ckptx.converter import convert
    from ckptx.exchange import ExchangeReport
    from ckptx.loader import load
    from ckptx.part import ExchangeError
    from ckptx.saver import SaveHandle, save, save_async
    from ckptx.sharded import ShardedObject, ShardedTensor, is_main_replica

__all__ = [
    "Checkpoint",
    "CheckpointChannelError",
    "CheckpointDisagreement",
    "CheckpointPeerError",
    "CheckpointPlanError",
    "CheckpointTimeout",
    "CheckpointingException",
    "Chunk",
    "ExchangeError",
    "ExchangeReport",
    "FormatError",
    "LoadPlan",
    "LoadReport",
    "Read",
    "ReadError",
    "Round",
    "SaveHandle",
    "SavePlan",
    "SaveReport",
    "ShardedObject",
    "ShardedTensor",
    "StalePlanError",
    "StoredTensor",
    "StoredValue",
    "Write",
    "WriteError",
    "convert",
    "is_main_replica",
    "load",
    "open_checkpoint",
    "plan_load",
    "plan_save",
    "save",
    "save_async",
]

__version__ = version("ckptx")


# The names that need torch, and the modules in which they are.
_HOMES = {
    "ExchangeError": "part",
    "ExchangeReport": "exchange",
    "SaveHandle": "saver",
    "ShardedObject": "sharded",
    "ShardedTensor": "sharded",
    "StalePlanError": "cache",
    "convert": "converter",
    "is_main_replica": "sharded",
    "load": "loader",
    "save": "saver",
    "save_async": "saver",
}

__getattr__, __dir__ = on_first_use(__name__, _HOMES)
