"""SaveJob: what one rank has to do in a save."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from ckptx.checkpoint import Checkpoint
from ckptx.consensus import agree_on_layouts
from ckptx.copies import prove_equal
from ckptx.destination import layouts_here, shard_of, unsaved
from ckptx.errors import CheckpointPlanError
from ckptx.formats.dcp_files import dcp_format
from ckptx.formats.safetensors_files import safetensors_format
from ckptx.leaves import Leaves, Path, StateDict, leaves_of
from ckptx.outfile import OutFile, OutFormat, Part
from ckptx.placing import SavePlan, plan_save
from ckptx.publishing import partial_of
from ckptx.report import SaveReport
from ckptx.values import as_named, plain, to_json
from ckptx.ways import Ways
from ckptx.writer import FileWriting, Pieces, pieces_of
from distcore.v1 import Channel, Layout, Problem
from distcore.v1.runtime import Shard

Format: TypeAlias = Literal["safetensors", "dcp"]


@dataclass(slots=True)
class SaveJob:
    """What one rank has to do: checked on that rank alone, then planned with the others.

    `values` are plain data and `texts` the same as text. `shards` are the tensors with the regions
    that lie in them; they are the caller's memory. Where there are none, `source` gives the bytes.
    """

    path: str
    rank: int
    format: Format
    tensors: Mapping[str, torch.Tensor]
    layouts: dict[str, Layout]
    given: Mapping[str, Layout]
    values: Mapping[str, object]
    texts: Mapping[str, str]
    paths: Mapping[str, Path]
    source: Pieces | None = None
    copy_nbytes: int = 8 << 20
    shards: Mapping[str, Shard] = field(default_factory=dict)
    saved: SavePlan = field(default_factory=lambda: SavePlan({}, (), 0, 0))
    out: OutFormat = field(default_factory=lambda: OutFormat((), {}))

    @classmethod
    def of(
        cls,
        state_dict: StateDict,
        path: str,
        channel: Channel,
        *,
        kind: Format,
        given: Mapping[str, Layout],
    ) -> SaveJob:
        """Describe; raises CheckpointPlanError with everything that cannot be saved."""
        leaves = leaves_of(state_dict)
        problems = unsaved(leaves.tensors)
        if kind not in {"safetensors", "dcp"}:
            text = f"expected 'safetensors' or 'dcp', got {kind!r}"
            problems.append(Problem("format", "format", text))
        values, texts = _written(leaves, problems)
        if problems:
            raise CheckpointPlanError(problems)
        layouts = layouts_here(leaves.tensors, given, channel.rank, channel.ranks)
        return cls(
            path=path.rstrip("/") or path,
            rank=channel.rank,
            format=kind,
            tensors=leaves.tensors,
            layouts=layouts,
            given=given,
            values=values,
            texts=texts,
            paths=leaves.paths,
        )

    @classmethod
    def of_checkpoint(
        cls, checkpoint: Checkpoint, path: str, channel: Channel, *, kind: Format, source: Pieces
    ) -> SaveJob:
        """Describe a checkpoint, of which every rank can give every byte through `source`."""
        layouts = {
            key: Layout.replicated(shape=stored.shape, dtype=stored.dtype, ranks=channel.ranks)
            for key, stored in checkpoint.tensors.items()
        }
        leaves = Leaves(values={key: checkpoint.value(key) for key in checkpoint.objects})
        problems: list[Problem] = []
        values, texts = _written(leaves, problems)
        if problems:
            raise CheckpointPlanError(problems)
        return cls(
            path=path.rstrip("/") or path,
            rank=channel.rank,
            format=kind,
            tensors={},
            layouts=layouts,
            given=layouts,
            values=values,
            texts=texts,
            paths=checkpoint.paths,
            source=source,
        )

    @property
    def mine(self) -> list[OutFile]:
        """The files that this rank writes."""
        return [file for file in self.out.files if file.rank == self.rank]

    def plan(self, ways: Ways, *, split: bool, overwrite: bool) -> None:
        """Agree with the other ranks, and plan. Collective."""
        terms = {f"value {key}": text for key, text in self.texts.items()}
        terms |= {"<format>": self.format, "<split>": str(split), "<overwrite>": str(overwrite)}
        self.layouts = agree_on_layouts(
            terms,
            self.layouts,
            self.tensors,
            ways.channel,
            given=self.given,
            timeout_s=ways.timeout_s,
            label="save",
        )
        self.copy_nbytes = ways.max_staging_bytes // 8
        self.shards = {
            key: shard_of(tensor, self.layouts[key], self.rank, given=key in self.given)
            for key, tensor in self.tensors.items()
        }
        ranks = ways.channel.ranks
        self.saved = ways.together(
            "plan the save", lambda: plan_save(self.layouts, ranks, split=split)
        )
        self.out = ways.together("lay out the files", lambda: self._formatted(ranks))

    def _formatted(self, ranks: tuple[int, ...]) -> OutFormat:
        if self.format == "safetensors":
            pairs = (f"{to_json(key)}:{text}" for key, text in self.texts.items())
            text = "{" + ",".join(pairs) + "}"
            return safetensors_format(self.saved, self.layouts, text, ranks=ranks)
        named = {key: as_named(value) for key, value in self.values.items()}
        return dcp_format(self.saved, self.layouts, named, ranks=ranks, paths=self.paths)

    def prove(self, ways: Ways) -> None:
        """Prove that the copies of what several ranks hold are equal. Collective."""
        prove_equal(self.saved.copies, self.shards, ways, copy_nbytes=self.copy_nbytes)

    def pieces(self, part: Part) -> Iterator[memoryview]:
        """The bytes of a box, out of this rank's tensors or from the source."""
        if self.source is not None:
            return self.source(part)
        return pieces_of(self.shards[part.key], part.region, self.copy_nbytes)

    def open(self) -> list[FileWriting]:
        """Begin to write this rank's files."""
        directory = partial_of(self.path)
        return [FileWriting(file, directory) for file in self.mine]

    def report(self, seconds: float) -> SaveReport:
        """What this rank wrote."""
        return SaveReport(
            bytes_written=self.saved.written_nbytes(self.rank),
            file_bytes_written=sum(file.nbytes for file in self.mine),
            files=tuple(os.path.join(self.path, file.name) for file in self.mine),
            total_bytes=self.saved.nbytes,
            lower_bound_slowest_write=self.saved.lower_bound_slowest,
            seconds=seconds,
        )


def _written(leaves: Leaves, problems: list[Problem]) -> tuple[dict[str, object], dict[str, str]]:
    """The values as plain data, and as text; what cannot be written is added to the problems."""
    values: dict[str, object] = {}
    texts: dict[str, str] = {}
    for key, value in leaves.values.items():
        try:
            values[key] = plain(value)
            texts[key] = to_json(values[key])
        except TypeError as error:
            problems.append(Problem(key, "value", f"it cannot be saved: {error}"))
    return values, texts
