"""dcp: plug-ins for those who stay with `dcp.load` and `dcp.save` of torch.

dcp.load(state_dict, storage_reader=ReadOnceReader(path))
dcp.save(state_dict, checkpoint_id=path, planner=BalancedSavePlanner())
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckptx.checkpoint import Checkpoint, open_checkpoint
from ckptx.errors import CheckpointPlanError, FormatError, as_checkpoint_errors
from ckptx.placing import plan_save
from ckptx.planned import Request, read_requests
from ckptx.report import LoadReport
from ckptx.values import foreign_names, value_of
from ckptx.ways import DEFAULT_STAGING_NBYTES, Ways
from distcore.v1 import Layout, Piece, Problem, Region
from distcore.v1.runtime import Group, channel_over, dtype_name, torch_dtype

Path = str | os.PathLike[str]


class ReadOnceReader(StorageReader):
    """A storage reader that reads each byte once per group, and only the bytes that are needed.

    It reads whatever `open_checkpoint` does, and never executes what it reads. `group` is the
    group that `dcp.load` is called with: a process group or a Channel; None is the default group,
    or this process alone where there is none. `report` says what the last load moved.

    A dtype that differs from the stored one is an error, unless `cast` is set.
    """

    report: LoadReport | None

    def __init__(
        self,
        path: Path,
        *,
        group: Group | None = None,
        cast: bool = False,
        verify: bool = True,
        max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
    ) -> None:
        super().__init__()
        self.path = os.fspath(path)
        self.report = None
        self._group = group
        self._cast = cast
        self._verify = verify
        self._max_staging_bytes = max_staging_bytes
        self._checkpoint: Checkpoint | None = None

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Forget what was read; read from `checkpoint_id` from now on, where one is given."""
        if checkpoint_id:
            self.path = os.fspath(checkpoint_id)
        self._checkpoint = None

    def read_metadata(self, *_: object, **__: object) -> md.Metadata:
        """What the checkpoint holds, as torch's planners take it."""
        return _metadata(self._opened())

    def set_up_storage_reader(
        self, metadata: md.Metadata, is_coordinator: bool, *_: object, **__: object
    ) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is: who reads what is decided when all needs are known."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan needs, and give it to the planner. Collective over the group."""
        checkpoint = self._opened()
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        others = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item).detach() for item in tensors]
        requests = [
            Request(item.storage_index.fqn, _region(item), target, tuple(item.dest_offsets))
            for item, target in zip(tensors, targets, strict=True)
        ]
        keys = sorted({item.storage_index.fqn for item in others})
        with as_checkpoint_errors(), channel_over(self._group) as channel:
            ways = Ways(channel, self._max_staging_bytes, "auto", self._verify, None)
            found, self.report = read_requests(checkpoint, requests, keys, ways, cast=self._cast)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in others:
            key = item.storage_index.fqn
            planner.load_bytes(item, _harmless(checkpoint, key, found[key]))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether there is something at the path."""
        return os.path.exists(checkpoint_id)

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = open_checkpoint(self.path)
        return self._checkpoint


def _metadata(checkpoint: Checkpoint) -> md.Metadata:
    entries: dict[str, md.TensorStorageMetadata | md.BytesStorageMetadata] = {}
    for key, stored in checkpoint.tensors.items():
        regions = [chunk.region for chunk in stored.chunks] or [Region.of_shape(stored.shape)]
        entries[key] = md.TensorStorageMetadata(
            md.TensorProperties(dtype=torch_dtype(stored.dtype)),
            torch.Size(stored.shape),
            [_chunk(region) for region in regions],
        )
    entries |= {key: md.BytesStorageMetadata() for key in checkpoint.objects}
    paths = dict(checkpoint.paths) or {key: (key,) for key in entries}
    return md.Metadata(entries, planner_data=paths, storage_data={}, storage_meta=md.StorageMeta())


def _chunk(region: Region) -> md.ChunkStorageMetadata:
    return md.ChunkStorageMetadata(torch.Size(region.start), torch.Size(region.shape))


def _region(item: ReadItem) -> Region:
    """The box of the whole tensor that an item asks for."""
    base = item.storage_index.offset or (0,) * len(item.lengths)
    start = tuple(low + by for low, by in zip(base, item.storage_offsets, strict=True))
    return Region(start, tuple(low + n for low, n in zip(start, item.lengths, strict=True)))


def _harmless(checkpoint: Checkpoint, key: str, data: bytes) -> io.BytesIO:
    """A value as torch loads it: read as data first, since torch would execute what is stored."""
    stored = checkpoint.objects[key]
    value = value_of(stored, data)
    names = foreign_names(value)
    if names:
        text = f"its value needs {', '.join(sorted(set(names)))}, which is not loaded"
        raise FormatError(text, file=stored.file, key=key)
    found = io.BytesIO()
    torch.save(value, found)
    found.seek(0)
    return found


class BalancedSavePlanner(DefaultSavePlanner):
    """A save planner that shares out by true bytes what several ranks hold.

    What few ranks hold is placed first, and a large tensor is written by its holders in parts of
    at least `min_split` bytes. `loads` are the bytes per rank of the last plan, on the rank that
    made it.
    """

    loads: tuple[int, ...]

    def __init__(self, *, flatten_state_dict: bool = True, min_split: int = 1 << 20) -> None:
        super().__init__(flatten_state_dict=flatten_state_dict)
        self.loads = ()
        self._min_split = min_split
        self._own: dict[str, list[WriteItem]] = {}

    def create_local_plan(self) -> SavePlan:
        """What this rank holds."""
        plan = super().create_local_plan()
        self._own = {}
        for item in plan.items:
            self._own.setdefault(item.index.fqn, []).append(item)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], md.Metadata]:
        """Who writes what; every element once. Called on one rank."""
        layouts, examples = _layouts(all_plans)
        ranks = range(len(all_plans))
        placed = plan_save(layouts, ranks, min_split=self._min_split)
        self.loads = tuple(placed.written_nbytes(rank) for rank in ranks)
        taken: set[str] = set()
        plans = []
        for rank, plan in enumerate(all_plans):
            items = [
                item
                for item in plan.items
                if item.type == WriteItemType.BYTE_IO and item.index.fqn not in taken
            ]
            taken |= {item.index.fqn for item in items}
            items += [
                _part(examples[write.key], write.region, layouts[write.key])
                for write in placed.writes.get(rank, ())
            ]
            plans.append(dataclasses.replace(plan, items=items))
        return super().create_global_plan(plans)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The bytes of an item: a value's, or those of a box out of what this rank holds."""
        data = write_item.tensor_data
        if data is None:
            return super().resolve_data(write_item)
        wanted = _box(data.chunk)
        parts: list[tuple[Region, torch.Tensor]] = []
        for item in self._own[write_item.index.fqn]:
            held = _box(item.tensor_data.chunk) if item.tensor_data is not None else wanted
            common = wanted if held == wanted else held.intersect(wanted)
            if common is not None:
                local: torch.Tensor = self.lookup_object(item.index)
                parts.append((common, local.detach()[common.relative_to(held).slices()]))
        if len(parts) == 1 and parts[0][0] == wanted:
            return parts[0][1]
        whole = torch.empty(wanted.shape, dtype=data.properties.dtype)
        for common, local in parts:
            whole[common.relative_to(wanted).slices()] = local
        return whole


def _box(chunk: md.ChunkStorageMetadata) -> Region:
    return Region(
        tuple(chunk.offsets),
        tuple(low + size for low, size in zip(chunk.offsets, chunk.sizes, strict=True)),
    )


def _layouts(plans: Sequence[SavePlan]) -> tuple[dict[str, Layout], dict[str, WriteItem]]:
    """What each rank holds of each tensor, and one item of each as an example.

    CheckpointPlanError where ranks give one tensor different shapes or dtypes.
    """
    held: dict[str, dict[int, dict[Region, None]]] = {}
    examples: dict[str, WriteItem] = {}
    problems = []
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            key, data = item.index.fqn, item.tensor_data
            known = examples.setdefault(key, item).tensor_data
            if known is not None and (known.size, known.properties.dtype) != (
                data.size,
                data.properties.dtype,
            ):
                text = f"rank {rank} holds another shape or dtype than a rank before it"
                problems.append(Problem(key, "shape", text))
            held.setdefault(key, {}).setdefault(rank, {})[_box(data.chunk)] = None
    if problems:
        raise CheckpointPlanError(problems)
    return {key: _layout(examples[key], found) for key, found in held.items()}, examples


def _layout(example: WriteItem, held: Mapping[int, Mapping[Region, None]]) -> Layout:
    data = example.tensor_data
    if data is None:
        raise ValueError(f"{example.index.fqn} is no tensor")
    return Layout(
        shape=tuple(data.size),
        dtype=dtype_name(data.properties.dtype),
        pieces={
            rank: [Piece(region, region.start) for region in regions]
            for rank, regions in held.items()
        },
    )


def _part(example: WriteItem, region: Region, layout: Layout) -> WriteItem:
    """The order to write a box of a tensor."""
    if example.tensor_data is None:
        raise ValueError(f"{example.index.fqn} is no tensor")
    index = md.MetadataIndex(example.index.fqn, region.start)
    data = dataclasses.replace(example.tensor_data, chunk=_chunk(region))
    is_whole = region == Region.of_shape(layout.shape)
    kind = example.type if is_whole else WriteItemType.SHARD
    return dataclasses.replace(example, index=index, tensor_data=data, type=kind)
