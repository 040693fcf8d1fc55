"""Stream: the bytes of a state in order, wherever in memory each part of them lies."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from fttransport.digests import Digester
from fttransport.manifest import Manifest
from fttransport.memory import buffer_of, touch

_THREADED_NBYTES: Final = 64 << 20
_THREADS: Final = min(4, os.cpu_count() or 1)


class Stream:
    """Buffers laid end to end; part of them is asked for by where it lies in the whole.

    Keeps the memory of its blocks (flat CPU uint8 tensors) alive. `new` are the numbers of those
    whose memory was never written to.
    """

    def __init__(self, blocks: Sequence[Tensor], *, new: Collection[int] = ()) -> None:
        self.blocks = tuple(blocks)
        self._new = frozenset(new)
        self._buffers = [buffer_of(block) for block in blocks]
        self._starts = list(accumulate((len(b) for b in self._buffers), initial=0))

    @property
    def nbytes(self) -> int:
        """The length of the whole."""
        return self._starts[-1]

    def part(self, start: int, stop: int) -> list[memoryview]:
        """The buffers that make up bytes `start` to `stop`; none is empty."""
        found: list[memoryview] = []
        index = bisect_right(self._starts, start) - 1
        while start < stop:
            base, buffer = self._starts[index], self._buffers[index]
            end = min(stop, self._starts[index + 1])
            if end > start:
                whole = start == base and end == base + len(buffer)
                found.append(buffer if whole else buffer[start - base : end - base])
                start = end
            index += 1
        return found

    def tensors(self, start: int, stop: int) -> list[Tensor]:
        """The same as flat uint8 tensors."""
        return [torch.frombuffer(part, dtype=torch.uint8) for part in self.part(start, stop)]

    def touch(self, start: int, stop: int) -> None:
        """Have pages given to what is new of bytes `start` to `stop`; no byte changes."""
        index = bisect_right(self._starts, start) - 1
        while start < stop and index < len(self.blocks):
            base, end = self._starts[index], min(stop, self._starts[index + 1])
            if index in self._new and end > start:
                touch(self.blocks[index], start - base, end - base)
            start, index = max(start, end), index + 1

    def digests(self, manifest: Manifest, digester: Digester) -> tuple[str, ...]:
        """The digests of all chunks as they are in memory now; those of a large stream at once."""
        chunks = range(manifest.num_chunks)
        if manifest.nbytes < _THREADED_NBYTES:
            return tuple(self.digest(manifest, chunk, digester) for chunk in chunks)
        size = -(-len(chunks) // _THREADS)
        parts = [chunks[start : start + size] for start in range(0, len(chunks), size)]
        # Digesting lets go of the interpreter's lock.
        with ThreadPoolExecutor(len(parts), thread_name_prefix="fttransport-digest") as pool:
            done = pool.map(lambda part: [self.digest(manifest, i, digester) for i in part], parts)
            return tuple(digest for digests in done for digest in digests)

    def digest(self, manifest: Manifest, chunk: int, digester: Digester) -> str:
        """The digest of a chunk as it is in memory now."""
        return digester.digest(self.part(*manifest.chunk(chunk)))
