"""What a pair tells its peer of an error, without any group."""

from __future__ import annotations

import pytest

from fttransport.errors import LayoutMismatch, TransportError
from fttransport.pair import FRAME_NBYTES, Pair


class Told(Pair):
    """A pair whose frames are kept instead of sent."""

    def __init__(self) -> None:
        self.fields: dict[str, object] = {}

    def tell(self, **fields: object) -> None:
        self.fields = fields


@pytest.mark.parametrize(
    ("error", "name", "text"),
    [
        (LayoutMismatch("state['a']: no"), "LayoutMismatch", "state['a']: no"),
        (KeyError("k"), "TransportError", "KeyError('k')"),
        (TransportError("\u00e9" * 3000), "TransportError", "/xe9" * 750),
    ],
)
def test_an_error_is_told_by_name_and_fits_its_frame(
    error: Exception, name: str, text: str
) -> None:
    pair = Told()
    pair.tell_error(error)
    assert pair.fields == {"error": name, "text": text}
    assert len(str(pair.fields)) < FRAME_NBYTES
