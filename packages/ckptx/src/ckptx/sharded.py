"""Sharded values: a rank's piece of a global tensor or object, and the id by which ranks name it.

These are the values that Megatron-Core's dist_checkpointing calls ShardedTensor and ShardedObject,
with the same fields and the same rules. They describe; what moves them is `ckptx.exchange_utils`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from ckptx.errors import CheckpointPlanError
from distcore.v1 import Problem

ReplicaId: TypeAlias = int | tuple[int, ...]
ShardId: TypeAlias = tuple[str, tuple[int, ...], tuple[int, int] | None]
ObjectId: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]


def is_main_replica(replica_id: int | Iterable[int]) -> bool:
    """Whether it names the main copy: 0, or nothing but zeros.

    >>> is_main_replica(0), is_main_replica((0, 0)), is_main_replica((0, 1)), is_main_replica(())
    (True, True, False, True)
    """
    if isinstance(replica_id, int):
        return replica_id == 0
    return not any(replica_id)


@dataclass(slots=True)
class ShardedTensor:
    """A local piece of a global tensor.

    - `key`: the global tensor's name, the same on all ranks.
    - `data`: the local values, or None where this only describes them.
    - `dtype`, `local_shape`: of the piece. `global_shape`, `global_offset`: in elements of the
      global tensor, which has `prepend_axis_num` leading axes (a layer's number, say) more.
    - `axis_fragmentations`: pieces per global axis where they form a regular grid, else None.
    - `replica_id`: which copy of the piece this is; see `is_main_replica`.
    - `allow_shape_mismatch`: a checkpoint may hold it with another global shape.
    - `flattened_range`: always None; an older form of sharding that is not supported.

    What is made is legal: CheckpointPlanError (a CheckpointingException) lists what does not fit.
    The fields may be assigned afterwards. `data` belongs to the caller and is never copied.
    """

    key: str
    data: torch.Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.local_shape = tuple(self.local_shape)
        self.global_shape = tuple(self.global_shape)
        self.global_offset = tuple(self.global_offset)
        if self.axis_fragmentations is not None:
            self.axis_fragmentations = tuple(self.axis_fragmentations)
        self.validate_metadata_integrity()

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """The piece `data` of a regular grid.

        Each of `rank_offsets` is (axis, index of this piece on it, pieces on it); axes count the
        prepended ones, on which a piece has the size 1. Axes that are not named are not cut.
        IndexError where an axis does not exist, CheckpointPlanError for everything else.

        >>> ShardedTensor.from_rank_offsets("w", torch.ones(3, 4), (0, 1, 2)).global_offset
        (3, 0)
        """
        if flattened_range is not None:
            raise CheckpointPlanError(Problem(key, "flattened_range", "is not supported"))
        local = (1,) * prepend_axis_num + tuple(data.shape)
        shape, offset, pieces = list(local), [0] * len(local), [1] * len(local)
        axes = [axis for axis, _, _ in rank_offsets]
        for axis, index, count in rank_offsets:
            if axis < 0 or not 0 <= index < count or axes.count(axis) > 1:
                text = f"{rank_offsets}: each must be (axis, index < count, count), once per axis"
                raise CheckpointPlanError(Problem(key, "rank_offsets", text))
            shape[axis], offset[axis] = count * local[axis], index * local[axis]
            pieces[axis] = count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(shape),
            tuple(offset),
            tuple(pieces),
            replica_id,
            prepend_axis_num,
            **init_kwargs,
        )

    @property
    def shard_id(self) -> ShardId:
        """What names the piece among all pieces of all tensors; copies of it have the same."""
        return (self.key, self.global_offset, None)

    @property
    def has_regular_grid(self) -> bool:
        """Whether the pieces are known to form a regular grid."""
        return self.axis_fragmentations is not None

    def validate_metadata_integrity(self) -> None:
        """Raise CheckpointPlanError with every rule that the fields break."""
        problems = [Problem(self.key, kind, text) for kind, text in self._broken_rules()]
        if problems:
            raise CheckpointPlanError(problems)

    def _broken_rules(self) -> list[tuple[str, str]]:
        found = []
        if self.flattened_range is not None:
            found.append(("flattened_range", f"{self.flattened_range} is not supported"))
        ndim = len(self.local_shape) + self.prepend_axis_num
        if not len(self.global_shape) == len(self.global_offset) == ndim:
            text = (
                f"expected {ndim} global axes, got the shape {self.global_shape} "
                f"and the offset {self.global_offset}"
            )
            return [*found, ("ndim", text)]
        if self.data is not None and self.data.dtype != self.dtype:
            found.append(("dtype", f"expected {self.dtype}, the data is {self.data.dtype}"))
        if self.data is not None and tuple(self.data.shape) != self.local_shape:
            text = f"expected {self.local_shape}, the data has {tuple(self.data.shape)}"
            found.append(("shape", text))
        if self.axis_fragmentations is not None:
            if len(self.axis_fragmentations) != ndim:
                text = f"expected {ndim} counts of pieces, got {self.axis_fragmentations}"
                found.append(("axis_fragmentations", text))
            offsets = self.global_offset[self.prepend_axis_num :]
            if any(n and at % n for at, n in zip(offsets, self.local_shape, strict=True)):
                text = f"{offsets} is no multiple of the local shape {self.local_shape}"
                found.append(("offset", text))
        return found

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """The piece's index in the grid, per global axis; needs a regular grid.

        On an axis where the piece is empty the index is 0.
        """
        self._require_grid()
        local = (1,) * self.prepend_axis_num + self.local_shape
        return tuple(at // n if n else 0 for at, n in zip(self.global_offset, local, strict=True))

    def without_data(self) -> ShardedTensor:
        """A copy that only describes."""
        return replace(self, data=None)

    def init_data(
        self,
        device: str | torch.device,
        init_fn: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        """Give it data where it has none; what is there stays, on its own device."""
        if self.data is None:
            self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Cut the piece along a local dim, and the global tensor in the same proportion.

        A list of one, as in Megatron-Core. Needs a regular grid and sizes that divide.
        """
        self._require_grid()
        axis, size = dim + self.prepend_axis_num, self.local_shape[dim]
        whole, offset = self.global_shape[axis], self.global_offset[axis]
        if not size or whole * length % size or offset * length % size:
            text = f"dim {dim} of size {size} cannot be cut to {length} in proportion"
            raise CheckpointPlanError(Problem(self.key, "narrow", text))
        cut = replace(
            self,
            data=None,
            local_shape=_with(self.local_shape, dim, length),
            global_shape=_with(self.global_shape, axis, whole * length // size),
            global_offset=_with(self.global_offset, axis, offset * length // size),
        )
        cut.data = None if self.data is None else self.data.narrow(dim, start, length)
        return [cut]

    def _require_grid(self) -> None:
        if self.axis_fragmentations is None:
            raise CheckpointPlanError(Problem(self.key, "grid", "the pieces form no regular grid"))


@dataclass(slots=True)
class ShardedObject:
    """A piece of a global grid of objects: anything that is no tensor.

    `global_shape` is the shape of the grid, `global_offset` the object's place in it; both have
    the same number of axes, else CheckpointPlanError.
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.global_shape = tuple(self.global_shape)
        self.global_offset = tuple(self.global_offset)
        if len(self.global_shape) != len(self.global_offset):
            text = f"the shape {self.global_shape} and the offset {self.global_offset} differ"
            raise CheckpointPlanError(Problem(self.key, "ndim", text))

    @property
    def object_id(self) -> ObjectId:
        """What names the object; copies of it have the same."""
        return (self.key, self.global_offset, self.global_shape)

    @property
    def unique_key(self) -> str:
        """The name under which it is stored: `<key>/shard_<offset>_<shape>`.

        >>> ShardedObject("rng", None, (4,), (2,)).unique_key
        'rng/shard_2_4'
        """
        offset, shape = (".".join(map(str, t)) for t in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    def without_data(self) -> ShardedObject:
        """A copy that only describes."""
        return replace(self, data=None)

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The object without data that has this name; CheckpointPlanError where none can have it.

        A key with a slash in it cannot be told from its shard and is refused.
        """
        try:
            key, place = unique_key.split("/")
            mark, offset, shape = place.split("_")
            found = cls(key, None, _numbers(shape), _numbers(offset), replica_id)
        except ValueError as error:
            text = f"is not of the form <key>/shard_<offset>_<shape>: {error}"
            raise CheckpointPlanError(Problem(unique_key, "name", text)) from error
        if mark != "shard":
            text = "is not of the form <key>/shard_<offset>_<shape>"
            raise CheckpointPlanError(Problem(unique_key, "name", text))
        return found


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    found = list(values)
    found[at] = value
    return tuple(found)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("."))) if text else ()
