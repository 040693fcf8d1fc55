"""Regions, layouts, plans and channels: the core that moves the state of a distributed run.

The names below are loaded when they are first used, so that `import distcore` does not load
torch. The interface that other packages build on is `distcore.v1`.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from distcore.v1.catalogue import on_first_use

if TYPE_CHECKING:
    # What failed outside a collective
    from distcore.board import failure_scope

    # Labelled calls
    from distcore.collectives import all_reduce, barrier, broadcast_from

    # Data of a rank
    from distcore.data import shard_dataloader
    from distcore.forward_loop import distributed_forward_loop

    # Models sharded with FSDP2
    from distcore.fsdp import fsdp2_wrap, is_fsdp2_model

    # Gathers
    from distcore.gather import gather_bytes

    # Groups
    from distcore.groups import DistributedProcessGroup, ParallelState

    # The run and this process's place in it
    from distcore.launch import is_distributed_launch

    # The plan on a model
    from distcore.model import DistributionPlan, distribution_plan, set_distribution_plan
    from distcore.probes import (
        backend,
        is_available,
        is_distributed_run,
        is_initialized,
        is_master,
        rank,
        size,
    )
    from distcore.run import DistributedState, distributed_run
    from distcore.state_dicts import gather_state_dicts

__version__ = version("distcore")

_HOMES = {
    "DistributedProcessGroup": "groups",
    "DistributedState": "run",
    "DistributionPlan": "model",
    "ParallelState": "groups",
    "all_reduce": "collectives",
    "backend": "probes",
    "barrier": "collectives",
    "broadcast_from": "collectives",
    "distributed_forward_loop": "forward_loop",
    "distributed_run": "run",
    "distribution_plan": "model",
    "failure_scope": "board",
    "fsdp2_wrap": "fsdp",
    "gather_bytes": "gather",
    "gather_state_dicts": "state_dicts",
    "is_available": "probes",
    "is_distributed_launch": "launch",
    "is_distributed_run": "probes",
    "is_fsdp2_model": "fsdp",
    "is_initialized": "probes",
    "is_master": "probes",
    "rank": "probes",
    "set_distribution_plan": "model",
    "shard_dataloader": "data",
    "size": "probes",
}

__all__ = [
    "DistributedProcessGroup",
    "DistributedState",
    "DistributionPlan",
    "ParallelState",
    "__version__",
    "all_reduce",
    "backend",
    "barrier",
    "broadcast_from",
    "distributed_forward_loop",
    "distributed_run",
    "distribution_plan",
    "failure_scope",
    "fsdp2_wrap",
    "gather_bytes",
    "gather_state_dicts",
    "is_available",
    "is_distributed_launch",
    "is_distributed_run",
    "is_fsdp2_model",
    "is_initialized",
    "is_master",
    "rank",
    "set_distribution_plan",
    "shard_dataloader",
    "size",
]

__getattr__, __dir__ = on_first_use(__name__, _HOMES)
