"""Fixtures of the tests that need ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from distcore.v1 import Channel, Message, Pending


class Wire:
    """A channel that shows `act` each buffer before it is sent.

    Without `same_host` it has no way through memory, so that all that is sent is shown.
    """

    def __init__(
        self, inner: Channel, act: Callable[[torch.Tensor], object], *, same_host: bool = False
    ) -> None:
        self._inner = inner
        self._act = act
        self._hidden = () if same_host else ("same_host",)

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(name)
        return getattr(self._inner, name)

    def start(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        timeout_s: float | None = None,
    ) -> Pending:
        for message in sends:
            for buffer in message.buffers:
                self._act(buffer)
        return self._inner.start(sends, receives, timeout_s=timeout_s)


@pytest.fixture
def tapped() -> Callable[..., Any]:
    """What makes a `Wire` of a channel."""
    return Wire
