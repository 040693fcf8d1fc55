"""Agree: the ranks prove that they hold the same value, or learn together that they do not.

Every collective of the house begins with `meet`: one all-gather of a fixed 64-byte header. Where
the headers differ, or one says that its rank has failed, all ranks exchange texts and raise one
error. Exceptions travel as text only.
"""

from __future__ import annotations

import json
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, NoReturn, TypeVar

from distcore.v1.channel import Channel
from distcore.v1.errors import DisagreementError, PeerError, PlanError, Problem
from distcore.v1.header import NBYTES, Call, Header, digest16
from distcore.v1.runtime.deadline import Deadline
from distcore.v1.runtime.differences import differences

T = TypeVar("T")

# What one rank tells of itself where something is wrong, compressed; and what all ranks may tell.
MAX_TEXT_NBYTES: Final = 1 << 20
MAX_TEXTS_NBYTES: Final = 64 << 20
_EXPANSION: Final = 16


def agree(label: str, value: object, channel: Channel, *, timeout_s: float | None = None) -> object:
    """Return `value` if every rank of the channel gives an equal one under the same label.

    Collective; one exchange of 64 bytes. A value is a string, something with a `digest` string
    (a Plan), or plain JSON (a mapping with string keys is compared key by key in the error). An
    exception instance as the value tells the peers that this rank has failed.

    Raises DisagreementError on every rank with the value of each; PeerError on every rank where
    one gave an exception, or a value that cannot be compared (each its own where all gave the
    same); ChannelError or ChannelTimeout where a rank does not answer. After any but a channel's
    error the channel is as good as before.
    """
    header = Header(Call.AGREE, failed=False, label=digest16(label))
    if isinstance(value, BaseException):
        fail_together(label, header, value, channel, timeout_s=timeout_s)
    try:
        text = canonical_text(value)
    except PlanError as error:
        fail_together(label, header, error, channel, timeout_s=timeout_s)
    header = replace(header, value=digest16(text))
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
    except BaseException as error:  # noqa: BLE001 - told to the peers and raised again
        fail_together(label, header, error, channel, timeout_s=timeout_s)
    meet(label, header, "succeeded", channel, timeout_s=timeout_s)
    return value


def fail_together(
    label: str,
    header: Header,
    error: BaseException,
    channel: Channel,
    *,
    timeout_s: float | None = None,
) -> NoReturn:
    """Meet the peers with the news that this rank has failed with `error`; always raises.

    Raises what `meet` raises on all ranks; but what is no Exception (KeyboardInterrupt) as it is.
    """
    header, text = replace(header, failed=True), failure_text(error)
    try:
        meet(label, header, text, channel, timeout_s=timeout_s, cause=error)
    except Exception:
        if isinstance(error, Exception):
            raise
    raise error


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
    failure. `cause` is the own exception to chain to. `timeout_s` bounds all exchanges together.
    """
    deadline = Deadline.after(timeout_s)
    rows = channel.all_gather(header.encode(), timeout_s=timeout_s)
    headers = _decoded(label, rows, channel)
    if not header.failed and all(_comparable(peer) == _comparable(header) for peer in headers):
        return headers
    shown = text if isinstance(text, str) else text()
    # The label stands alone in the first line, so that a cut never takes it.
    texts = gather_texts(
        f"{json.dumps(label[:200])}\n{shown}", channel, timeout_s=deadline.left_s()
    )
    raise _verdict(label, headers, texts, channel.ranks, cause)


def gather_texts(text: str, channel: Channel, *, timeout_s: float | None = None) -> tuple[str, ...]:
    """Every rank's text, by index. Collective, two exchanges; texts travel compressed.

    A text that is still longer than its share of `MAX_TEXTS_NBYTES` loses its end.
    """
    deadline = Deadline.after(timeout_s)
    limit = min(MAX_TEXT_NBYTES, MAX_TEXTS_NBYTES // channel.size)
    data = zlib.compress(text[: limit * _EXPANSION].encode(errors="replace"), level=1)[:limit]
    sizes = channel.all_gather(len(data).to_bytes(NBYTES, "little"), timeout_s=deadline.left_s())
    lengths = [int.from_bytes(size, "little") for size in sizes]
    if max(lengths) > limit:  # a peer is in some other exchange
        return ("",) * len(sizes)
    row = data.ljust(max(lengths), b"\0")
    rows = channel.all_gather(row, timeout_s=deadline.left_s())
    return tuple(_expanded(row, limit * _EXPANSION) for row in rows)


def canonical_text(value: object) -> str:
    """The text that stands for a value in an agreement: equal values have equal texts.

    PlanError where a value has no such text.
    """
    if isinstance(value, str):
        return json.dumps(value)
    try:
        digest = getattr(value, "digest", None)
        if isinstance(digest, str):
            return f"{type(value).__name__} {digest}"
        return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_as_dict)
    except Exception as error:
        # Whatever the value's own code raised: a rank that stopped here would leave its peers.
        text = f"a {type(value).__name__} cannot be compared between ranks: {error}"
        raise PlanError(Problem("value", "type", text)) from error


def failure_text(error: BaseException) -> str:
    """What the peers are told: type, message and where it was raised."""
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001 - an exception whose text cannot be made
        message = f"<no message: {type(broken).__name__}>"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{where}"


def _expanded(row: bytes, limit: int) -> str:
    try:
        return zlib.decompressobj().decompress(row, limit).decode(errors="replace")
    except zlib.error:  # no text: what the peer sent belongs to some other exchange
        return ""


def _as_dict(value: object) -> dict[object, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no string, number, list or mapping")


def _comparable(header: Header) -> tuple[object, ...]:
    return (header.call, header.failed, header.label, header.value, header.source, header.count)


def _decoded(label: str, rows: tuple[bytes, ...], channel: Channel) -> tuple[Header, ...]:
    """The headers in `rows`; DisagreementError where one is none."""
    headers: list[Header] = []
    values: dict[int, str] = {}
    for rank, row in zip(channel.ranks, rows, strict=True):
        try:
            headers.append(Header.decode(row))
            values[rank] = headers[-1].call.name.lower()
        except ValueError as error:
            values[rank] = str(error)
    if len(headers) < len(rows):
        raise DisagreementError(label, values, "the ranks are in different calls")
    return tuple(headers)


def _verdict(
    label: str,
    headers: tuple[Header, ...],
    texts: tuple[str, ...],
    ranks: tuple[int, ...],
    cause: BaseException | None,
) -> BaseException:
    """The error that every rank raises: built from the same texts, so the same on all."""
    told = dict(zip(ranks, texts, strict=True))
    shown = {rank: text.partition("\n")[2] for rank, text in told.items()}
    failed = {
        rank: shown[rank] for rank, header in zip(ranks, headers, strict=True) if header.failed
    }
    error: DisagreementError | PeerError
    if len({(header.call, header.label) for header in headers}) > 1:
        error = DisagreementError(label, _calls(headers, told), "the ranks are in different calls")
    elif cause is not None and len(failed) == len(ranks) and len(set(failed.values())) == 1:
        return cause
    elif failed:
        error = PeerError(label, failed)
    elif len({(header.source, header.count) for header in headers}) > 1:
        error = DisagreementError(label, _calls(headers, told), "the ranks call differently")
    else:
        error = DisagreementError(label, differences(shown))
    error.__cause__ = cause
    return error


def _calls(headers: tuple[Header, ...], told: Mapping[int, str]) -> dict[int, str]:
    """What each rank has called: its label, and the numbers of its header where they differ."""
    numbers = [
        name
        for name in ("source", "count")
        if len({getattr(header, name) for header in headers}) > 1
    ]
    return {
        rank: f"{header.call.name.lower()} {_label_of(text)!r}"
        + "".join(f", {name} {getattr(header, name)}" for name in numbers)
        for (rank, text), header in zip(told.items(), headers, strict=True)
    }


def _label_of(text: str) -> str:
    try:
        return str(json.loads(text.partition("\n")[0]))
    except ValueError:
        return "?"
