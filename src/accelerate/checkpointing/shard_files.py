"""The pieces of a state, written by every rank into one folder of torch's distributed checkpoints.

torch plans and writes the files; who says what to whom is ours. So the ranks can agree beside the training, without
its process group, and the same state gives the same bytes whether the training waits for them or not.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch

from .agreement import Ranks
from .codec import read_described_pickle, write_plain_pickle
from .content import Part
from .dcp import DESCRIPTIONS, in_our_words
from .draft import Create, Draft
from .manifest import measure

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem

T = TypeVar("T")

#: What ranks may tell each other about what they write, besides what an index may name.
_PLANS = {
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "torch.distributed.checkpoint.storage": ("WriteResult",),
}


@final
class Shards(Part):
    """This rank's pieces of one state, as files of ``folder``.

    Args:
        state: nested dicts and lists; tensors may be whole, or DTensors and ShardedTensors.
        ranks: who writes the folder together.
        draft: the checkpoint that the folder is part of.
    """

    def __init__(self, folder: Path, state: dict[str, Any], ranks: Ranks, draft: Draft | None = None) -> None:
        self._folder, self._ranks, self._draft = folder, ranks, draft
        planner, writer = _classes()
        self._planner: Any = planner()
        self._writer: Any = writer(folder)
        self._planner.set_up_planner(state, self._writer.storage_meta(), ranks.is_main)
        self._plan = self._planner.create_local_plan()
        self._planner.take(self._plan.items)

    def tensors(self) -> Iterable[torch.Tensor]:
        """This rank's pieces."""
        return [value for value in self._planner.values.values() if isinstance(value, torch.Tensor)]

    def keep(self, copies: Mapping[int, torch.Tensor]) -> None:
        """The pieces are the copies; what is no tensor is kept as bytes already."""
        values: dict[Any, Any] = self._planner.values
        self._planner.values = {
            index: copies[id(value)] if isinstance(value, torch.Tensor) else value for index, value in values.items()
        }

    def write(self, create: Create) -> None:
        """The folder holds every rank's pieces; all ranks of the folder are in this call."""
        with in_our_words(f"save {self._folder}"):
            self._write()

    def _write(self) -> None:
        is_main, plans, metadata = self._ranks.is_main, None, None
        self._step(self._prepare)
        told = self._ranks.to_main(_packed(self._plan))
        if is_main:
            plans, metadata = self._step(lambda: self._planned(told))
        else:
            self._step(lambda: None)
        mine = self._ranks.from_main(plans)
        results = self._step(lambda: self._data(_unpacked(mine)))
        told = self._ranks.to_main(_packed(results))
        self._step(lambda: self._writer.finish(metadata, [_unpacked(one) for one in told or ()]) if is_main else None)
        names = {result.storage_data.relative_path for result in results}
        self._step(lambda: self._record(names))

    def _step(self, act: Callable[[], T]) -> T:
        """What ``act()`` gave, once it has ended well on every rank."""
        error: Exception | None = None
        answer: Any = None
        try:
            answer = act()
        except Exception as problem:  # raised again on every rank by agree()
            error = problem
        self._ranks.agree(error, f"save {self._folder}")
        return answer

    def _prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer.set_up_storage_writer(self._ranks.is_main)
        self._plan = self._writer.prepare_local_plan(self._plan)

    def _planned(self, told: list[bytes] | None) -> tuple[list[bytes], Any]:
        plans, metadata = self._planner.create_global_plan([_unpacked(plan) for plan in told or ()])
        return [_packed(plan) for plan in self._writer.prepare_global_plan(plans)], metadata

    def _data(self, plan: Any) -> list[Any]:
        writing = self._writer.write_data(self._planner.finish_plan(plan), self._planner)
        writing.wait()
        return writing.value()

    def _record(self, names: Iterable[str]) -> None:
        """Every rank sums up what it has written itself."""
        if self._draft is None:
            return
        for name in names:
            record = measure(self._folder / name)
            self._draft.records[f"{self._folder.relative_to(self._draft.folder).as_posix()}/{name}"] = record
            self._draft.meter.advance(record.size)


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    write_plain_pickle(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return read_described_pickle(io.BytesIO(data), {**DESCRIPTIONS, **_PLANS}, "what another rank says of its pieces")


@cache  # made when first needed: importing torch's part takes half a second
def _classes() -> tuple[type, type]:
    """A planner that keeps what it will write, and a writer that leaves no trace of when and where it wrote."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta

    @final
    class Planner(DefaultSavePlanner):
        def take(self, items: Iterable[WriteItem]) -> None:
            self.values = {item.index: super(Planner, self).resolve_data(item) for item in items}

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            value: Any = self.values[write_item.index]
            return value.detach().contiguous() if isinstance(value, torch.Tensor) else value

    @final
    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            return StorageMeta()

    return Planner, Writer
