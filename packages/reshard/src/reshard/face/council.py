"""Council: the ranks of a communicator tell each other whether all of them can go on.

One all-gather per step, by the communicator's own method and on the device of the tensors: of each
rank a row that says whether it has failed, the digest of what it was asked for, and as much of the
text of either as has room. It waits for the device, as nothing else in a transfer does. Where the
communicator has no `allgather`, or neither it (`nranks`) nor the group (`world_size`) says how many
ranks there are, every rank is on its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import torch

from distcore.v1 import DisagreementError, PeerError
from reshard.face import streams
from reshard.face.duck_types import StatelessGroup

ROW_NBYTES: Final = 1024
_HEAD: Final = struct.Struct("<?H16s")
_ROOM: Final = ROW_NBYTES - _HEAD.size


@dataclass(frozen=True, slots=True)
class Council:
    """The ranks of `group` during one call; rows travel over `device`, on `stream`."""

    group: StatelessGroup
    device: torch.device
    stream: Any

    @classmethod
    def over(cls, group: StatelessGroup, tensors: tuple[object, ...], stream: Any) -> Council:
        """The council for a transfer of these tensors, on the device of the first that has one."""
        # nccl4py's communicator knows the number of its CUDA device.
        devices = map(_device_of, (*tensors, group.nccl_communicator))
        device = next((one for one in devices if one is not None), torch.device("cpu"))
        return cls(group, device, stream)

    @contextmanager
    def step(self, label: str, tell: Callable[[], str] = str) -> Iterator[None]:
        """Do something local; afterwards all ranks have done it, and have told the same.

        Collective. Where it fails on some ranks, each of them raises its own error, and all
        others PeerError; where ranks tell different things, all raise DisagreementError.
        """
        with self.failures(label):
            yield
            told = tell() if self._size() > 1 else ""
        self._meet(label, told, failed=False)

    @contextmanager
    def failures(self, label: str) -> Iterator[None]:
        """Do something before the `step` of this label; a failure of it counts as that step's."""
        try:
            yield
        except BaseException as error:
            self._meet(label, f"{type(error).__name__}: {error}", failed=True)
            raise

    def _meet(self, label: str, text: str, *, failed: bool) -> None:
        size = self._size()
        if size < 2:
            return
        rows = [(*_HEAD.unpack_from(row), row) for row in self._rows(text, size, failed=failed)]
        texts = {
            rank: row[_HEAD.size :][:length].decode(errors="replace")
            for rank, (_, length, _, row) in enumerate(rows)
        }
        failures = {rank: texts[rank] for rank, (failed_, *_) in enumerate(rows) if failed_}
        if failures and not failed:
            raise PeerError(label, failures)
        if not failures and len({digest for _, _, digest, _ in rows}) > 1:
            raise DisagreementError(label, texts)

    def _rows(self, text: str, size: int, *, failed: bool) -> list[bytes]:
        """The rows of all ranks. Collective."""
        data = text.encode(errors="replace")
        digest = blake2b(data, digest_size=16).digest()
        head = _HEAD.pack(failed, min(len(data), _ROOM), digest)
        mine = torch.frombuffer(bytearray((head + data)[:ROW_NBYTES]), dtype=torch.uint8)
        with streams.entered(self.device, self.stream) as used:
            rows = torch.zeros(size, ROW_NBYTES, dtype=torch.uint8, device=self.device)
            own = rows[self.group.rank]
            own[: len(mine)].copy_(mine)
            streams.keep_for(used, rows)
            self.group.nccl_communicator.allgather(own, rows, stream=streams.handle_of(used))
            return [row.numpy().tobytes() for row in rows.cpu()]

    def _size(self) -> int:
        """The number of ranks; 0 where the ranks cannot tell each other anything."""
        communicator = self.group.nccl_communicator
        size = getattr(communicator, "nranks", getattr(self.group, "world_size", None))
        if not isinstance(size, int) or not hasattr(communicator, "allgather"):
            return 0
        return size


def _device_of(owner: object) -> torch.device | None:
    try:
        device: Any = getattr(owner, "device", None)
        return None if device is None else torch.device(device)
    except Exception:  # noqa: BLE001 - raised again where a step reads it, and told then
        return None
