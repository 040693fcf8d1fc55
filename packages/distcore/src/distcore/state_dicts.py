"""State dicts: those of every rank on one rank, a dict at a time.

They travel as torch's own file format and are read back without running code from a peer. Both
is settled on the sender: what the destination would refuse raises on all ranks, at the call.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from distcore.gather import CHUNK_BYTES, checked_bytes, collect
from distcore.probes import is_distributed_run
from distcore.turn import take_turn
from distcore.v1.channel import Channel
from distcore.v1.errors import PlanError, Problem
from distcore.v1.header import Call
from distcore.v1.runtime.layouts import is_dtensor

if TYPE_CHECKING:
    from distcore.world import Group

State: TypeAlias = dict[Any, Any]
_Look: TypeAlias = tuple[object, ...]


def gather_state_dicts(
    state: State,
    dst: int,
    group: Group | Channel | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[State]:
    """Gather every rank's `state` on global rank `dst`: an iterator by index, empty elsewhere.

    Collective at the call itself, a labelled call; iterating is local, and a rank that never
    iterates holds up nobody. The destination holds the bytes of the dicts that were not yet
    taken and loads one dict at a time, with its tensors on the CPU.

    Takes what `torch.load(weights_only=True)` reads. A tensor that shows only part of its
    storage is sent as that part; tensors that share a storage share one again. A DTensor is
    refused: send its `to_local()` or `full_tensor()`. What is refused on one rank is a PlanError
    there and a PeerError on the others. Other errors are those of `gather_bytes`.
    """
    if group is None and not is_distributed_run():
        data = written(state)
        checked_bytes(data, dst, (0,), chunk_bytes)
        return _read_in_turn([bytearray(data)])
    with take_turn(Call.GATHER, "gather_state_dicts", group) as turn:
        data = turn.attempt(lambda: written(state))
        found = collect(turn, data, dst, chunk_bytes)
    return _read_in_turn(found or [])


def written(state: State) -> memoryview:
    """The bytes of a state dict that `torch.load(weights_only=True)` is known to read."""
    if not isinstance(state, dict):
        text = f"expected a dict, got a {type(state).__name__}"
        raise PlanError(Problem("state", "type", text))
    file = io.BytesIO()
    try:
        torch.save(_without_unseen(state), file)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(Problem("state", "type", f"cannot be saved: {error}")) from error
    _prove_readable(file)
    return file.getbuffer()


def _prove_readable(file: io.BytesIO) -> None:
    file.seek(0)
    try:
        torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:
        file.seek(0)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        refused = ", ".join(names) if names else str(error).split("\n", 1)[0]
        text = f"torch.load(weights_only=True) refuses {refused}"
        raise PlanError(Problem("state", "type", text)) from error


def _without_unseen(state: State) -> State:
    """The same state, with a tensor's part of a storage copied where the rest is not in it."""
    seen: dict[int, dict[_Look, int]] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            looks = seen.setdefault(storage.data_ptr(), {})
            looks[_look(tensor)] = tensor.numel() * tensor.element_size()
        return tensor

    copies: dict[tuple[object, ...], torch.Tensor] = {}

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        if sum(seen[storage.data_ptr()].values()) >= storage.nbytes():
            return tensor
        key = (storage.data_ptr(), *_look(tensor))
        if key not in copies:
            copy = tensor.detach().clone()
            kind = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else None
            copies[key] = kind(copy, tensor.requires_grad) if kind else copy
        return copies[key]

    _mapped(state, note, "state")
    cut_state: State = _mapped(state, cut, "state")
    return cut_state


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor], where: str) -> Any:
    """`value` with every tensor in it changed; containers that torch reads are made anew."""
    if is_dtensor(value):
        text = "a DTensor is not gathered: give its to_local() or its full_tensor()"
        raise PlanError(Problem(where, "type", text))
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in {dict, OrderedDict}:
        items = ((key, _mapped(item, change, f"{where}[{key!r}]")) for key, item in value.items())
        return type(value)(items)
    if type(value) in {list, tuple}:
        return type(value)(_mapped(item, change, f"{where}[{at}]") for at, item in enumerate(value))
    return value


def _look(tensor: torch.Tensor) -> _Look:
    return (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _read_in_turn(found: list[bytearray]) -> Iterator[State]:
    while found:
        # Only the loaded dict lives while the caller has it.
        yield _read(found.pop(0))


def _read(data: bytearray) -> State:
    file = io.BufferedReader(_File(data))
    state: State = torch.load(file, map_location="cpu", weights_only=True)
    return state


class _File(io.RawIOBase):
    """A file over bytes that, unlike BytesIO, does not copy them."""

    def __init__(self, data: bytearray) -> None:
        super().__init__()
        self._data = memoryview(data)
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move there."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Copy as much as there is into a buffer."""
        part = self._data[self._at : self._at + len(buffer)]
        memoryview(buffer).cast("B")[: len(part)] = part
        self._at += len(part)
        return len(part)
