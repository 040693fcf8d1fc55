"""Rows on their way: a row of another length is told apart, not cut."""

from __future__ import annotations

import pytest

from distcore.v1.errors import ChannelError, DisagreementError
from distcore.v1.runtime.row_frame import frame_row, read_rows, slot_nbytes


def test_a_frame_is_magic_length_and_row() -> None:
    assert frame_row(b"abc") == b"dcr1\x03\x00\x00\x00abc"


def test_rows_come_back_whatever_lies_behind_them() -> None:
    slots = [frame_row(b"ab"), frame_row(b"cd") + b"room"]
    assert read_rows(slots, 2, (4, 9)) == (b"ab", b"cd")


def test_a_slot_has_room_for_a_longer_row() -> None:
    assert slot_nbytes(64) >= len(frame_row(b"x" * 4096))


def test_rows_of_different_lengths_name_each_rank() -> None:
    with pytest.raises(DisagreementError) as caught:
        read_rows([frame_row(b"ab"), frame_row(b"abcd")], 2, (4, 9))
    assert caught.value.values == {4: "2 bytes", 9: "4 bytes"}


def test_what_is_no_row_is_refused() -> None:
    with pytest.raises(ChannelError, match="rank 9") as caught:
        read_rows([frame_row(b"ab"), b"\0" * 10], 2, (4, 9))
    assert (caught.value.peer, caught.value.usable) == (9, False)
