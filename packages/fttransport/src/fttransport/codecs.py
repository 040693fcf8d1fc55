"""Codecs by name: the safe one, and the one that also takes what only pickle can carry.

This is the one module that opens pickles, and only for who has asked for it by name.
"""

from __future__ import annotations

import base64
import pickle  # noqa: TID251 - opened only where a receiver chose codec="pickle"

from fttransport.codec import Codec, Node
from fttransport.errors import CodecRefused, IntegrityError


class PickleCodec(Codec):
    """The safe codec, with a pickle for every value that has no kind of its own.

    Opening a pickle runs code that comes from the source: only for sources as trusted as this
    process is.
    """

    def opaque(self, value: object, path: str) -> Node:
        """The data of a value without a kind: its pickle."""
        try:
            return {"p": base64.b64encode(pickle.dumps(value)).decode("ascii")}
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise CodecRefused(f"state{path}: it cannot be pickled: {error}") from error

    def reopen(self, data: str, path: str) -> object:
        """The value of such data."""
        raw = base64.b64decode(data, validate=True)
        try:
            return pickle.loads(raw)  # noqa: S301 - as chosen
        except (pickle.UnpicklingError, EOFError, ImportError, AttributeError) as error:
            raise IntegrityError(f"state{path}: the pickle cannot be opened: {error}") from error


def codec_of(choice: str | Codec) -> Codec:
    """The codec of a choice; ValueError where there is none of that name."""
    if isinstance(choice, Codec):
        return choice
    if choice == "safe":
        return Codec()
    if choice == "pickle":
        return PickleCodec()
    raise ValueError(f"codec: expected 'safe', 'pickle' or a Codec, got {choice!r}")
