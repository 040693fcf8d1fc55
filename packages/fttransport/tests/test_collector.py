"""The collector is as it was afterwards, whatever happens inside."""

from __future__ import annotations

import gc

import pytest

from fttransport.collector import collector_paused


def test_the_collector_is_paused_and_then_as_it_was() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()
