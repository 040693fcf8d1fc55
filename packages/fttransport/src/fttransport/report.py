"""Report: what one transfer moved, from where, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Report:
    """One transfer, as its own side saw it.

    `nbytes` is the size of the state, `per_source` the bytes that came from each source (or went
    to each destination), `reused_bytes` what the receiver had already and did not fetch,
    `retried_bytes` what was fetched again after a source failed, `failures` the text of every
    source that was given up.
    """

    step: int
    content_id: str
    nbytes: int
    seconds: float
    per_source: Mapping[str, int] = field(default_factory=dict)
    retried_bytes: int = 0
    reused_bytes: int = 0
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def moved_bytes(self) -> int:
        """The bytes that were carried."""
        return sum(self.per_source.values())

    @property
    def bytes_per_s(self) -> float:
        """The rate of what was carried."""
        return self.moved_bytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        routes = ", ".join(f"{name}: {n / 1e6:.1f} MB" for name, n in self.per_source.items())
        return (
            f"step {self.step}: {self.nbytes / 1e6:.1f} MB of state in {self.seconds:.3f} s, "
            f"{self.bytes_per_s / 1e6:.0f} MB/s ({routes or 'nothing moved'}; "
            f"reused {self.reused_bytes / 1e6:.1f} MB)"
        )
