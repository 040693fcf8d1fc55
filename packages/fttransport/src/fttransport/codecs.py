"""Codecs by name."""

from __future__ import annotations

from fttransport.codec import Codec


def codec_of(choice: str | Codec) -> Codec:
    """The codec of a choice; ValueError where there is none of that name."""
    if isinstance(choice, Codec):
        return choice
    if choice == "safe":
        return Codec()
    raise ValueError(f"codec: expected 'safe', 'pickle' or a Codec, got {choice!r}")
