"""rows: what each rank says, of any length, in group order."""

from __future__ import annotations

from typing import Any

import pytest

from ckptx.rows import gather_rows
from distcore.testing import rank_threads
from distcore.v1 import Channel


class Counted:
    """A channel that counts its exchanges."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        self.calls += 1
        return self._inner.all_gather(row, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("rows", "calls"),
    [
        ((b"a", b"", b"\0\0"), 2),
        ((b"", b"x" * 5000, b"y"), 2),
        ((b"", b"", b""), 1),
    ],
)
def test_rows_of_any_length(rows: tuple[bytes, ...], calls: int) -> None:
    def job(channel: Channel) -> tuple[tuple[bytes, ...], int]:
        counted: Any = Counted(channel)
        return gather_rows(rows[channel.rank], counted, timeout_s=5), counted.calls

    assert rank_threads(3, job).values() == ((rows, calls),) * 3


def test_a_rank_that_does_not_come() -> None:
    def job(channel: Channel) -> None:
        if channel.rank:
            gather_rows(b"x", channel, timeout_s=0.3)

    outcomes = rank_threads(2, job)
    assert isinstance(outcomes[1].exception, TimeoutError)
    assert outcomes[1].seconds < 5
