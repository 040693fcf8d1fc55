"""Owner planning: who runs the matrix step of which tensor, and the buffers that travel for it.

The names and rules of Megatron-Core's `owner_planning`, on layouts and meshes of any kind. Planning
and packing need no process group: of a mesh only `mesh` and `get_rank()` are used, of a group only
`mesh`, `main_weight.layout` and `fsdp_parameters[i].sharded`. Ranks are global ranks, buffer order
is the order in which the ranks hold the buffer.
"""

from ownerplan.assignment import _OwnerWork, assign_owner_work, select_ge_2d_params
from ownerplan.cost import ns_cost_fn
from ownerplan.owner_layout import GroupOwnerLayout
from ownerplan.packing import OwnerGatherPlan, OwnerScatterPlan

__all__ = [
    "GroupOwnerLayout",
    "OwnerGatherPlan",
    "OwnerScatterPlan",
    "_OwnerWork",
    "assign_owner_work",
    "ns_cost_fn",
    "select_ge_2d_params",
]
