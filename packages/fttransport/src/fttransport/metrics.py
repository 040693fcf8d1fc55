"""Metrics: what transports carry, counted for Prometheus. Needs `fttransport[prometheus]`.

| name | kind | labels | counts |
|---|---|---|---|
| `fttransport_transfers_total` | counter | direction, outcome | calls; `ok` or the error's class |
| `fttransport_seconds` | histogram | direction | seconds of each call that did not fail |
| `fttransport_moved_bytes_total` | counter | direction | bytes that were carried |
| `fttransport_retried_bytes_total` | counter | direction | bytes fetched again after a failure |
| `fttransport_reused_bytes_total` | counter | direction | bytes the receiver had already |
| `fttransport_lost_peers_total` | counter | direction | sources or destinations given up |

`direction` is `send` or `receive`. A send over HTTP only stages the state: what is carried then is
counted by those who receive it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

from fttransport.report import Report
from fttransport.transport import CheckpointTransport

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
except ImportError as error:
    text = "metrics need more; run: pip install 'fttransport[prometheus]'"
    raise ModuleNotFoundError(text, name=error.name) from error

T = TypeVar("T")

SEND: Final = "send"
RECEIVE: Final = "receive"
_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class TransferMetrics:
    """The metrics of all transports of a process: make one, and let it watch each transport.

    They are registered in `registry`, which takes each name once.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"fttransport_{name}", text, ("direction", *labels), registry=registry)

        self._transfers = counter("transfers", "Calls, by how they ended", "outcome")
        self._moved = counter("moved_bytes", "Bytes that were carried")
        self._retried = counter("retried_bytes", "Bytes fetched again after a failure")
        self._reused = counter("reused_bytes", "Bytes that the receiver had already")
        self._lost = counter("lost_peers", "Sources or destinations that were given up")
        self._seconds = Histogram(
            "fttransport_seconds",
            "Seconds of a transfer",
            ("direction",),
            buckets=_BUCKETS,
            registry=registry,
        )

    def watch(self, transport: CheckpointTransport[T]) -> WatchedTransport[T]:
        """The same transport, whose transfers are counted from now on."""
        return WatchedTransport(transport, self)

    def count(self, direction: str, report: Report) -> None:
        """Count what a report tells."""
        self._moved.labels(direction).inc(report.moved_bytes)
        self._retried.labels(direction).inc(report.retried_bytes)
        self._reused.labels(direction).inc(report.reused_bytes)
        self._lost.labels(direction).inc(len(report.failures))

    @contextmanager
    def counted(self, direction: str, transport: CheckpointTransport[T]) -> Iterator[None]:
        """Count the transfer that the block makes with `transport`."""
        before, begin = _report_of(transport), time.monotonic()
        outcome = "ok"
        try:
            yield
        except BaseException as error:
            outcome = type(error).__name__
            raise
        else:
            self._seconds.labels(direction).observe(time.monotonic() - begin)
        finally:
            self._transfers.labels(direction, outcome).inc()
            report = _report_of(transport)
            if report is not None and report is not before:
                self.count(direction, report)


class WatchedTransport(CheckpointTransport[T]):
    """A transport whose transfers are counted; all else is as the transport has it."""

    def __init__(self, transport: CheckpointTransport[T], metrics: TransferMetrics) -> None:
        self._transport = transport
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        if name == "_transport":  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self._transport, name)

    def metadata(self) -> str:
        """See the transport that is watched; so for all methods."""
        return self._transport.metadata()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Send, and count it."""
        with self._metrics.counted(SEND, self._transport):
            self._transport.send_checkpoint(dst_ranks, step, state_dict, timeout)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive, and count it."""
        with self._metrics.counted(RECEIVE, self._transport):
            return self._transport.recv_checkpoint(src_rank, metadata, step, timeout)

    def disallow_checkpoint(self) -> None:
        """See the transport that is watched."""
        self._transport.disallow_checkpoint()

    def shutdown(self, wait: bool = True) -> None:
        """See the transport that is watched."""
        self._transport.shutdown(wait)


def _report_of(transport: CheckpointTransport[T]) -> Report | None:
    """The report of a transport's last transfer, where it keeps one."""
    report = getattr(transport, "last_report", None)
    return report if isinstance(report, Report) else None
