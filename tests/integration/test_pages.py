"""The Python code in the pages runs as it stands there, each block in a fresh interpreter.

A block under a line that says `torchrun --nproc-per-node N` runs on N ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")]
WEIGHTS = "model.safetensors"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEW_IMPORT = re.compile(r"^\|[^|]*\|[^|]*?`((?:from|import) [^`]+)`", re.MULTILINE)
RANKS = re.compile(r"torchrun --nproc-per-node (\d+)")


@dataclass(frozen=True, slots=True)
class Block:
    """The code of one block, where it stands, and on how many ranks it runs (0: no torchrun)."""

    place: str
    code: str
    ranks: int

    def command(self, script: Path) -> list[str]:
        if self.ranks:
            launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
            return [sys.executable, *launch, str(self.ranks), str(script)]
        return [sys.executable, "-I", "-W", "error", str(script)]


def blocks() -> list[Block]:
    found = []
    for page in sorted(PAGES):
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            before = text[: match.start()].rstrip().rpartition("\n")[2]
            ranks = RANKS.search(before)
            place = f"{page.relative_to(ROOT)}:{line}"
            found.append(Block(place, match[1], int(ranks[1]) if ranks else 0))
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A working directory with the one file that pages read: the weights of a Linear."""
    save_file({"weight": torch.ones(4096, 4096), "bias": torch.ones(4096)}, tmp_path / WEIGHTS)
    return tmp_path


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.place)
def test_the_code_of_a_page_runs(block: Block, directory: Path) -> None:
    script = directory / "block.py"
    script.write_text(block.code)
    result = subprocess.run(
        block.command(script),
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, f"{block.place}\n{result.stderr}"


def test_what_users_migrate_to_is_there() -> None:
    """Every import in the right columns of the tables."""
    page = (ROOT / "docs" / "migrate.md").read_text()
    imports = NEW_IMPORT.findall(page)
    assert len(imports) >= 20
    code = "\n".join(imports)
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
