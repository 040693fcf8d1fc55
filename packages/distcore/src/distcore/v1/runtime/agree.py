"""Agree: the ranks prove that they hold the same value, or learn together that they do not.

Every collective of the house begins with `meet`: one all-gather of a fixed 64-byte header. Where
the headers differ, or one says that its rank has failed, all ranks exchange texts and raise one
error. Exceptions travel as text only.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from distcore.v1.channel import Channel
from distcore.v1.errors import DisagreementError, PeerError, PlanError, Problem
from distcore.v1.header import NBYTES, Call, Header, digest16

T = TypeVar("T")

MAX_TEXT_NBYTES: Final = 1 << 20
_SHOWN: Final = 4


def agree(label: str, value: object, channel: Channel, *, timeout_s: float | None = None) -> object:
    """Return `value` if every rank of the channel gives an equal one under the same label.

    Collective; one exchange of 64 bytes. A value is a string, something with a `digest` string
    (a Plan), or plain JSON (a mapping with string keys is compared key by key in the error). An
    exception instance as the value tells the peers that this rank has failed.

    Raises DisagreementError on every rank with the value of each; PeerError on every rank where
    one gave an exception; ChannelError or ChannelTimeout where a rank does not answer.
    """
    if isinstance(value, BaseException):
        header = Header(Call.AGREE, failed=True, label=digest16(label))
        meet(label, header, failure_text(value), channel, timeout_s=timeout_s, cause=value)
    try:
        text = canonical_text(value)
    except PlanError as error:
        header = Header(Call.AGREE, failed=True, label=digest16(label))
        meet(label, header, str(error), channel, timeout_s=timeout_s, cause=error)
        raise
    header = Header(Call.AGREE, failed=False, label=digest16(label), value=digest16(text))
    meet(label, header, text, channel, timeout_s=timeout_s)
    return value


def run_together(
    label: str, fn: Callable[[], T], channel: Channel, *, timeout_s: float | None = None
) -> T:
    """Run `fn` on every rank and return its own value on each, once it has succeeded on all.

    Collective; `fn` itself is local. Where it raises on some ranks, every rank raises PeerError
    with the text of each failure (chained to the own exception where there is one); where it
    raises the same on all, each rank raises its own. KeyboardInterrupt and SystemExit are told
    to the peers and re-raised as they are.
    """
    header = Header(Call.TOGETHER, failed=False, label=digest16(label))
    try:
        value = fn()
    except BaseException as error:
        header = replace(header, failed=True)
        text = failure_text(error)
        meet(label, header, text, channel, timeout_s=timeout_s, cause=error)
        raise
    meet(label, header, "succeeded", channel, timeout_s=timeout_s)
    return value


def meet(
    label: str,
    header: Header,
    text: str | Callable[[], str],
    channel: Channel,
    *,
    timeout_s: float | None = None,
    cause: BaseException | None = None,
) -> tuple[Header, ...]:
    """Exchange headers and return them by index, if all are equal and none has failed.

    `extra` and `flags` may differ from rank to rank; everything else must not. `text` (or what
    it returns) is shown to the peers only where something is wrong: this rank's value or
    failure. `cause` is the own exception to chain to.
    """
    rows = channel.all_gather(header.encode(), timeout_s=timeout_s)
    headers, strange = _decoded(rows, channel)
    expected = _comparable(header)
    if not strange and all(_comparable(peer) == expected for peer in headers):
        if not header.failed:
            return headers
    elif strange:
        raise DisagreementError(label, strange, "the ranks are in different calls")
    shown = text if isinstance(text, str) else text()
    texts = gather_texts(json.dumps([label, shown]), channel, timeout_s=timeout_s)
    raise _verdict(label, headers, texts, channel.ranks, cause)


def gather_texts(text: str, channel: Channel, *, timeout_s: float | None = None) -> tuple[str, ...]:
    """Every rank's text, by index; each is cut to 1 MiB. Collective, two exchanges."""
    data = text.encode(errors="replace")[:MAX_TEXT_NBYTES]
    sizes = channel.all_gather(len(data).to_bytes(NBYTES, "little"), timeout_s=timeout_s)
    lengths = [int.from_bytes(size[:8], "little") for size in sizes]
    width = max(lengths)
    if not 0 < width <= MAX_TEXT_NBYTES:
        return ("",) * len(sizes)
    rows = channel.all_gather(data.ljust(width, b"\0"), timeout_s=timeout_s)
    return tuple(
        row[:length].decode(errors="replace") for row, length in zip(rows, lengths, strict=True)
    )


def canonical_text(value: object) -> str:
    """The text that stands for a value in an agreement: equal values have equal texts."""
    if isinstance(value, str):
        return json.dumps(value)
    digest = getattr(value, "digest", None)
    if isinstance(digest, str):
        return f"{type(value).__name__} {digest}"
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        text = f"a {type(value).__name__} cannot be compared between ranks: {error}"
        raise PlanError(Problem("value", "type", text)) from None


def _comparable(header: Header) -> tuple[object, ...]:
    return (header.call, header.failed, header.label, header.value, header.source, header.count)


def _decoded(
    rows: tuple[bytes, ...], channel: Channel
) -> tuple[tuple[Header, ...], dict[int, str]]:
    headers, strange = [], {}
    for rank, row in zip(channel.ranks, rows, strict=True):
        try:
            headers.append(Header.decode(row))
        except ValueError as error:
            strange[rank] = str(error)
    return tuple(headers), strange


def _verdict(
    label: str,
    headers: tuple[Header, ...],
    texts: tuple[str, ...],
    ranks: tuple[int, ...],
    cause: BaseException | None,
) -> BaseException:
    """The error that every rank raises: built from the same texts, so the same on all."""
    labels, shown = {}, {}
    for rank, text in zip(ranks, texts, strict=True):
        labels[rank], shown[rank] = _unpacked(text)
    if len({header.call for header in headers}) > 1 or len(set(labels.values())) > 1:
        calls = {
            rank: f"{header.call.name.lower()} {labels[rank]!r}"
            for rank, header in zip(ranks, headers, strict=True)
        }
        return DisagreementError(label, calls, "the ranks are in different calls")
    failed = {
        rank: shown[rank] for rank, header in zip(ranks, headers, strict=True) if header.failed
    }
    if cause is not None and len(failed) == len(ranks) and len(set(failed.values())) == 1:
        return cause
    if failed:
        error = PeerError(label, failed)
        error.__cause__ = cause
        return error
    return DisagreementError(label, _differences(shown))


def _unpacked(text: str) -> tuple[str, str]:
    try:
        label, shown = json.loads(text)
    except ValueError:
        return "", text
    return str(label), str(shown)


def _differences(shown: Mapping[int, str]) -> dict[int, str]:
    """The values to show: of mappings only the keys that differ, of long texts the beginning."""
    tables: dict[int, dict[str, object]] = {}
    for rank, text in shown.items():
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            return {rank: text[:2000] for rank, text in shown.items()}
        tables[rank] = value
    missing = object()
    keys = dict.fromkeys(key for table in tables.values() for key in table)
    differing = [
        key
        for key in keys
        if len({json.dumps(t[key]) if key in t else missing for t in tables.values()}) > 1
    ]
    more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    return {
        rank: ", ".join(
            f"{key!r} is {table[key]}" if key in table else f"{key!r} is missing"
            for key in differing[:_SHOWN]
        )
        + more
        for rank, table in tables.items()
    }


def failure_text(error: BaseException) -> str:
    """What the peers are told: type, message and where it was raised."""
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001 - an exception whose text cannot be made
        message = f"<no message: {type(broken).__name__}>"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"
