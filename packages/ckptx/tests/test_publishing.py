"""publishing: a directory is there whole or not at all, and nothing else is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptx import CheckpointPlanError, WriteError
from ckptx import publishing as module
from ckptx.formats.source import INCOMPLETE
from ckptx.publishing import exchange, partial_of, prepare, publish


def written(path: Path, text: str, *, overwrite: bool = False) -> None:
    prepare(str(path), overwrite=overwrite)
    (Path(partial_of(str(path))) / "a.distcp").write_text(text)
    publish(str(path), {"a.distcp": len(text)}, {".metadata": b"m"})


def test_until_it_is_published_it_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "x"
    prepare(str(path), overwrite=False)
    assert os.listdir(tmp_path) == ["x.partial"]
    assert os.listdir(tmp_path / "x.partial") == [INCOMPLETE]
    publish(str(path), {}, {".metadata": b"m"})
    assert os.listdir(tmp_path) == ["x"]
    assert os.listdir(path) == [".metadata"]


@pytest.mark.parametrize("is_swapped", [True, False])
def test_an_older_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_swapped: bool
) -> None:
    if not is_swapped:
        monkeypatch.setattr(module, "exchange", lambda *_: False)
    written(tmp_path / "x", "one")
    written(tmp_path / "x", "three", overwrite=True)
    assert (tmp_path / "x" / "a.distcp").read_text() == "three"
    assert os.listdir(tmp_path) == ["x"]


def test_without_overwrite_it_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "x", "one")
    with pytest.raises(CheckpointPlanError, match="is there already"):
        prepare(str(tmp_path / "x"), overwrite=False)


def test_what_is_no_checkpoint_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(CheckpointPlanError, match=r"would be lost: \['thesis.tex'\]"):
        prepare(str(tmp_path / "home"), overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointPlanError, match="not a directory"):
        prepare(str(tmp_path / "file"), overwrite=True)


def test_what_a_dead_save_has_left_is_removed(tmp_path: Path) -> None:
    prepare(str(tmp_path / "x"), overwrite=False)
    (tmp_path / "x.partial" / "old").touch()
    written(tmp_path / "x", "new")
    assert os.listdir(tmp_path) == ["x"]


def test_one_that_was_set_aside_comes_back(tmp_path: Path) -> None:
    """Where names cannot be swapped, a crash between the two renames leaves it beside."""
    written(tmp_path / "x", "one")
    (tmp_path / "x").rename(tmp_path / "x.replaced")
    with pytest.raises(CheckpointPlanError, match="is there already"):
        prepare(str(tmp_path / "x"), overwrite=False)
    assert (tmp_path / "x" / "a.distcp").read_text() == "one"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    prepare(str(tmp_path / "x"), overwrite=False)
    with pytest.raises(WriteError, match="expected 5 bytes, found no file") as caught:
        publish(str(tmp_path / "x"), {"b": 5}, {})
    assert caught.value.filename == str(tmp_path / "x.partial" / "b")
    assert not (tmp_path / "x").exists()


def test_two_directories_are_swapped(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(str(tmp_path / "a"), str(tmp_path / "b")):
        pytest.skip("this file system cannot swap names")
    assert (os.listdir(tmp_path / "a"), os.listdir(tmp_path / "b")) == (["b"], ["a"])
    with pytest.raises(OSError, match="No such file"):
        exchange(str(tmp_path / "a"), str(tmp_path / "none"))
