"""What transports carry, as Prometheus sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
import torch

from distcore.testing import check_transport
from fttransport import CodecRefused, HTTPTransport, StepMismatch, join_metadata

prometheus_client = pytest.importorskip("prometheus_client")

from fttransport.metrics import TransferMetrics  # noqa: E402 - after the library that it needs

Make = Callable[..., HTTPTransport[Any]]

S = timedelta(seconds=10)


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry()


def test_transfers_are_counted_by_direction_and_outcome(http: Make, registry: Any) -> None:
    metrics = TransferMetrics(registry)
    source, receiver = metrics.watch(http()), metrics.watch(http())
    source.send_checkpoint([], 1, {"w": torch.ones(1000)}, S)
    for _ in range(2):
        assert receiver.recv_checkpoint(0, source.metadata(), 1, S)["w"].sum() == 1000
    with pytest.raises(StepMismatch):
        receiver.recv_checkpoint(0, source.metadata(), 2, S)
    with pytest.raises(CodecRefused):
        source.send_checkpoint([], 2, {"w": print}, S)

    def value(name: str, direction: str, **labels: str) -> float | None:
        found: float | None = registry.get_sample_value(
            f"fttransport_{name}", {"direction": direction, **labels}
        )
        return found

    assert value("transfers_total", "receive", outcome="ok") == 2
    assert value("transfers_total", "receive", outcome="StepMismatch") == 1
    assert value("transfers_total", "send", outcome="ok") == 1
    assert value("transfers_total", "send", outcome="CodecRefused") == 1
    assert value("moved_bytes_total", "receive") == 8000
    assert value("moved_bytes_total", "send") == 0
    assert value("seconds_count", "receive") == 2
    seconds = value("seconds_sum", "receive")
    assert seconds is not None
    assert 0 < seconds < 10


def test_what_was_reused_and_which_sources_were_lost(http: Make, registry: Any) -> None:
    state = {"w": torch.arange(3_000_000.0)}
    own = {"w": state["w"].clone()}
    own["w"][0] = 5
    source, gone = http(), http()
    source.send_checkpoint([], 1, state, S)
    gone.shutdown()
    receiver = TransferMetrics(registry).watch(http(state_dict=lambda: own, delta=True))
    receiver.recv_checkpoint(0, join_metadata([gone.metadata(), source.metadata()]), 1, S)
    labels = {"direction": "receive"}
    reused = registry.get_sample_value("fttransport_reused_bytes_total", labels)
    # The first of three chunks differs.
    assert reused == 12_000_000 - 4_194_304
    assert registry.get_sample_value("fttransport_moved_bytes_total", labels) == 4_194_304
    assert registry.get_sample_value("fttransport_lost_peers_total", labels) == 1
    assert registry.get_sample_value("fttransport_retried_bytes_total", labels) == 0


def test_a_watched_transport_keeps_the_contract(http: Make, registry: Any) -> None:
    metrics = TransferMetrics(registry)
    check_transport(lambda *args: metrics.watch(http(*args)))


def test_all_else_is_the_transport_s_own(http: Make, registry: Any) -> None:
    transport = http()
    watched = TransferMetrics(registry).watch(transport)
    assert watched.address() == transport.address()
    watched.send_checkpoint([], 1, {}, S)
    watched.allow_checkpoint(2)
    assert watched.recv_checkpoint(0, watched.metadata(), 2, S) == {}
    assert watched.last_report is transport.last_report
    watched.disallow_checkpoint()
    watched.shutdown()


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "fttransport.metrics")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fttransport\[prometheus\]'"):
        import_module("fttransport.metrics")
