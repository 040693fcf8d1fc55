"""The public test harness: ranks with deadlines, and proofs that a contract is kept.

The names below are loaded when they are first used, so that `distcore.testing.strategies`, the
strategies for hypothesis, can be used without torch.
"""

from typing import TYPE_CHECKING

from distcore.v1.catalogue import on_first_use

if TYPE_CHECKING:
    # Contracts
    from distcore.testing.channel_contract import MakeChannel, check_channel

    # Outcomes
    from distcore.testing.outcomes import DeadlineError, Outcome, Outcomes

    # Ranks
    from distcore.testing.pool import RankDiedError, RankPool, rank_pool
    from distcore.testing.pool_worker import RemoteError
    from distcore.testing.resharder_contract import check_resharder
    from distcore.testing.threads import loopback_group, rank_threads
    from distcore.testing.transport_contract import MakeTransport, check_transport

__all__ = [
    "DeadlineError",
    "MakeChannel",
    "MakeTransport",
    "Outcome",
    "Outcomes",
    "RankDiedError",
    "RankPool",
    "RemoteError",
    "check_channel",
    "check_resharder",
    "check_transport",
    "loopback_group",
    "rank_pool",
    "rank_threads",
]

_HOMES = {
    "DeadlineError": "outcomes",
    "MakeChannel": "channel_contract",
    "MakeTransport": "transport_contract",
    "Outcome": "outcomes",
    "Outcomes": "outcomes",
    "RankDiedError": "pool",
    "RankPool": "pool",
    "RemoteError": "pool_worker",
    "check_channel": "channel_contract",
    "check_resharder": "resharder_contract",
    "check_transport": "transport_contract",
    "loopback_group": "threads",
    "rank_pool": "pool",
    "rank_threads": "threads",
}

__getattr__, __dir__ = on_first_use(__name__, _HOMES)
