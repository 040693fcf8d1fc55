"""Who runs the matrix step of which parameter, and a Muon that uses it."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from distcore.v1 import on_first_use, require

require(1, by="ownerplan")

# Planning, without torch
from ownerplan.cost import CostFn, flop_cost_fn, ns_cost_fn
from ownerplan.layout import (
    BlockAtomic,
    GlobalLayout,
    Range,
    RowAtomic,
    TensorAtomic,
    intersect_ranges,
)
from ownerplan.plan import plan_owners
from ownerplan.report import OwnerPlan
from ownerplan.work import Work, work_in_chunks, works_in_buffer

if TYPE_CHECKING:
    # One flat buffer
    from ownerplan.assignment import assign_owner_work
    from ownerplan.calibration import MeasuredCost, calibrate_cost

    # The optimizer
    from ownerplan.flat_buffer import FlatBuffer
    from ownerplan.muon import OwnerMuon
    from ownerplan.owner_exchange import OwnerExchange
    from ownerplan.owner_layout import GroupOwnerLayout
    from ownerplan.packing import OwnerGatherPlan, OwnerScatterPlan
    from ownerplan.step_report import StepReport

__all__ = [
    "BlockAtomic",
    "CostFn",
    "FlatBuffer",
    "GlobalLayout",
    "GroupOwnerLayout",
    "MeasuredCost",
    "OwnerExchange",
    "OwnerGatherPlan",
    "OwnerMuon",
    "OwnerPlan",
    "OwnerScatterPlan",
    "Range",
    "RowAtomic",
    "StepReport",
    "TensorAtomic",
    "Work",
    "assign_owner_work",
    "calibrate_cost",
    "flop_cost_fn",
    "intersect_ranges",
    "ns_cost_fn",
    "plan_owners",
    "work_in_chunks",
    "works_in_buffer",
]

__version__ = version("ownerplan")

# Names that need torch, and the modules that they are loaded from when first used.
_HOMES = {
    "FlatBuffer": "flat_buffer",
    "GroupOwnerLayout": "owner_layout",
    "MeasuredCost": "calibration",
    "OwnerExchange": "owner_exchange",
    "OwnerGatherPlan": "packing",
    "OwnerMuon": "muon",
    "OwnerScatterPlan": "packing",
    "StepReport": "step_report",
    "assign_owner_work": "assignment",
    "calibrate_cost": "calibration",
}

__getattr__, __dir__ = on_first_use(__name__, _HOMES)
