"""Differences: what to show of values that differ between ranks, so that a person sees where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import takewhile
from typing import Final

SHOWN_KEYS: Final = 4
_SHOWN_CHARACTERS: Final = 400
_LEAD_CHARACTERS: Final = 40


def differences(shown: Mapping[int, str]) -> dict[int, str]:
    """What differs between the texts of the ranks, by rank.

    Where all texts are JSON objects these are the keys that differ, `SHOWN_KEYS` of them. Of long
    texts it is the part around the first difference.

    >>> differences({0: '{"lr": 1, "steps": 5}', 1: '{"lr": 2, "steps": 5}'})
    {0: "'lr' is 1", 1: "'lr' is 2"}
    """
    tables = {rank: _table_of(text) for rank, text in shown.items()}
    named = {rank: table for rank, table in tables.items() if table is not None}
    keys = dict.fromkeys(key for table in named.values() for key in table)
    differing = [key for key in keys if len({table.get(key) for table in named.values()}) > 1]
    if len(named) < len(shown) or not differing:
        return _excerpts(shown)
    columns = [
        (key, _excerpts({rank: table.get(key, "missing") for rank, table in named.items()}))
        for key in differing[:SHOWN_KEYS]
    ]
    more = f", and {len(differing) - SHOWN_KEYS} more" if len(differing) > SHOWN_KEYS else ""
    return {
        rank: ", ".join(f"{key!r} is {column[rank]}" for key, column in columns) + more
        for rank in shown
    }


def _table_of(text: str) -> dict[str, str] | None:
    """The values of a JSON object, as JSON texts; None where the text is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return {key: json.dumps(item) for key, item in value.items()} if type(value) is dict else None


def _excerpts(texts: Mapping[int, str]) -> dict[int, str]:
    """The texts, or of long ones the part around the place where they begin to differ."""
    if max(map(len, texts.values())) <= _SHOWN_CHARACTERS:
        return dict(texts)
    columns = zip(*texts.values(), strict=False)
    same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    low = max(0, same - _LEAD_CHARACTERS)
    high = low + _SHOWN_CHARACTERS
    return {
        rank: ("..." if low else "") + text[low:high] + ("..." if len(text) > high else "")
        for rank, text in texts.items()
    }
