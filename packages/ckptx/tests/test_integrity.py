"""integrity: a side file of digests, and an inspector that judges what was read."""

from __future__ import annotations

import json

import pytest

from ckptx import FormatError
from ckptx.integrity import Block, Inspector, Integrity, blocks_of, key_at
from ckptx.stored import Chunk, StoredTensor
from distcore.v1 import Region

DATA = bytes(i * 7 % 256 for i in range(100))
BLOCKS = (*blocks_of(0, memoryview(DATA[:40])), *blocks_of(40, memoryview(DATA[40:])))
TENSORS = {
    "a": StoredTensor((40,), "uint8", (Chunk(Region((0,), (40,)), "dir/f", 0),)),
    "b": StoredTensor((60,), "uint8", (Chunk(Region((0,), (60,)), "dir/f", 40),)),
}
INTEGRITY = Integrity({"f": BLOCKS}, {"f": 100})


def inspector(*reads: tuple[int, bytes]) -> Inspector:
    found = Inspector(INTEGRITY, TENSORS)
    for offset, data in reads:
        found.watch("dir/f", offset, [memoryview(data)])
    return found


def test_what_was_read_whole_is_judged() -> None:
    assert inspector((0, DATA)).judge() == []
    assert inspector((0, DATA[:10]), (10, DATA[10:75]), (75, DATA[75:])).judge() == []


def test_two_ranks_judge_a_block_together() -> None:
    one, two = inspector((0, DATA[:70])), inspector((70, DATA[70:]))
    left = [one.judge(), two.judge()]
    assert [[(part.begin, part.nbytes) for part in parts] for parts in left] == [
        [(0, 30)],
        [(30, 30)],
    ]
    one.add([*left[0], *left[1]])
    assert one.judge() == []


def test_damage_is_named_with_file_key_and_byte() -> None:
    wrong = bytearray(DATA)
    wrong[60] ^= 1
    with pytest.raises(FormatError, match="damaged") as caught:
        inspector((0, bytes(wrong))).judge()
    error = caught.value
    assert (error.file, error.key, error.offset) == ("dir/f", "b", 40)


def test_damage_that_only_two_ranks_together_see() -> None:
    wrong = bytearray(DATA)
    wrong[99] ^= 128
    one, two = inspector((40, DATA[40:70])), inspector((70, bytes(wrong[70:])))
    parts = one.judge() + two.judge()
    one.add(parts)
    with pytest.raises(FormatError, match="damaged"):
        one.judge()


def test_blocks_read_in_part_and_other_files_are_not_judged() -> None:
    found = inspector((45, b"nonsense"))
    found.watch("other", 0, [memoryview(b"x")])
    assert len(found.judge()) == 1


def test_what_was_read_twice_counts_once() -> None:
    assert inspector((0, DATA), (0, DATA), (5, DATA[5:])).judge() == []


def test_the_side_file() -> None:
    text = INTEGRITY.to_json()
    assert Integrity.from_json(text, "x") == INTEGRITY
    assert json.loads(text)["format"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2, "digest": "crc32", "files": {}}',
        '{"format": 1, "digest": "crc32", "files": {"f": {"nbytes": 3, "blocks": [1, 2]}}}',
        '{"format": 1, "digest": "crc32", "files": {"f": {"nbytes": 9, "blocks": [0,5,1,4,5,1]}}}',
        '{"format": 1, "digest": "crc32", "files": {"f": {"nbytes": 3, "blocks": [-1, 2, 3]}}}',
    ],
)
def test_damaged_side_files(text: str) -> None:
    with pytest.raises(FormatError, match="holds no digests that are read here") as caught:
        Integrity.from_json(text, "some file")
    assert caught.value.file == "some file"


def test_the_key_of_a_block() -> None:
    assert key_at(TENSORS, "f", Block(39, 1, 0)) == "a"
    assert key_at(TENSORS, "f", Block(40, 1, 0)) == "b"
    assert key_at(TENSORS, "f", Block(100, 1, 0)) is None
    assert key_at(TENSORS, "g", Block(0, 1, 0)) is None


def test_parts_that_overlap_are_put_together_where_they_can_be() -> None:
    """As ranks read them that hold overlapping parts: the shortest first part leads nowhere."""
    wrong = bytearray(DATA)
    wrong[90] ^= 1
    one = inspector((40, DATA[40:50]), (40, DATA[40:70]), (70, bytes(wrong[70:])))
    with pytest.raises(FormatError, match="damaged"):
        one.judge()
    right = inspector((40, DATA[40:50]), (40, DATA[40:70]), (70, DATA[70:]))
    assert right.judge() == []


@pytest.mark.parametrize("bad", [0, 1])
def test_one_of_two_readings_of_a_part_is_damaged(bad: int) -> None:
    """Two ranks read it, and one of them gets other bytes than the disk has."""
    wrong = bytearray(DATA)
    wrong[45] ^= 1 << bad
    parts = [*inspector((40, DATA[40:70])).judge(), *inspector((40, bytes(wrong[40:70]))).judge()]
    one = inspector((70, DATA[70:]))
    one.add(parts)
    with pytest.raises(FormatError, match="damaged"):
        one.judge()
