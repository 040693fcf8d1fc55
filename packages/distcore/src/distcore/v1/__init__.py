"""The interface between the packages, version 1: the pure half.

Everything here is a value or a function of values and needs only the standard library. The half
with effects is `distcore.v1.runtime`.
"""

# Who takes what
from distcore.v1.assignment.balance import Assignment, balance

# A package's names
from distcore.v1.catalogue import on_first_use

# Nouns
from distcore.v1.channel import Channel, Message, Pending
from distcore.v1.description import describe_layout, layout_from

# Values that the nouns are made of
from distcore.v1.dtypes import ITEMSIZES, itemsize

# Errors
from distcore.v1.errors import (
    ChannelError,
    ChannelTimeout,
    DisagreementError,
    PeerError,
    PlanError,
    Problem,
)
from distcore.v1.layout import Layout, Mesh, MeshForm, Piece

# Who exchanges at the same time
from distcore.v1.matching import Pair, matchings, pairs_of
from distcore.v1.packing import Packing, cut_rounds
from distcore.v1.placement import Interval, Placement, Reading, intervals
from distcore.v1.plan import Columns, Plan, Transfer

# What packages offer each other
from distcore.v1.protocols import Progress, Resharder, StateTransport
from distcore.v1.region import Region

# The version of the interface
from distcore.v1.registry import LEVEL, providers, require

__all__ = [
    "ITEMSIZES",
    "LEVEL",
    "Assignment",
    "Channel",
    "ChannelError",
    "ChannelTimeout",
    "Columns",
    "DisagreementError",
    "Interval",
    "Layout",
    "Mesh",
    "MeshForm",
    "Message",
    "Packing",
    "Pair",
    "PeerError",
    "Pending",
    "Piece",
    "Placement",
    "Plan",
    "PlanError",
    "Problem",
    "Progress",
    "Reading",
    "Region",
    "Resharder",
    "StateTransport",
    "Transfer",
    "balance",
    "cut_rounds",
    "describe_layout",
    "intervals",
    "itemsize",
    "layout_from",
    "matchings",
    "on_first_use",
    "pairs_of",
    "providers",
    "require",
]
