"""Transfer: one call that carries tensors from one mesh and placement to another."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.channels import Group
from reshard.compiled import Verify
from reshard.hooks import Hook
from reshard.inventory import Cast
from reshard.options import Options
from reshard.report import TransferReport
from reshard.resharder import Resharder


def transfer(
    src: object,
    dst: object,
    group: Group | None = None,
    *,
    options: Options | None = None,
    cast: Cast | Mapping[str, Cast] = "error",
    hooks: Mapping[str, Hook] | None = None,
    verify: Verify | None = None,
    timeout_s: float | None = None,
) -> TransferReport:
    """Bring what `src` holds into `dst`, in place, on all ranks of `group`; and report.

    Collective. Tensors or (nested) dicts of them, None on ranks that have none; see `Resharder`,
    which is worth having where the same tensors are carried more than once.
    """
    with Resharder(
        src, dst, group, options=options, cast=cast, hooks=hooks, timeout_s=timeout_s
    ) as resharder:
        return resharder.run(verify=verify)
