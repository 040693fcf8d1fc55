"""Byte ranges of files, read straight into given memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeAlias

from ckptx.errors import FormatError, ReadError

CALL_NBYTES: Final = 16 << 20
"""The most that one call to the system reads, so that a stop signal is answered soon."""

MAX_BUFFERS: Final = min(1024, os.sysconf("SC_IOV_MAX"))
"""The most buffers that one call to the system may fill."""

Watcher: TypeAlias = Callable[[str, int, Sequence[memoryview]], None]
"""Is shown what was read: the file, the byte from which on, and the buffers that were filled."""


class FileReader:
    """Reads ranges of files into memory that the caller gives; no copy is made on the way.

    One file is open at a time, so that reading in file order opens each file once. `nbytes`
    counts every byte read; a `watch` is shown all that was read, before the caller gets it.
    Belongs to one thread; use `with`, or `close`.
    """

    nbytes: int
    watch: Watcher | None
    _file: str | None
    _fd: int

    def __init__(self, watch: Watcher | None = None) -> None:
        self.nbytes = 0
        self.watch = watch
        self._file = None
        self._fd = -1

    def size(self, file: str) -> int:
        """The size of the file in bytes; ReadError where it cannot be opened."""
        return os.fstat(self._open(file)).st_size

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes from byte `offset` on, in memory of their own."""
        found = bytearray(nbytes)
        self.read_into(file, offset, [memoryview(found)])
        return bytes(found)

    def read_into(self, file: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, with what lies from byte `offset` of the file on.

        The buffers are writable and hold bytes. ReadError (with errno) where the system refuses,
        FormatError where the file ends too soon; some of the buffers may have changed then.
        """
        fd = self._open(file)
        first = offset
        batch: list[memoryview] = []
        size = 0
        for buffer in buffers:
            for begin in range(0, len(buffer), CALL_NBYTES):
                part = buffer[begin : begin + CALL_NBYTES]
                if batch and (size + len(part) > CALL_NBYTES or len(batch) == MAX_BUFFERS):
                    self._fill(fd, file, offset, batch)
                    offset += size
                    batch, size = [], 0
                batch.append(part)
                size += len(part)
        if batch:
            self._fill(fd, file, offset, batch)
        if self.watch is not None:
            self.watch(file, first, buffers)

    def close(self) -> None:
        """Close the file that is open. The reader may be used again afterwards."""
        if self._file is not None:
            self._file = None
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, file: str) -> int:
        if self._file != file:
            self.close()
            try:
                self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _read_error(error, file) from error
            self._file = file
        return self._fd

    def _fill(self, fd: int, file: str, offset: int, batch: list[memoryview]) -> None:
        while batch:
            try:
                count = os.preadv(fd, batch, offset)
            except OSError as error:
                raise _read_error(error, file, f"at byte {offset}") from error
            if count == 0:
                missing = sum(map(len, batch))
                raise FormatError(
                    f"the file ends here, {missing} bytes too soon", file=file, offset=offset
                )
            self.nbytes += count
            offset += count
            batch = _unfilled(batch, count)


def _unfilled(batch: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after `count` bytes have been filled."""
    for i, buffer in enumerate(batch):
        if count < len(buffer):
            return [buffer[count:], *batch[i + 1 :]]
        count -= len(buffer)
    return []


def _read_error(error: OSError, file: str, where: str = "") -> ReadError:
    text = error.strerror or str(error)
    return ReadError(error.errno or errno.EIO, f"{text} {where}".rstrip(), file)
