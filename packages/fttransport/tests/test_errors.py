"""Every error is also what users of urllib, of timeouts and of process groups catch."""

from __future__ import annotations

import copy
from urllib.error import HTTPError, URLError

import pytest

from fttransport import errors


def test_a_step_mismatch_is_an_http_error_with_code_400() -> None:
    error = errors.StepMismatch.of(2345, 1234)
    assert isinstance(error, HTTPError)
    assert error.code == 400
    text = "HTTP Error 400: invalid checkpoint requested, serving 2345 but got step=1234"
    assert str(error) == text


@pytest.mark.parametrize(
    ("kind", "caught"),
    [
        (errors.AuthError, HTTPError),
        (errors.NotServing, TimeoutError),
        (errors.NotServing, HTTPError),
        (errors.DeadlineExceeded, TimeoutError),
        (errors.DeadlineExceeded, URLError),
        (errors.SourceLost, ConnectionError),
        (errors.SourceLost, URLError),
        (errors.LayoutMismatch, ValueError),
        (errors.CodecRefused, TypeError),
    ],
)
def test_each_is_also_what_users_catch(
    kind: type[errors.TransportError], caught: type[Exception]
) -> None:
    error = kind("timed out")
    assert isinstance(error, caught)
    assert isinstance(error, RuntimeError)
    assert "timed out" in str(error)
    assert error.dirty is False


@pytest.mark.parametrize("name", sorted(errors.BY_NAME))
def test_each_can_be_copied(name: str) -> None:
    error = errors.BY_NAME[name]("why")
    again = copy.copy(error)
    assert type(again) is type(error)
    assert again.text == "why"


def test_codes() -> None:
    assert errors.AuthError("x").code == 401
    assert errors.NotServing("x").code == 503
    assert errors.NotServing("x", 409).code == 409


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "wrong"),
        (1, "wrong: part of state[0]"),
        (22, f"wrong: part of {', '.join(f'state[{i}]' for i in range(20))} and 2 more"),
    ],
    ids=["none", "one", "many"],
)
def test_an_integrity_error_names_the_tensors(count: int, said: str) -> None:
    error = errors.IntegrityError("wrong", 5)
    error.name_keys([f"[{i}]" for i in range(count)])
    assert str(error) == error.text == said
    assert error.chunk == 5
