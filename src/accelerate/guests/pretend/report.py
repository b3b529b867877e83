"""The report of one simulated rank, as text: with settings that can't work, and the files of a checkpoint."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final
from unittest.mock import patch

import torch

from ...checkpointing import codec
from ...checkpointing.agreement import Ranks
from ...checkpointing.dcp import ShardsItem
from ...checkpointing.items import CheckpointItem, RunItems
from ...checkpointing.layout import MAX_RANKS, folder_of_rank
from ...checkpointing.manifest import format_bytes
from ...checkpointing.store import StagingDirectory
from ...checkpointing.weights import EVERYTHING
from ...distributed.mesh import SHARD_AXES, Mesh
from ...distributed.world import World, current_world
from ...modules import is_sharded
from ...torch_private.tracing import fake_tensor_class, local_part
from .communication import Traffic, hosts_of
from .records import LoaderShare, num_bytes_of

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from .run import PretendedRun

_NUM_FILES: Final = 12
_NUM_POSITIONS: Final = 8


@final
@dataclass(frozen=True)
class Share:
    """A number of bytes held by this rank, and the model's total."""

    name: str
    num_bytes: int
    total: int | None = None


@final
@dataclass(frozen=True)
class Report:
    """The report of one rank: its share of the job in the simulated steps."""

    world: World
    mesh: Mesh | None
    steps: int
    strategy: str = ""
    shares: list[Share] = field(default_factory=list)
    loaders: list[LoaderShare] = field(default_factory=list)
    preparation: list[Traffic] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    files: list[WrittenFile] = field(default_factory=list)
    saves: list[str] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the report as readable lines."""
        parts = [_heading(self), *_coordinates(self.mesh), "", *_memory(self), *_loaders(self.loaders)]
        parts += _traffic("Collectives of prepare", self.preparation)
        parts += _traffic("Collectives of a step" + (f" (of {self.steps})" if self.steps > 1 else ""), self.traffic)
        parts += _files(self.files, self.saves, has_manifest=self.world.is_main)
        if self.contradictions:
            parts += ["", "Found at this size"] + [f"  {line}" for line in self.contradictions]
        return "\n".join(parts)


def report_of(run: PretendedRun) -> Report:
    """Return the report of a run; it asks the Accelerator for the contents of a checkpoint."""
    world = current_world()
    if not run.accelerators or world is None:
        return Report(world or World(), None, run.steps, contradictions=["The script prepared nothing."])
    accelerator = run.accelerators[0]
    mesh = _effective_mesh(accelerator)
    shares = _shares(run)
    loaders = [run.samples.share_of(loader) for one in run.accelerators for loader in one._dataloaders]
    files = [file for one in run.accelerators for file in files_of_checkpoint(one, mesh)]
    return Report(
        world,
        mesh,
        run.steps,
        type(accelerator.strategy).__name__,
        shares,
        loaders,
        run.preparation.traffic(mesh),
        run.collectives.traffic(mesh, max(run.steps, 1)),
        files,
        run.saves,
        [*find_contradictions(accelerator, mesh, loaders), *map(_uncounted, sorted(run.uncounted))],
    )


def _uncounted(name: str) -> str:
    return (
        f"{name} draws as many random numbers as the values of the model ask for, which aren't there: what is drawn "
        "afterwards, such as the order of an epoch, may be another one in a real run."
    )


def _shares(run: PretendedRun) -> list[Share]:
    models = [model for one in run.accelerators for model in one._models]
    parameters = [each for model in models for each in model.parameters()]
    found, memory = run.memory.tracker.num_bytes, run.memory
    trained = [each for each in parameters if each.requires_grad]
    return [
        Share("parameters", num_bytes_of(parameters), _whole(parameters)),
        Share("gradients", num_bytes_of(trained), _whole(trained)),
        Share("optimizer state", found["optimizer"]),
        Share("gathered weights and buffers of collectives, at most", memory.peak_gathered),
        Share("activations, at most", memory.peak_activations),
        Share("all together in a step, at most", memory.peak_total),
        Share("all together until the end of prepare, at most", memory.peak_of_preparation),
    ]


def _whole(tensors: Sequence[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in {id(each): each for each in tensors}.values())


def _effective_mesh(accelerator: Accelerator) -> Mesh:
    """Return the run's mesh; if FSDP shards over all ranks without configured sizes, a mesh with that axis."""
    mesh, size = accelerator.mesh, accelerator.mesh.world.size
    shards = any(is_sharded(each) for model in accelerator._models for each in model.parameters())
    return Mesh.of(mesh.world, None, dp_shard=size) if shards and mesh.size("dp_replicate") == size else mesh


# -- text --------------------------------------------------------------------------------------------------


def _heading(report: Report) -> str:
    world = report.world
    host = f"local rank {world.local_rank} of {world.local_size} on host {hosts_of(world, [world.rank])[0]}"
    done = f"{report.steps} step{'' if report.steps == 1 else 's'}"
    strategy = f", {report.strategy}" if report.strategy else ""
    return f"Rank {world.rank} of {world.size} ({host}){strategy}: {done}, simulated alone"


def _coordinates(mesh: Mesh | None) -> list[str]:
    if mesh is None:
        return []
    lines = ["", "Coordinates"]
    for axis in mesh.active():
        ranks = mesh.ranks(axis)
        hosts = len(hosts_of(mesh.world, ranks))
        with_whom = f"ranks {_shown([*ranks])}, on {hosts} host{'' if hosts == 1 else 's'}"
        lines.append(f"  {axis:<14}{mesh.place(axis):>6} of {mesh.size(axis):<6}  {with_whom}")
    return lines


def _shown(numbers: list[object]) -> str:
    if len(numbers) <= _NUM_POSITIONS:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:3]))}, ..., {numbers[-1]}"


def _memory(report: Report) -> list[str]:
    lines = ["Memory"]
    for share in report.shares:
        whole = "" if share.total is None else f" of {format_bytes(share.total)}"
        lines.append(f"  {share.name:<54}{format_bytes(share.num_bytes):>10}{whole}")
    return lines


def _loaders(loaders: list[LoaderShare]) -> list[str]:
    lines: list[str] = []
    for number, loader in enumerate(loaders):
        lines += ["", f"Samples of loader {number}"]
        for place, batch in enumerate(loader.positions or ()):
            lines.append(
                f"  batch {place}: {_shown(batch)}" + (f" ({len(batch)})" if len(batch) > _NUM_POSITIONS else "")
            )
        if loader.positions is None:
            lines.append(
                "  read by rank 0, which sends this rank its part" if loader.is_received else "  not read by index"
            )
        batches = "an unknown number of batches" if loader.num_batches is None else f"{loader.num_batches} batches"
        samples = "" if loader.num_samples is None else f", of {loader.num_samples} samples of all ranks"
        step = "" if loader.global_batch is None else f"; {loader.global_batch} samples a step"
        lines.append(f"  an epoch is {batches} here{samples}{step}")
    return lines


def _traffic(title: str, traffic: list[Traffic]) -> list[str]:
    if not traffic:
        return []
    lines = ["", title]
    for each in traffic:
        axes = " x ".join(each.axes) or "all ranks"
        hosts = each.num_hosts
        where = f"{each.num_ranks} ranks on {hosts} host{'' if hosts == 1 else 's'}"
        count = f"{each.count:g}" if each.count >= 1 or each.count == 0 else f"{each.count:.2f}"
        lines.append(f"  {axes:<32}{each.name:<16}{count:>6} x  {format_bytes(each.num_bytes):>10}  ({where})")
    return lines


def _files(files: list[WrittenFile], saves: list[str], *, has_manifest: bool) -> list[str]:
    lines = ["", "Files of save_state that this rank writes" + (", beside the manifest" if has_manifest else "")]
    for file in files[:_NUM_FILES]:
        part = f", with the other {file.num_replicas - 1} replicas" if file.num_replicas > 1 else ""
        lines.append(f"  {file.name:<54}{format_bytes(file.num_bytes):>10}{part}")
    if len(files) > _NUM_FILES:
        rest = sum(file.num_bytes for file in files[_NUM_FILES:])
        lines.append(f"  and {len(files) - _NUM_FILES} more, {format_bytes(rest)}")
    if not files:
        lines.append("  none")
    if saves:
        lines.append(f"  not done, though the script called {', '.join(saves)}")
    return lines


# --------------------------------------------------------------------------------------------------
# Settings that can't work at the size of a job, but do on a few ranks

#: Axes whose ranks communicate within each layer, for which only the links of one host are fast enough.
_WITHIN_A_HOST: Final = ("sp", "tp")


def find_contradictions(accelerator: Accelerator, mesh: Mesh, loaders: Sequence[LoaderShare]) -> list[str]:
    """Return one text for each setting that can't work at this size: the setting, the reason, and the remedy."""
    return [
        *_hosts(mesh),
        *_empty_shards(accelerator, mesh),
        *(text for number, loader in enumerate(loaders) for text in _data(number, loader)),
    ]


def _hosts(mesh: Mesh) -> list[str]:
    local, found = mesh.world.local_size, list[str]()
    for axis in mesh.active(*_WITHIN_A_HOST):
        hosts = hosts_of(mesh.world, mesh.ranks(axis))
        if len(hosts) > 1:
            found.append(
                f"{axis}_size={mesh.size(axis)}: the group of this rank lies on {len(hosts)} hosts of {local} "
                f"processes ({hosts[0]} to {hosts[-1]}), and communicates within each layer. Give a size that "
                f"divides {local}."
            )
    return found


def _empty_shards(accelerator: Accelerator, mesh: Mesh) -> list[str]:
    found: list[str] = []
    for model in accelerator._models:
        parameters = dict(model.named_parameters())
        empty = [name for name, each in parameters.items() if each.numel() and not _local(each).numel()]
        if empty:
            first = parameters[empty[0]]
            ranks = mesh.size(*SHARD_AXES)
            found.append(
                f"{len(empty)} of {len(parameters)} parameters have no shard on this rank: {empty[0]} has "
                f"{first.shape[0]} rows for the {ranks} ranks that shard it. This rank takes part in their "
                "collectives, and holds nothing of them. Give a smaller dp_shard_size, and replicate "
                "(dp_replicate_size)."
            )
    return found


def _local(parameter: torch.Tensor) -> torch.Tensor:
    part = local_part(parameter)
    assert isinstance(part, torch.Tensor)
    return part


def _data(number: int, loader: LoaderShare) -> list[str]:
    found: list[str] = []
    if loader.num_batches == 0:
        found.append(
            f"Loader {number}: this rank reads no sample in an epoch: there are {loader.num_samples}, and a step "
            f"of all ranks takes {loader.global_batch}. Give more data, a smaller batch_size, or fewer "
            "data-parallel ranks."
        )
    elif loader.num_samples is not None and loader.global_batch and loader.num_samples < loader.global_batch:
        found.append(
            f"Loader {number}: a step of all ranks takes {loader.global_batch} samples, and there are "
            f"{loader.num_samples}: every epoch is one step, in which samples are read several times. Give more data, "
            "a smaller batch_size, or fewer data-parallel ranks."
        )
    return found


# --------------------------------------------------------------------------------------------------
# The checkpoint files that a rank would write, computed without writing them


@final
@dataclass(frozen=True)
class WrittenFile:
    """A file that this rank writes.

    Attributes:
        num_replicas: the number of ranks with the same values; each writes a part, and the bytes are those of all
            parts.
    """

    name: str
    num_bytes: int
    num_replicas: int = 1


@final
class _CountingFile:
    """A file that only counts the bytes written to it."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Count the bytes."""
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size

    def flush(self) -> None:
        """Do nothing."""


def _bytes_of(item: ShardsItem, world: World) -> int:
    """Return the bytes of this rank's pieces in torch's format; rank 0 writes the values that aren't sharded."""
    from torch.distributed.checkpoint.planner import WriteItemType

    file = _CountingFile()
    for piece, value in item.planned():
        if piece.type != WriteItemType.SHARD and not world.is_main:
            continue
        if isinstance(value, torch.Tensor):
            _save(torch.empty(value.shape, dtype=value.dtype), file)
        else:
            file.write(value.getbuffer())
    return file.num_bytes


def _save(tensor: torch.Tensor, file: _CountingFile) -> None:
    checked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the checksum would read every byte
    try:
        torch.serialization.save(tensor, file)  # pyright: ignore[reportArgumentType]
    finally:
        torch.serialization.set_crc32_options(checked)


def files_of_checkpoint(accelerator: Accelerator, mesh: Mesh) -> list[WrittenFile]:
    """Return the files that ``save_state`` would write on this rank, without those of hooks."""
    run = accelerator._run_state
    world = accelerator.world
    parts = run.strategy.checkpoint_state(run.models, run.optimizers)
    items = RunItems(run, parts, EVERYTHING)
    is_writer = world.is_main or (run.project.save_on_each_node and world.is_local_main)
    found: list[WrittenFile] = []

    @contextmanager
    def create(name: str, *, pickle: bool = False) -> Iterator[Any]:
        del pickle
        file = _CountingFile()
        yield file
        found.append(WrittenFile(name, file.num_bytes))

    plain = (*codec.plain_tensors, fake_tensor_class())
    with (
        patch.object(codec, "plain_tensors", plain),
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # of torch 2.6; it is 0 there too
        staging = StagingDirectory(Path(folder), is_writer, Ranks(world))
        later = parts.write(staging) if parts.write is not None else None
        written: list[CheckpointItem] = list(later) if later is not None and not callable(later) else []
        if is_writer:
            written += [*items.of_weights(items.weights()), *items.shared()]
        written += items.of_rank(world.rank, [])
        replicas = 1 if world.size > MAX_RANKS else mesh.size("dp_replicate")  # of many, each plans its own part
        for item in written:
            if isinstance(item, ShardsItem):
                place = f"{item.folder.relative_to(folder).as_posix()}/{folder_of_rank(world.rank, world.size)}"
                found.append(WrittenFile(f"{place}__{world.rank}_0.distcp", _bytes_of(item, world), replicas))
            else:
                item.write(create)
    return found
