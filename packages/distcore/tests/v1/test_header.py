"""The header: pinned byte by byte by its corpus, and refused where it is none."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1.errors import PlanError
from distcore.v1.header import FORMAT, NBYTES, Call, Header, digest16

Case = dict[str, Any]
CORPUS = Path(__file__).parents[1] / "conformance" / "header"
RIGHT: list[Case] = json.loads((CORPUS / "right.json").read_text(encoding="utf-8"))
WRONG: list[Case] = json.loads((CORPUS / "wrong.json").read_text(encoding="utf-8"))
LABEL = digest16("step")


def named(case: Case) -> str:
    return str(case["name"]).replace(" ", "_")


def header_of(case: Case) -> Header:
    return Header(
        Call[case["call"]],
        failed=case["failed"],
        label=blake2b(case["label"].encode(), digest_size=16).digest(),
        value=bytes.fromhex(case["value"]),
        source=case["source"],
        extra=case["extra"],
        count=case["count"],
        flags=case["flags"],
    )


@pytest.mark.parametrize("case", RIGHT, ids=named)
def test_a_right_case_is_written_and_read_as_pinned(case: Case) -> None:
    assert header_of(case).encode().hex() == case["row"]
    assert Header.decode(bytes.fromhex(case["row"])) == header_of(case)


@pytest.mark.parametrize("case", RIGHT, ids=named)
def test_a_label_is_pinned_by_its_digest(case: Case) -> None:
    assert digest16(case["label"]).hex() == case["row"][32:64]


@pytest.mark.parametrize("case", WRONG, ids=named)
def test_a_wrong_case_is_refused_with_its_reason(case: Case) -> None:
    with pytest.raises(ValueError, match=case["error"]):
        Header.decode(bytes.fromhex(case["row"]))


def test_the_corpus_has_every_call_and_this_format() -> None:
    assert {case["call"] for case in RIGHT} == {call.name for call in Call}
    assert {case["row"][:10] for case in RIGHT} == {f"{b'SHWK'.hex()}{FORMAT:02x}"}
    assert {len(case["row"]) for case in RIGHT} == {2 * NBYTES}


@given(
    call=st.sampled_from(Call),
    failed=st.booleans(),
    digests=st.tuples(*[st.binary(min_size=16, max_size=16)] * 2),
    small=st.tuples(*[st.integers(0, 2**32 - 1)] * 2),
    large=st.tuples(*[st.integers(0, 2**64 - 1)] * 2),
)
def test_every_header_is_read_as_it_was_written(
    call: Call,
    failed: bool,
    digests: tuple[bytes, bytes],
    small: tuple[int, int],
    large: tuple[int, int],
) -> None:
    header = Header(call, failed, *digests, small[0], *large, small[1])
    row = header.encode()
    assert len(row) == NBYTES
    assert Header.decode(row) == header


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"label": b"short"}, "label"),
        ({"value": bytes(17)}, "value"),
        ({"source": 2**32}, "header"),
        ({"source": -1}, "header"),
        ({"flags": 2**32}, "header"),
        ({"extra": 2**64}, "header"),
        ({"count": -1}, "header"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], where: str) -> None:
    with pytest.raises(PlanError) as caught:
        Header(Call.AGREE, **{"failed": False, "label": LABEL, **change})
    assert [problem.where for problem in caught.value.problems] == [where]


def test_a_digest_takes_any_text() -> None:
    assert digest16("").hex() == "cae66941d9efbd404e4d88758ea67670"
    assert digest16("\ud800") != digest16("?")
