"""What a report says."""

from __future__ import annotations

from fttransport.report import Report


def test_rates_count_what_was_carried() -> None:
    report = Report(3, "c", 5_000_000, 2.0, per_source={"a": 3_000_000, "b": 1_000_000})
    assert report.moved_bytes == 4_000_000
    assert report.bytes_per_s == 2_000_000
    assert str(report) == (
        "step 3: 5.0 MB of state in 2.000 s, 2 MB/s (a: 3.0 MB, b: 1.0 MB; reused 0.0 MB)"
    )


def test_nothing_moved_in_no_time() -> None:
    report = Report(0, "c", 0, 0.0)
    assert report.bytes_per_s == 0
    assert "nothing moved" in str(report)
