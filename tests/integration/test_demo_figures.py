"""What the demo makes of what its ranks tell, without any rank."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the demo can be imported; they belong to no package."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_bytes_are_summed_and_the_slowest_rank_counts() -> None:
    from figures import Act, Ledger, Moved

    ledger = Ledger()
    for rank, seconds in enumerate((1.0, 3.0)):
        for turn in (1, 2):
            least = 8 if rank == 0 else 0
            moved = Moved("OwnerMuon", received=10, least=least, seconds=seconds, turn=turn)
            ledger.add(rank, Act("train", [moved]))
        ledger.add(rank, Act("load", [Moved("load", read=30, received=20)]))
    train, load = ledger.rows()
    assert train.name == "OwnerMuon, 2 steps"
    assert (train.received, train.least, train.seconds) == (40, 16, 6.0)
    assert (load.read, load.received, load.nbytes) == (60, 40, 100)
    assert ledger.received(1) == 40
    assert ledger.nbytes == 140


def test_a_step_that_is_made_again_counts_once() -> None:
    from figures import Act, Ledger, Moved

    ledger = Ledger()
    for received in (10, 12):
        ledger.add(0, Act("train", [Moved("OwnerMuon", received=received, turn=3)]))
    assert ledger.rows()[0].received == 12


def test_the_floor_is_the_time_of_a_plain_copy() -> None:
    from figures import Act, Ledger, Moved

    ledger = Ledger()
    ledger.add(0, Act("load", [Moved("load", read=60, received=40)]))
    assert ledger.rows()[0].floor is None
    for rank in (0, 1):
        ledger.gauge(rank, "read", 15, 0.5)
        ledger.gauge(rank, "copy", 40, 0.25 * (rank + 1))
    # 60 bytes at 30 in 0.5 s, and 40 at 80 in 0.5 s, as the slower of the two ranks took.
    assert ledger.rows()[0].floor == 1.0 + 0.25
    ledger.floors["load"] = 2.5
    assert ledger.rows()[0].floor == 2.5


def test_a_claim_that_one_rank_denies_does_not_hold() -> None:
    from figures import Act, Ledger

    ledger = Ledger()
    for rank in range(3):
        ledger.add(rank, Act("train", [], [("same bits", rank != 1), ("it learns", True)]))
    assert not ledger.exact("train")
    assert not ledger.exact("heal"), "nothing was claimed of it"
    assert list(ledger.verdicts()) == [("train", "same bits", False), ("train", "it learns", True)]


def test_a_killed_rank_stops_and_starts_again() -> None:
    from chronicle import Chronicle
    from tell import Event

    chronicle = Chronicle(2)

    def told(rank: int, at: float, kind: str, **fields: object) -> None:
        chronicle.add(Event(rank, chronicle.begin + at, kind, fields))

    for rank in (0, 1):
        told(rank, 1.0, "doing", act="train", what="step 1")
    told(1, 2.0, "killed", pid=7)
    told(0, 2.5, "doing", act="heal", what="waits for one in the place of the lost rank")
    told(1, 5.0, "doing", act="heal", what="receives from ranks 0")
    told(1, 5.5, "progress", done=3, of=4)
    assert chronicle.progress == {1: (3, 4)}
    for rank in (0, 1):
        told(rank, 6.0, "ended")
    assert chronicle.progress == {}
    assert [(rank, round(at, 3)) for rank, at in chronicle.kills] == [(1, 2.0)]
    spans = [(s.rank, s.act, round(s.start, 3), round(s.stop, 3)) for s in chronicle.spans]
    assert spans == [
        (0, "start", 0.0, 1.0),
        (1, "start", 0.0, 1.0),
        (1, "train", 1.0, 2.0),
        (0, "train", 1.0, 2.5),
        (1, "start", 2.0, 5.0),
        (0, "heal", 2.5, 6.0),
        (1, "heal", 5.0, 6.0),
    ]
    seconds = [round(chronicle.seconds(act), 3) for act in ("start", "train", "heal")]
    assert seconds == [4.0, 1.5, 3.5]


@pytest.mark.parametrize("holds", [True, False])
def test_the_demo_fails_if_a_claim_does_not_hold(holds: bool, tmp_path: Path) -> None:
    import demo
    from chronicle import Chronicle
    from figures import Act, Moved

    chronicle = Chronicle(1)
    chronicle.ledger.add(0, Act("load", [Moved("load", read=8, least=8)], [("a < b", holds)]))
    console = Console(file=io.StringIO(), width=80)
    assert demo.conclude(chronicle, tmp_path, console, trains=True) == (0 if holds else 1)
    page = (tmp_path / "index.html").read_text()
    assert "a &lt; b" in page
    assert f"{int(holds)} of 1 claims hold" in page
    assert ("FAIL" in page) == (not holds)
    assert isinstance(console.file, io.StringIO)
    assert ("FAIL" in console.file.getvalue()) == (not holds)


def test_the_demo_fails_if_nothing_was_claimed(tmp_path: Path) -> None:
    import demo
    from chronicle import Chronicle

    console = Console(file=io.StringIO(), width=80)
    assert demo.conclude(Chronicle(1), tmp_path, console, trains=True) == 1
