"""Live transfer of whole PyTorch state dicts between meshes and placements."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from distcore.v1 import on_first_use, require

require(1, by="reshard")

# Planning, without torch
from distcore.v1 import Layout
from reshard.bounds import Bounds
from reshard.options import Options
from reshard.plan import ReshardPlan, plan_reshard
from reshard.plan_cache import PlanCache
from reshard.stats import Stats

if TYPE_CHECKING:
    # Moving
    from reshard.handle import Handle
    from reshard.hooks import Hook
    from reshard.placed import Placed
    from reshard.report import TransferReport
    from reshard.resharder import Resharder, transfer

    # One process that plays all ranks
    from reshard.simulation import simulate

__all__ = [
    "Bounds",
    "Handle",
    "Hook",
    "Layout",
    "Options",
    "Placed",
    "PlanCache",
    "ReshardPlan",
    "Resharder",
    "Stats",
    "TransferReport",
    "plan_reshard",
    "simulate",
    "transfer",
]

__version__ = version("reshard")

# Names that need torch, and the modules that they are loaded from when first used.
_HOMES = {
    "Handle": "handle",
    "Hook": "hooks",
    "Placed": "placed",
    "Resharder": "resharder",
    "TransferReport": "report",
    "simulate": "simulation",
    "transfer": "resharder",
}

__getattr__, __dir__ = on_first_use(__name__, _HOMES)
