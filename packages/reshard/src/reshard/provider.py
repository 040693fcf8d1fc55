"""Provider: what this package offers the others under the role `distcore.v1.resharder`."""

from __future__ import annotations

from collections.abc import Mapping

from distcore.v1 import Layout, Plan
from reshard.options import Options
from reshard.plan import plan_reshard


class DirectResharder:
    """Plans from source layouts straight to destination layouts, in one Plan.

    Fulfils `distcore.v1.Resharder`. Since a Plan has one stage, receivers never pass anything on.
    """

    def plan(self, src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> Plan:
        """Return a plan after which every rank of `dst` holds its Regions of every key.

        PlanError where the keys, the global shapes or the dtypes differ.
        """
        (stage,) = plan_reshard(src, dst, options=Options(fan_out="direct")).stages
        return stage
