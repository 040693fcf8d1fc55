"""distributed_run in a single process, and what it refuses before it makes a group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distcore import DistributedState, distributed_run
from distcore.launch import Launch
from distcore.run import _bound_device
from distcore.v1.errors import PlanError

LAUNCH = Launch("torch", 4, 3, 1, "localhost", 29500)


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()


def make_group(folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)


def test_a_single_process_sets_nothing_up() -> None:
    with distributed_run(device="cpu") as state:
        assert state == DistributedState(0, 1, "cpu")
        assert state.is_main
        assert not dist.is_initialized()
    with distributed_run() as state:
        assert state.device == "cuda"
    with distributed_run(device="auto") as state:
        assert state.device == torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert not DistributedState(1, 2, "cpu").is_main


def test_a_group_that_the_body_made_is_destroyed(tmp_path: Path) -> None:
    with distributed_run(device="cpu"):
        make_group(tmp_path)
    assert not dist.is_initialized()


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_passes_on_and_the_group_is_destroyed(
    error: BaseException, tmp_path: Path
) -> None:
    def run() -> None:
        with distributed_run(device="cpu", on_error="abort"):
            make_group(tmp_path)
            raise error

    with pytest.raises(type(error)) as caught:
        run()
    assert caught.value is error


def test_a_group_that_the_body_destroyed_itself(tmp_path: Path) -> None:
    with distributed_run(device="cpu"):
        make_group(tmp_path)
        dist.destroy_process_group()


def test_a_group_that_was_there_stays_pytorch_126275(tmp_path: Path) -> None:
    make_group(tmp_path)
    with distributed_run(device="cpu") as state:
        assert state == DistributedState(0, 1, "cpu")
    with pytest.raises(KeyError), distributed_run(device="cpu"):
        raise KeyError
    assert dist.is_initialized()
    dist.destroy_process_group()


def test_a_wrong_launch_is_one_error_that_names_every_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "many")
    with pytest.raises(PlanError) as caught, distributed_run(device="cpu"):
        pass
    assert str(caught.value) == (
        "RANK: not set; MASTER_ADDR: not set; MASTER_PORT: 'many' is no whole number"
    )


def test_an_unknown_way_to_fail_is_refused() -> None:
    wrong: Any = "ignore"
    with (
        pytest.raises(PlanError, match="on_error: expected one of"),
        distributed_run(on_error=wrong),
    ):
        pass


@pytest.mark.parametrize(("visible", "index"), [(1, 0), (2, 1), (8, 1)])
def test_the_device_of_a_rank(visible: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert _bound_device(LAUNCH, torch.device("cuda")) == torch.device("cuda", index)
    assert _bound_device(LAUNCH, torch.device("cuda", 5)) == torch.device("cuda", 5)
    assert _bound_device(LAUNCH, torch.device("cpu")) == torch.device("cpu")


def test_a_device_that_is_not_there_names_both_numbers_torchtitan_423(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    far = Launch("torch", 4, 3, 3, "localhost", 29500)
    with pytest.raises(PlanError, match="LOCAL_RANK: is 3, but only 2 CUDA devices are visible"):
        _bound_device(far, torch.device("cuda"))
    unknown = Launch("PMI", 4, 3, None, "localhost", 29500)
    with pytest.raises(PlanError, match="LOCAL_RANK: not set: which of the 2"):
        _bound_device(unknown, torch.device("cuda"))
