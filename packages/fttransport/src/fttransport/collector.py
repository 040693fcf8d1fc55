"""Collector: Python's search for cycles, put off while thousands of small objects are made.

A full search walks through every object of the process, which takes longer than describing
thousands of tensors does, and finds nothing there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let no search begin inside the block; afterwards all is as it was."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
