"""The contract of a state transport, as a proof that any implementation can be put to.

check_transport(lambda rank: MyTransport(rank))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch

from distcore.v1.protocols import StateTransport

MakeTransport = Callable[[int], StateTransport]
"""Makes the transport of one rank: 0 sends, 1 receives; called on that rank's thread.

A transport whose ranks have to meet when they are made may wait for each other there.
"""

_TIMEOUT = timedelta(seconds=20)
_SHORT = timedelta(seconds=0.5)


def check_transport(make_transport: MakeTransport) -> None:
    """Prove that the transports of two ranks keep the contract of `StateTransport`.

    What is sent arrives, equal in structure, dtypes, shapes and bytes; a second step arrives
    after the first; a step that is not served raises within the timeout and not much later;
    `metadata` and `disallow_checkpoint` may be called at any time and as often as wanted.
    AssertionError says what does not hold.
    """
    with ThreadPoolExecutor(2) as pool:
        source, target = pool.map(make_transport, (0, 1))
        try:
            for step in (0, 7):
                _check_transfer(pool, source, target, step)
            _check_refusal(source, target)
        finally:
            for transport in (source, target):
                transport.shutdown(wait=False)


def _check_transfer(
    pool: ThreadPoolExecutor, source: StateTransport, target: StateTransport, step: int
) -> None:
    sent = _state(step)
    source.disallow_checkpoint()
    serving = pool.submit(source.send_checkpoint, [1], step, sent, _TIMEOUT)
    received = target.recv_checkpoint(0, source.metadata(), step, _TIMEOUT)
    serving.result(_TIMEOUT.total_seconds())
    problem = _difference(sent, received, "state")
    _expect(problem is None, f"step {step}: {problem}")
    source.disallow_checkpoint()
    source.disallow_checkpoint()


def _check_refusal(source: StateTransport, target: StateTransport) -> None:
    """Nothing is served now: a receive has to give up in time, with an error."""
    begin = time.monotonic()
    try:
        target.recv_checkpoint(0, source.metadata(), 8, _SHORT)
    except Exception as error:  # noqa: BLE001 - which one is the implementation's business
        _expect(bool(str(error)), "the error of a receive that gave up says nothing")
    else:
        _expect(False, "a step that nobody serves was received")
    waited_s = time.monotonic() - begin
    _expect(waited_s < 5, f"a receive with a timeout of 0.5 s gave up after {waited_s:.1f} s")


def _state(step: int) -> dict[str, object]:
    steps = torch.arange(12, dtype=torch.float32).reshape(3, 4) + step
    return {
        "step": step,
        "name": "\u00e9tat",
        "nested": {"list": [1, 2.5, None, True], "tuple": (b"raw", "text")},
        "weight": steps,
        "turned": steps.t(),
        "half": steps.to(torch.bfloat16),
        "scalar": torch.tensor(step),
        "empty": torch.empty(0, 3),
    }


def _difference(sent: object, received: object, where: str) -> str | None:
    """The first place at which two states differ, or None."""
    if isinstance(sent, torch.Tensor):
        if not isinstance(received, torch.Tensor) or sent.dtype != received.dtype:
            return f"{where}: sent {sent.dtype}, received {received!r}"
        return None if torch.equal(sent, received.cpu()) else f"{where}: the values differ"
    if isinstance(sent, Mapping):
        if not isinstance(received, Mapping) or list(sent) != list(received):
            return f"{where}: sent the keys {list(sent)}, received {received!r}"
        pairs = [(f"{where}.{key}", value, received[key]) for key, value in sent.items()]
    elif isinstance(sent, list | tuple):
        if type(sent) is not type(received) or len(sent) != len(received):
            return f"{where}: sent {sent!r}, received {received!r}"
        others: list[object] = list(received)
        pairs = [(f"{where}[{i}]", value, others[i]) for i, value in enumerate(sent)]
    else:
        same = type(sent) is type(received) and sent == received
        return None if same else f"{where}: sent {sent!r}, received {received!r}"
    return next(filter(None, (_difference(a, b, place) for place, a, b in pairs)), None)


def _expect(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)
