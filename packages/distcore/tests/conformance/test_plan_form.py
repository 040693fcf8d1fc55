"""The corpus of the plan's JSON form: what must be read, and what must be refused and why."""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from distcore.v1 import Plan, PlanError, Region, Transfer

CORPUS = json.loads((Path(__file__).parent / "plan.json").read_text(encoding="utf-8"))
Case = dict[str, Any]


def named(case: Case) -> str:
    return str(case["name"]).replace(" ", "_")


def text_of(case: Case) -> str:
    return str(case["text"]) if "text" in case else json.dumps(case["form"])


def transfers_of(case: Case) -> list[Transfer]:
    return [
        Transfer(key, src, dst, Region(tuple(start), tuple(stop)))
        for key, src, dst, start, stop in case["transfers"]
    ]


def digest_of(form: Case) -> str:
    """The digest of a form as the README of this folder describes it, and no other code."""
    keys = [key.encode() for key in form["keys"]]
    words = struct.pack("<2q", form["format"], len(keys))
    words += b"".join(struct.pack("<q", len(key)) + key for key in keys)
    for name in ("ndims", "key", "src", "dst", "coords"):
        words += struct.pack(f"<q{len(form[name])}q", len(form[name]), *form[name])
    return blake2b(words, digest_size=16).hexdigest()


@pytest.mark.parametrize("case", CORPUS["right"], ids=named)
def test_a_right_form_is_read(case: Case) -> None:
    plan = Plan.from_json(text_of(case))
    assert list(plan) == transfers_of(case)
    assert plan.digest == case["digest"] == digest_of(case["form"])


@pytest.mark.parametrize("case", CORPUS["right"], ids=named)
def test_a_right_form_is_what_is_written(case: Case) -> None:
    plan = Plan(transfers_of(case))
    assert json.loads(plan.to_json()) == case["form"]
    assert plan.digest == case["digest"]


@pytest.mark.parametrize("case", CORPUS["wrong"], ids=named)
def test_a_wrong_form_is_refused_for_its_reason(case: Case) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text_of(case))
    found = [(problem.where, problem.kind) for problem in caught.value.problems]
    assert found == [(case["where"], case["kind"])]
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"format":' + "1" * 10_000 + "}", b"\xff\xfe{}x"],
    ids=["nested too deeply", "ten thousand digits", "no text"],
)
def test_a_hostile_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not JSON"):
        Plan.from_json(text)
