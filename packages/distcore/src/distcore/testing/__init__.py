"""The public test harness: ranks with deadlines, and proofs that a channel keeps its contract."""

# Contracts
from distcore.testing.channel_contract import MakeChannel, check_channel

# Outcomes
from distcore.testing.outcomes import DeadlineError, Outcome, Outcomes

# Ranks
from distcore.testing.pool import RankDiedError, RankPool, rank_pool
from distcore.testing.pool_worker import RemoteError
from distcore.testing.threads import loopback_group, rank_threads

__all__ = [
    "DeadlineError",
    "MakeChannel",
    "Outcome",
    "Outcomes",
    "RankDiedError",
    "RankPool",
    "RemoteError",
    "check_channel",
    "loopback_group",
    "rank_pool",
    "rank_threads",
]
