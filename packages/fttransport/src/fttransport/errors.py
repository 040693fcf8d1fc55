"""The errors of a transfer: one hierarchy, also catchable as what torchft's users catch.

Whoever fetched over HTTP with urllib catches `urllib.error.HTTPError` and looks at its `code`,
catches `urllib.error.URLError`, or catches `TimeoutError`; whoever transferred over a process
group catches `RuntimeError`. Each error below is all of those that fit it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from email.message import Message
from typing import Final
from urllib.error import HTTPError, URLError

MAX_KEYS: Final = 20


class TransportError(RuntimeError):
    """A transfer failed.

    `dirty` says whether bytes had already been written into the receiver's own tensors, which
    then hold neither the old nor the new state. `failures` has, where several destinations or
    sources took part, the error of each by its rank or address.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.dirty = False
        self.failures: dict[str, str] = {}


class _Coded(TransportError, HTTPError):
    """An error that has an HTTP status, whatever carried it."""

    def __init__(self, text: str, code: int, url: str = "") -> None:
        TransportError.__init__(self, text)
        HTTPError.__init__(self, url, code, text, Message(), io.BytesIO())
        self.code: int = code

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text,)


class StepMismatch(_Coded):
    """The source has another step than the one asked for; `code` is 400."""

    def __init__(self, text: str) -> None:
        super().__init__(text, 400)

    @classmethod
    def of(cls, serving: int, asked: int) -> StepMismatch:
        """The error in the words that users of torchft look for."""
        return cls(f"invalid checkpoint requested, serving {serving} but got step={asked}")


class AuthError(_Coded):
    """The token is missing or wrong, or the key of the MAC is; `code` is 401."""

    def __init__(self, text: str) -> None:
        super().__init__(text, 401)


class NotServing(_Coded, TimeoutError):
    """The source serves nothing: blocked past the deadline (`code` 503), or empty (409)."""

    def __init__(self, text: str, code: int = 503) -> None:
        super().__init__(text, code)


class _Reasoned(TransportError, URLError):
    """An error of the way to a source."""

    def __init__(self, text: str) -> None:
        TransportError.__init__(self, text)
        URLError.__init__(self, text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text,)


class DeadlineExceeded(_Reasoned, TimeoutError):
    """The time ran out before everything had come."""


class SourceLost(_Reasoned, ConnectionError):
    """No source is left: refused, broken off, or silent for too long."""


class SourceSilent(SourceLost, TimeoutError):
    """No source is left, and the last one was lost because it had been silent for too long."""


class IntegrityError(TransportError):
    """What came is not what the source said it would send.

    `chunk` is the number of the chunk of the stream that was wrong, where it was one.
    """

    def __init__(self, text: str, chunk: int | None = None) -> None:
        super().__init__(text)
        self.chunk = chunk

    def name_keys(self, keys: Sequence[str]) -> None:
        """Add to the text the key paths of the tensors that have bytes in what was wrong."""
        more = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
        named = ", ".join(f"state{key}" for key in keys[:MAX_KEYS])
        self.text += f": part of {named}{more}" if keys else ""
        self.args = (self.text,)


class LayoutMismatch(TransportError, ValueError):
    """The receiver's tensors cannot take the state; the text names every key and why."""


class CodecRefused(TransportError, TypeError):
    """The state has a value that is not sent by default; the text names its key path."""


BY_NAME: Final[dict[str, type[TransportError]]] = {
    kind.__name__: kind
    for kind in (
        TransportError,
        StepMismatch,
        AuthError,
        NotServing,
        DeadlineExceeded,
        SourceLost,
        SourceSilent,
        IntegrityError,
        LayoutMismatch,
        CodecRefused,
    )
}
"""Every error by its class name, for what tells a peer of its failure in words."""
