"""Plan cache: plans that were made before, for layouts that come again.

A plan is handed out again only where everything that it was made of is equal, so whoever asks gets
what planning anew would give, whether the cache of another rank has it or not.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from operator import is_
from typing import TYPE_CHECKING

from distcore.v1 import Layout, PlanError, Problem

if TYPE_CHECKING:
    from reshard.options import Options
    from reshard.plan import ReshardPlan

DEFAULT_MAX_PLANS = 8


class PlanCache:
    """At most `max_plans` plans; the one goes that has not been asked for longest.

    Give one to `plan_reshard`, `Resharder` or `transfer`. It holds layouts and plans, never
    tensors, and belongs to whoever made it; threads may share one. Each rank may have its own, or
    none: what a plan is does not depend on it.

    >>> from reshard import Layout, plan_reshard
    >>> cache = PlanCache()
    >>> src = Layout.from_mesh(shape=(4,), dtype="int8", mesh=[0, 1], placements=["S(0)"])
    >>> dst = Layout.replicated(shape=(4,), dtype="int8", ranks=[2])
    >>> plan = plan_reshard({"w": src}, {"w": dst}, cache=cache)
    >>> plan_reshard({"w": src}, {"w": dst}, cache=cache) is plan
    True
    >>> cache.hits, cache.misses
    (1, 1)
    """

    def __init__(self, max_plans: int = DEFAULT_MAX_PLANS) -> None:
        if max_plans < 1:
            raise PlanError(Problem("max_plans", "range", f"{max_plans} is not at least 1"))
        self._max_plans = max_plans
        self._plans: list[ReshardPlan] = []
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self._plans)

    def find(
        self,
        src: Mapping[str, Layout],
        dst: Mapping[str, Layout],
        *,
        nodes: Mapping[int, int],
        options: Options,
        aliases: Mapping[str, str],
    ) -> ReshardPlan | None:
        """The plan that was made of equal arguments; None where there is none. Counted."""
        plan = self._made_of(src, dst, (options, nodes, aliases))
        with self._lock:
            if plan is None:
                self.misses += 1
            else:
                self.hits += 1
                self._put_last(plan)
        return plan

    def keep(self, plan: ReshardPlan) -> ReshardPlan:
        """Hand `plan` out from now on to whoever asks with what it was made of.

        Returns it, or the equal one that another thread has made meanwhile.
        """
        known = self._made_of(plan.src, plan.dst, (plan.options, plan.nodes, plan.aliases))
        with self._lock:
            self._put_last(known or plan)
        return known or plan

    def clear(self) -> None:
        """Let go of all plans."""
        with self._lock:
            self._plans = []

    def _made_of(
        self, src: Mapping[str, Layout], dst: Mapping[str, Layout], terms: tuple[object, ...]
    ) -> ReshardPlan | None:
        for plan in reversed(self._plans):  # a list that is never changed, only replaced
            if (plan.options, plan.nodes, plan.aliases) != terms:
                continue
            if are_alike(plan.src, src) and are_alike(plan.dst, dst):
                return plan
        return None

    def _put_last(self, plan: ReshardPlan) -> None:
        self._plans = [*(one for one in self._plans if one is not plan), plan][-self._max_plans :]


def are_alike(ones: Mapping[str, Layout], others: Mapping[str, Layout]) -> bool:
    """Whether two sides have equal keys, and under each key layouts of which one plan is made."""
    if len(ones) != len(others):
        return False
    if all(map(is_, map(ones.get, others), others.values())):
        return True
    # Thousands of tensors share a few layouts, and their forms a few meshes.
    known: set[tuple[int, int]] = set()
    for key, other in others.items():
        one = ones.get(key)
        if one is other:
            continue
        if one is None or (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        pair = (id(one.form or one), id(other.form or other))
        if pair not in known:
            if not _is_alike(one, other):
                return False
            known.add(pair)
    return True


def _is_alike(one: Layout, other: Layout) -> bool:
    """Stricter than equality, for which it does not matter in which order the ranks come.

    To the plan it does: of two holders that have sent equally much, the first sends.
    """
    if one.form is None or other.form is None:
        return one.form is other.form and one == other
    return one.form == other.form
