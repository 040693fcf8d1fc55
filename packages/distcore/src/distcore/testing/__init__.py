"""The public test harness: ranks with deadlines, and proofs that a channel keeps its contract."""

# Outcomes
from distcore.testing.outcomes import DeadlineError, Outcome, Outcomes

# Ranks
from distcore.testing.threads import loopback_group, rank_threads

__all__ = [
    "DeadlineError",
    "Outcome",
    "Outcomes",
    "loopback_group",
    "rank_threads",
]
