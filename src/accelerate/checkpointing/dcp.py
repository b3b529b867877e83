"""Folders of torch's distributed checkpoint (DCP): every rank writes its shards; reading them runs no code.

torch plans and writes the files; we send the messages between ranks. So the ranks can exchange plans without the
training's process group, and synchronous and asynchronous saves write the same bytes.

Rank 0's planning time grows with the number of proposed pieces. With more than :data:`MAX_RANKS` ranks, each piece is
proposed once: one of its replicas, chosen by name, proposes a shard, and the first rank that has them proposes values
that aren't sharded.
"""

from __future__ import annotations

import inspect
import io
import math
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import torch

from ..errors import CheckpointError, CheckpointNotFound
from ..names import FSDP_MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME
from .agreement import Ranks
from .codec import plain_pickle, read_described_pickle, read_pickle, write_pickle
from .items import CheckpointItem
from .layout import MAX_RANKS, folder_of_rank
from .manifest import measure
from .objects import atomic_file
from .run_state import StateDict
from .storage import inside
from .store import Create, StagingDirectory
from .tensor_files import file_order, write_tensors
from .weights import WeightNames, open_weights, write_weights

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

T = TypeVar("T")

METADATA_NAME: Final = ".metadata"
#: The classes that the metadata may name; they describe tensors and their locations in files.
DESCRIPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"),
    "collections": ("OrderedDict",),
}


def is_distributed_checkpoint(folder: Path) -> bool:
    """Return whether ``folder`` is a distributed checkpoint of torch."""
    return (folder / METADATA_NAME).is_file()


def read_metadata(folder: str | PathLike[str]) -> Metadata:
    """Read the metadata of a distributed checkpoint of torch.

    Raises:
        CheckpointNotFound: the folder isn't a distributed checkpoint.
        CheckpointError: its metadata can't be read, or names something that could run code.
    """
    import torch.distributed.checkpoint  # the metadata may name its classes  # noqa: F401

    path = Path(folder) / METADATA_NAME
    if not path.is_file():
        raise CheckpointNotFound(f"{folder} is no folder of a distributed checkpoint: it has no {METADATA_NAME}")
    found = read_described_pickle(path.read_bytes(), DESCRIPTIONS, str(path))
    locations: Mapping[object, object] = getattr(found, "storage_data", None) or {}
    for name in {getattr(location, "relative_path", None) for location in locations.values()}:
        inside(folder, name, path)
    return found


def shapes_of(found: Metadata) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint by key, on the meta device."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for key, entry in found.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(folder: str | PathLike[str], found: Metadata, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read the named tensors in full into CPU memory, without a process group."""
    shapes = shapes_of(found)
    tensors = {key: torch.empty(shapes[key].shape, dtype=shapes[key].dtype) for key in keys}
    read_into(folder, tensors, alone=True)
    return tensors


def read_into(folder: str | PathLike[str], state: StateDict, *, alone: bool) -> None:
    """Read the saved values into the tensors of ``state``, replacing other entries; a collective unless ``alone``."""
    from torch.distributed.checkpoint import state_dict_loader

    load: Callable[..., None] = state_dict_loader.load
    options: dict[str, bool] = {"no_dist": alone} if alone else {}
    if alone and "no_dist" not in inspect.signature(load).parameters:
        load = state_dict_loader.load_state_dict  # in torch 2.6, only this older function can ignore the process group
    reader, planner = _load_classes()
    with convert_torch_errors(f"load {folder}"):
        load(state, storage_reader=reader(str(folder)), planner=planner(), **options)


@contextmanager
def convert_torch_errors(what: str) -> Iterator[None]:
    """Convert torch's errors to ours; silence its warnings about a single process and about its own deprecations.

    Raises:
        CheckpointError: on every rank, if torch failed on any; torch's own error isn't an Exception.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {reason[0]}" for rank, reason in sorted(error.failures.items()))
            raise CheckpointError(f"can't {what}: {reasons}") from error


@cache  # made when first needed: importing torch's module takes half a second
def _load_classes() -> tuple[type, type]:
    """Return torch's reader and planner, changed to read pickles through an allow-list."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.planner import ReadItem

    @final
    class Reader(FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *arguments: object, **options: object) -> Metadata:
            return read_metadata(str(self.path))

    @final
    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            try:
                entry = read_pickle(value)
            except CheckpointError as error:
                raise CheckpointError(f"{read_item.dest_index.fqn}: {error}") from error
            if not self.flatten_state_dict:
                self.state_dict[read_item.dest_index.fqn] = entry
                return
            safe = io.BytesIO()
            write_pickle(entry, safe)  # this is only data, so torch's planner may unpickle it
            safe.seek(0)
            super().load_bytes(read_item, safe)

    return Reader, Planner


def plain_names(found: Metadata) -> dict[str, str]:
    """Map the keys of the tensors to their names in the model.

    If the state dict was saved as ``{"model": state_dict}``, every key begins with ``model.``.
    """
    paths: Mapping[str, tuple[object, ...]] = found.planner_data or {}
    keys = list(shapes_of(found))
    tops = {paths[key][0] if key in paths else None for key in keys}
    wrapped = len(tops) == 1 and None not in tops and all(len(path) > 1 for path in paths.values())
    top = f"{next(iter(tops))}." if wrapped else ""
    return {key: key.removeprefix(top) for key in keys}


# ---------------------------------------------------------------------------------------------- writing shards

#: The classes that messages between ranks may name, besides those of the metadata.
_MESSAGES = {
    **DESCRIPTIONS,
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    "torch.distributed.checkpoint.storage": ("WriteResult",),
}


@final
class ShardsItem(CheckpointItem):
    """This rank's shards of one state, written to files in ``folder``.

    Args:
        state: nested dicts and lists; tensors may be plain tensors, DTensors or ShardedTensors.
        ranks: the ranks that write the folder together.
        staging: the staging directory that contains the folder.
        replicas_differ: write the pieces of DTensors from the first replica only, not from any of them.
    """

    def __init__(
        self,
        folder: Path,
        state: StateDict,
        ranks: Ranks,
        staging: StagingDirectory | None = None,
        *,
        replicas_differ: bool = False,
    ) -> None:
        self.folder: Path = folder
        self._ranks, self._staging = ranks, staging
        planner, writer = _save_classes()
        self._planner: Any = planner()
        self._writer: Any = writer(folder)
        self._planner.set_up_planner(state, self._writer.storage_meta(), ranks.is_main)
        self._plan = self._planner.create_local_plan()
        if ranks.size > MAX_RANKS or replicas_differ:
            self._plan = without_replicas(self._plan, self._planner.state_dict, only_first=replicas_differ)
        self._planner.take(self._plan.items)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return this rank's shards."""
        return [value for value in self._planner.values.values() if isinstance(value, torch.Tensor)]

    def planned(self) -> Iterable[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
        """Return the pieces that this rank proposes to write, in order, with their values."""
        return [(item, self._planner.values[item.index]) for item in self._plan.items]

    def use_copies(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Replace the shards by the copies; other entries are already stored as bytes."""
        values: dict[Any, Any] = self._planner.values
        self._planner.values = {
            index: copies[id(value)] if isinstance(value, torch.Tensor) else value for index, value in values.items()
        }

    def write(self, create: Create | None = None) -> None:
        """Write this rank's shards into the folder; torch opens the files. A collective of the folder's ranks."""
        with convert_torch_errors(f"save {self.folder}"):
            self._write()

    def _write(self) -> None:
        is_main, plans, metadata = self._ranks.is_main, None, None
        self._step(self._prepare)
        if self._ranks.size > MAX_RANKS:
            is_first = is_first_alike(self._ranks, whole_values(self._plan))
            self._plan = proposed(self._plan, is_first)
        local_plans = self._ranks.gather(plain_pickle(self._plan))
        if is_main:
            plans, metadata = self._step(lambda: self._planned(local_plans))
        else:
            self._step(lambda: None)
        mine = self._ranks.scatter(plans)
        results = self._step(lambda: self._data(_unpacked(mine)))
        all_results = self._ranks.gather(plain_pickle(results))
        self._step(
            lambda: self._writer.finish(metadata, [_unpacked(one) for one in all_results or ()]) if is_main else None
        )
        names = {result.storage_data.relative_path for result in results}
        self._step(lambda: self._record(names))

    def _step(self, act: Callable[[], T]) -> T:
        """Return the result of ``act()`` if it succeeded on every rank; else raise on all ranks."""
        with self._ranks.fail_together(f"save {self.folder}"):
            result = act()
        return result

    def _prepare(self) -> None:
        (self.folder / folder_of_rank(self._ranks.rank, self._ranks.size)).mkdir(parents=True, exist_ok=True)
        self._writer.set_up_storage_writer(self._ranks.is_main)
        self._plan = self._writer.prepare_local_plan(self._plan)

    def _planned(self, local_plans: list[bytes] | None) -> tuple[list[bytes], Metadata]:
        plans, metadata = self._planner.create_global_plan([_unpacked(plan) for plan in local_plans or ()])
        return [plain_pickle(plan) for plan in self._writer.prepare_global_plan(plans)], metadata

    def _data(self, plan: SavePlan) -> list[WriteResult]:
        writing = self._writer.write_data(self._planner.finish_plan(plan), self._planner)
        writing.wait()
        return writing.value()

    def _record(self, names: Iterable[str]) -> None:
        """Record size and checksum of the files that this rank has written."""
        if self._staging is None:
            return
        for name in names:
            record = measure(self.folder / name)
            self._staging.records[f"{self.folder.relative_to(self._staging.folder).as_posix()}/{name}"] = record
            self._staging.progress.advance(record.size)


def without_replicas(plan: SavePlan, state: Mapping[str, Any], *, only_first: bool = False) -> SavePlan:
    """Return ``plan`` without the pieces of DTensors that another replica proposes, chosen by name or the first."""

    def is_own(name: str) -> bool:
        own, count = _replica_of(state.get(name))
        return own == (0 if only_first else zlib.crc32(name.encode()) % count)

    return replace(plan, items=[item for item in plan.items if is_own(item.index.fqn)])


def _replica_of(value: Any) -> tuple[int, int]:
    """Return the number of this rank's replica of ``value``, and how many there are: (0, 1) if it isn't a DTensor."""
    placements: Sequence[Any] = getattr(value, "placements", ())
    if not placements:
        return 0, 1
    mesh, own, count = value.device_mesh, 0, 1
    for size, at, placement in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
        if placement.is_replicate():
            own, count = own * size + at, count * size
    return own, count


def whole_values(plan: SavePlan) -> int:
    """Return a checksum of the names of values in this rank's plan that aren't sharded."""
    from torch.distributed.checkpoint.planner import WriteItemType

    names = sorted(item.index.fqn for item in plan.items if item.type != WriteItemType.SHARD)
    return zlib.crc32("\n".join(names).encode())


def is_first_alike(ranks: Ranks, checksum: int) -> bool:
    """Return whether this is the first rank with this checksum."""
    return checksum not in ranks.all_gather(checksum)[: ranks.rank]


def proposed(plan: SavePlan, is_first: bool) -> SavePlan:
    """Return this rank's proposed plan: its shards, and, if ``is_first``, its values that aren't sharded."""
    from torch.distributed.checkpoint.planner import WriteItemType

    items = [item for item in plan.items if is_first or item.type == WriteItemType.SHARD]
    names = {item.index.fqn for item in items}
    paths: Mapping[str, Any] = plan.planner_data or {}
    return replace(plan, items=items, planner_data={name: paths[name] for name in paths if name in names})


def _unpacked(data: bytes) -> Any:
    return read_described_pickle(data, _MESSAGES, "a message from another rank")


@cache  # made when first needed: importing torch's part takes half a second
def _save_classes() -> tuple[type, type]:
    """Return a planner with the values to write, and a writer that records no times and paths."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta

    @final
    class Planner(DefaultSavePlanner):
        def take(self, items: Iterable[WriteItem]) -> None:
            self.values = {item.index: super(Planner, self).resolve_data(item) for item in items}

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            value: Any = self.values[write_item.index]
            return value.detach().contiguous() if isinstance(value, torch.Tensor) else value

        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            """Plan as torch does; for many ranks, in linear instead of quadratic time in the number of pieces."""
            if len(all_plans) <= MAX_RANKS:
                return super().create_global_plan(each_once(all_plans, shards=False))
            plans, metadata = create_default_global_save_plan(each_once(all_plans), rewrite_index_hints=False)
            paths = {name: path for plan in all_plans[::-1] for name, path in (plan.planner_data or {}).items()}
            self.metadata = replace(metadata, planner_data=paths)
            require_whole(self.metadata)
            return plans, self.metadata

    @final
    class Writer(FileSystemWriter):
        def storage_meta(self) -> StorageMeta:
            return StorageMeta()

        def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
            """Name the files; with many ranks, in folders by thousand."""
            return [
                replace(plan, storage_data=replace(data, prefix=f"{folder_of_rank(rank, len(plans))}{data.prefix}"))
                for rank, plan in enumerate(super().prepare_global_plan(plans))
                if (data := plan.storage_data)
            ]

    return Planner, Writer


def each_once(plans: Sequence[SavePlan], *, shards: bool = True) -> list[SavePlan]:
    """Return the plans with each piece only in the first plan that has it; without ``shards``, keep all shards.

    Values that aren't sharded may differ between ranks (the statistics of BatchNorm); the first rank's are saved.
    """
    from torch.distributed.checkpoint.planner import WriteItemType

    seen: set[Any] = set()
    found: list[SavePlan] = []
    for plan in plans:
        items = [item for item in plan.items if item.index not in seen]
        seen.update(item.index for item in items if shards or item.type != WriteItemType.SHARD)
        found.append(replace(plan, items=items))
    return found


def require_whole(metadata: Metadata) -> None:
    """Raise unless the pieces of each tensor are within its bounds, don't overlap, and cover it.

    Raises:
        CheckpointError: the text names the tensors.
    """
    wrong = [
        name
        for name, entry in metadata.state_dict_metadata.items()
        if (chunks := getattr(entry, "chunks", None)) and not _is_filled(getattr(entry, "size", ()), chunks)
    ]
    if wrong:
        raise CheckpointError(f"the ranks' pieces don't fill {', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}")


def _is_filled(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    boxes = [
        (tuple(chunk.offsets), tuple(at + length for at, length in zip(chunk.offsets, chunk.sizes, strict=True)))
        for chunk in chunks
    ]
    if any(not 0 <= low <= high <= limit for box in boxes for low, high, limit in zip(*box, size, strict=True)):
        return False
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        return False
    if len(boxes) == 1:
        return True
    # Sweep along the dimension with the most parts, where the fewest pieces have to be compared.
    along = max(range(len(size)), key=lambda dim: len({low[dim] for low, _ in boxes}))
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for low, high in sorted(boxes, key=lambda box: box[0][along]):
        active = [box for box in active if box[1][along] > low[along]]
        if any(all(a < d and c < b for a, b, c, d in zip(low, high, *box, strict=True)) for box in active):
            return False
        active.append((low, high))
    return True


# ----------------------------------------------------------------- merging the weights of shards into one file

#: The bytes of a checkpoint that a merge holds in memory at once, unless a single tensor is larger.
_CHUNK_BYTES: Final = 1 << 30


def merge_fsdp_weights(
    checkpoint_dir: str | PathLike[str],
    output_path: str | PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> str:
    """Merge the weights of a sharded checkpoint into one file in ``output_path``; return the file's path.

    ``checkpoint_dir`` is a distributed checkpoint of torch, a checkpoint that contains one, or a folder of safetensors
    shards with an index. A folder that can't be merged stays unchanged.

    Raises:
        CheckpointNotFound: it is none of these; the text names subfolders that are.
        CheckpointError: it can't be read, or reading it could run code.
    """
    folder = _shards_in(Path(checkpoint_dir))
    output = Path(output_path)
    name = WeightNames.of(0, safe=safe_serialization).whole
    if is_distributed_checkpoint(folder):
        _merge_distributed(folder, output, safe_serialization)
    else:
        with open_weights(folder) as weights:
            write_weights(partial(atomic_file, output), weights.state_dict(), safe_serialization=safe_serialization)
    if remove_checkpoint_dir:
        _remove(folder, output)
    return str(output / name)


def _merge_distributed(folder: Path, output: Path, safe_serialization: bool) -> None:
    found = read_metadata(folder)
    names = plain_names(found)
    if not names:
        raise CheckpointError(f"{folder} holds no tensors")
    if not safe_serialization:
        state = {names[key]: tensor for key, tensor in read_tensors(folder, found, names).items()}
        write_weights(partial(atomic_file, output), state, safe_serialization=False)
        return
    keys = {name: key for key, name in names.items()}
    shapes = shapes_of(found)
    described = {name: shapes[key] for name, key in keys.items()}
    waiting = [keys[name] for name in file_order(described)]
    ready: dict[str, torch.Tensor] = {}

    def value_of(name: str) -> torch.Tensor:
        if keys[name] not in ready:
            ready.clear()
            ready.update(read_tensors(folder, found, _first_chunk(waiting, shapes)))
        return ready[keys[name]]

    with atomic_file(output, WeightNames.of(0, safe=True).whole) as file:
        write_tensors(file, described, {"format": "pt"}, value_of=value_of)


def _first_chunk(waiting: list[str], shapes: Mapping[str, torch.Tensor]) -> list[str]:
    """Remove from ``waiting``, and return, the first keys whose tensors fit into memory at once."""
    chunk: list[str] = []
    bytes_left = _CHUNK_BYTES
    while waiting and (not chunk or shapes[waiting[0]].nbytes <= bytes_left):
        bytes_left -= shapes[waiting[0]].nbytes
        chunk.append(waiting.pop(0))
    return chunk


def _remove(folder: Path, output: Path) -> None:
    """Remove the folder of shards; raise CheckpointError if it contains the output."""
    if folder.resolve() in (output.resolve(), *output.resolve().parents):
        raise CheckpointError(f"{folder} is not removed: the merged weights lie in it, in {output}")
    shutil.rmtree(folder)


def _shards_in(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointNotFound(f"no folder {folder}")
    for candidate in (folder, folder / f"{FSDP_MODEL_NAME}_0"):
        if is_distributed_checkpoint(candidate):
            return candidate
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return folder
    near = sorted(path.parent.name for path in folder.glob(f"*/{METADATA_NAME}"))
    hint = f" Did you mean one of these in it: {', '.join(near)}?" if near else ""
    raise CheckpointNotFound(
        f"{folder} holds no sharded weights: neither {METADATA_NAME} of a distributed checkpoint nor "
        f"{SAFE_WEIGHTS_INDEX_NAME}.{hint}"
    )
