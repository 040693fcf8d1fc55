"""A save that is killed at any moment leaves the checkpoint before it, and says what is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptx.savejob import Format

# Runs in a process of its own: it forks, before any thread is there, what is then killed.
SCRIPT = """
import json, os, random, shutil, signal, sys, time
import torch
import ckptx
from ckptx.proof import prove
from distcore.testing import rank_threads

path, kind, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
random.seed(seed)

def state(number):
    return {"w": torch.full((300, 1000), float(number)), "b": torch.full((9,), number),
            "number": number}

def save(number):
    def job(channel):
        ckptx.save(state(number), path, group=channel, format=kind, overwrite=True)
    rank_threads(2, job).values()

def forked(fn):
    child = os.fork()
    if not child:
        fn()
        os._exit(0)
    return child

def forever():
    number = 1
    while True:
        save(number)
        number += 1

os.waitpid(forked(lambda: save(0)), 0)
found = []
for _ in range(20):
    shutil.rmtree(path + ".partial", ignore_errors=True)
    child = forked(forever)
    limit = time.monotonic() + 10
    while not os.path.exists(path + ".partial") and time.monotonic() < limit:
        time.sleep(0.001)
    time.sleep(random.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    checkpoint = ckptx.open_checkpoint(path)
    number = checkpoint.value("number")
    whole = checkpoint.read("w")
    same = torch.equal(whole, torch.full((300, 1000), float(number)))
    broken = None
    if os.path.exists(path + ".partial"):
        try:
            ckptx.open_checkpoint(path + ".partial")
            broken = "complete"
        except ckptx.FormatError as error:
            broken = str(error)
    found.append([number, same, prove(checkpoint).damage, broken])
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_killed_at_twenty_moments(tmp_path: Path, kind: Format) -> None:
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "x"), kind, "1"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])  # gloo prints too
    assert len(found) == 20
    assert all(same and damage == [] for _, same, damage, _ in found)
    left = [broken for *_, broken in found if broken is not None]
    assert sum("incomplete" in text for text in left) >= 5
    # An empty directory is what there is before the mark comes and after it has gone.
    known = ("incomplete", "no safetensors file", "complete")
    assert all(any(word in text for word in known) for text in left)
