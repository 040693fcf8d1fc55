"""Runs the tests inside torchft's wheel on the transports of this package.

Exit status 1 if any fails.

They look at three private names of the original, which the subclass below derives from the fence.
Started by `test_http_transport_torchft.py`, as a process of its own.
"""

from __future__ import annotations

import sys
import unittest
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from fttransport import CheckpointTransport, HTTPTransport, PGTransport

PACKAGE = "torchft.checkpointing"


class Watched(HTTPTransport[Any]):
    """HTTPTransport with the private names that the tests look at."""

    @property
    def _disallowed(self) -> bool:
        return not self._fence.allowed

    @property
    def _step(self) -> int:
        return self._fence.step

    @property
    def _checkpoint_lock(self) -> SimpleNamespace:
        return SimpleNamespace(w_locked=lambda: self._disallowed)


def main() -> int:
    for module, name, ours in (
        ("transport", "CheckpointTransport", CheckpointTransport),
        ("http_transport", "HTTPTransport", Watched),
        ("pg_transport", "PGTransport", PGTransport),
        ("http_transport_bench", "HTTPTransport", Watched),
    ):
        setattr(import_module(f"{PACKAGE}.{module}"), name, ours)
    suite = unittest.TestSuite()
    for module in ("http_transport_test", "pg_transport_test"):
        tests = import_module(f"{PACKAGE}.{module}")
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(tests))
    result = unittest.TextTestRunner(verbosity=1).run(suite)
    return 0 if result.wasSuccessful() and result.testsRun else 1


if __name__ == "__main__":
    sys.exit(main())
