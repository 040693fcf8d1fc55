"""The interface between the packages, version 1: the half with effects. Needs torch.

What communicates takes a channel. Everything else works on the caller's own memory.
"""

# Agreement
from distcore.v1.runtime.agree import agree, run_together

# Moving bytes
from distcore.v1.runtime.execute import Executor, execute
from distcore.v1.runtime.group_channel import GroupChannel

# Tensors
from distcore.v1.runtime.layouts import dtype_name, is_dtensor, layout_of, layouts_of, torch_dtype

# Channels
from distcore.v1.runtime.open_channel import Group, OpenChannel, SoloChannel, channel_over
from distcore.v1.runtime.report import ExecuteReport
from distcore.v1.runtime.same_host import SameHostChannel, with_same_host
from distcore.v1.runtime.scratch_memory import scratch
from distcore.v1.runtime.shard import Shard

__all__ = [
    "ExecuteReport",
    "Executor",
    "Group",
    "GroupChannel",
    "OpenChannel",
    "SameHostChannel",
    "Shard",
    "SoloChannel",
    "agree",
    "channel_over",
    "dtype_name",
    "execute",
    "is_dtensor",
    "layout_of",
    "layouts_of",
    "run_together",
    "scratch",
    "torch_dtype",
    "with_same_host",
]
