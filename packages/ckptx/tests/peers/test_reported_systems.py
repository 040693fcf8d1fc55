"""The table of reports beside this file names tests that are there, and all that are named so."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
REPORT = re.compile(r"test_(?:[a-z]+_)+\d{2,}_\w+")


def test_the_table_and_the_tests_agree() -> None:
    named = set(re.findall(r"`(test_\w+)`", (HERE / "README.md").read_text()))
    found: set[str] = set()
    for file in HERE.parent.rglob("test_*.py"):
        found.update(re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE))
    assert named - found == set()
    reports = {name for name in found if REPORT.fullmatch(name)}
    assert reports - named == set()
