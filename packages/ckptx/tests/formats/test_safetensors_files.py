"""safetensors_files: names, headers and the index, without any tensor."""

from __future__ import annotations

import json

import pytest

from ckptx import CheckpointPlanError, plan_save
from ckptx.formats.safetensors_files import safetensors_format
from ckptx.outfile import OutFile, OutFormat
from ckptx.placing import SavePlan, Write
from distcore.v1 import Layout, Region

LAYOUTS = {
    "a": Layout.replicated(shape=(3,), dtype="uint8", ranks=(0, 1)),
    "b": Layout.replicated(shape=(4, 2), dtype="float64", ranks=(0, 1)),
}


def header(file: OutFile) -> dict[str, dict[str, object]]:
    length = int.from_bytes(file.head[:8], "little")
    assert length == len(file.head) - 8
    assert len(file.head) % 8 == 0
    found: dict[str, dict[str, object]] = json.loads(file.head[8:])
    return found


def formatted(*, split: bool, values: str = "{}") -> OutFormat:
    plan = plan_save(LAYOUTS, (0, 1), split=split, min_split=1)
    return safetensors_format(plan, LAYOUTS, values, ranks=(0, 1))


def test_whole_tensors_get_an_index() -> None:
    found = formatted(split=False)
    names = [file.name for file in found.files]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.loads(found.last["model.safetensors.index.json"])
    assert index == {
        "metadata": {"total_size": 67},
        "weight_map": {"a": names[1], "b": names[0]},
    }


def test_parts_say_where_they_begin() -> None:
    found = formatted(split=True, values='{"lr":0.5}')
    assert {file.name[:11] for file in found.files} == {"shard-00001", "shard-00002"}
    assert found.last == {}
    for file in found.files:
        table = json.loads(str(header(file)["__metadata__"]["DCP_SHARDING_INFO"]))
        assert table == {
            part.key: {"saved_offsets": list(part.region.start)} for part in file.parts
        }
    assert header(found.files[0])["__metadata__"]["ckptx.values"] == '{"lr":0.5}'
    assert "ckptx.values" not in header(found.files[1])["__metadata__"]


def test_several_parts_of_one_tensor_go_to_several_files() -> None:
    layout = Layout.replicated(shape=(4,), dtype="int16", ranks=(0,))
    writes = tuple(Write("w", Region((low,), (low + 2,)), 4) for low in (0, 2))
    found = safetensors_format(SavePlan({0: writes}, (), 8, 8), {"w": layout}, "{}", ranks=(0,))
    assert [file.name for file in found.files] == [
        "shard-00001-model-00001-of-00002.safetensors",
        "shard-00001-model-00002-of-00002.safetensors",
    ]


def test_nothing_at_all_is_one_file() -> None:
    found = safetensors_format(SavePlan({}, (), 0, 0), {}, "{}", ranks=(0,))
    assert [(file.name, file.parts) for file in found.files] == [("model.safetensors", ())]


def test_dtypes_without_a_word_are_all_named() -> None:
    layouts = {
        key: Layout.replicated(shape=(1,), dtype=dtype, ranks=(0,))
        for key, dtype in (("x", "complex128"), ("y", "float32"), ("z", "complex32"))
    }
    with pytest.raises(CheckpointPlanError) as caught:
        safetensors_format(plan_save(layouts, (0,)), layouts, "{}", ranks=(0,))
    assert [problem.where for problem in caught.value.problems] == ["x", "z"]
