"""Differences: the keys that differ, and of long texts the part that does."""

from __future__ import annotations

import json

from distcore.v1.runtime.differences import differences


def test_short_texts_are_shown_whole() -> None:
    assert differences({0: '"a"', 3: '"b"'}) == {0: '"a"', 3: '"b"'}


def test_of_mappings_only_the_keys_that_differ_are_shown() -> None:
    tables = {0: {"a": 1, "b": "x"}, 1: {"a": 1, "b": "y"}, 2: {"a": 1}}
    texts = {rank: json.dumps(table) for rank, table in tables.items()}
    assert differences(texts) == {0: "'b' is \"x\"", 1: "'b' is \"y\"", 2: "'b' is missing"}


def test_a_number_and_its_text_are_told_apart() -> None:
    assert differences({0: '{"a": 1}', 1: '{"a": "1"}'}) == {0: "'a' is 1", 1: "'a' is \"1\""}


def test_of_many_keys_four_are_named_and_the_rest_counted() -> None:
    texts = {rank: json.dumps({f"k{n}": rank for n in range(7)}) for rank in range(2)}
    assert differences(texts)[1] == "'k0' is 1, 'k1' is 1, 'k2' is 1, 'k3' is 1, and 3 more"


def test_a_mapping_beside_something_else_is_shown_as_it_is() -> None:
    assert differences({0: '{"a": 1}', 1: "[1]"}) == {0: '{"a": 1}', 1: "[1]"}


def test_a_long_text_is_shown_where_it_begins_to_differ() -> None:
    same = "s" * 5000
    found = differences({0: f"{same}left{same}", 1: f"{same}right{same}"})
    assert found[0].startswith("..." + "s" * 40 + "left")
    assert found[1].startswith("..." + "s" * 40 + "right")
    assert {len(text) for text in found.values()} == {406}


def test_a_text_that_is_the_beginning_of_another_ends_where_it_ends() -> None:
    found = differences({0: "s" * 1000, 1: "s" * 2000})
    assert found == {0: "..." + "s" * 40, 1: "..." + "s" * 400 + "..."}


def test_a_long_value_of_a_key_is_cut_too() -> None:
    texts = {rank: json.dumps({"k": [0] * 1000 + [rank]}) for rank in range(2)}
    assert differences(texts)[1].endswith(", 0, 1]")
    assert len(differences(texts)[1]) < 100


def test_mappings_that_differ_in_no_key_are_shown_whole() -> None:
    assert differences({0: '{"a": 1}', 1: '{"a":1}'}) == {0: '{"a": 1}', 1: '{"a":1}'}
