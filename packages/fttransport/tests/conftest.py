"""Transports that are shut down with their test, and the limits of time it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from fttransport import HTTPTransport

Make = Callable[..., HTTPTransport[Any]]


@pytest.fixture
def http() -> Iterator[Make]:
    """Makes HTTP transports with a timeout of 10 s and one stream, unless told otherwise."""
    with ExitStack() as stack:

        def make(num_chunks: int = 0, *, timeout_s: float = 10, **options: Any) -> Any:
            made: HTTPTransport[Any] = HTTPTransport(
                timedelta(seconds=timeout_s), num_chunks, **options
            )
            stack.callback(made.shutdown)
            return made

        yield make
