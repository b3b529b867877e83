"""The report of one simulated rank, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

import torch

from ...checkpointing.manifest import format_bytes
from ...distributed.mesh import Mesh
from ...distributed.world import World, current_world
from ...modules import is_sharded
from .communication import Traffic
from .contradictions import find_contradictions
from .files import WrittenFile, files_of_checkpoint
from .memory import num_bytes_of
from .samples import LoaderShare

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
    host = f"local rank {world.local_rank} of {world.local_size} on host {world.rank // max(world.local_size, 1)}"
    done = f"{report.steps} step{'' if report.steps == 1 else 's'}"
    strategy = f", {report.strategy}" if report.strategy else ""
    return f"Rank {world.rank} of {world.size} ({host}){strategy}: {done}, simulated alone"


def _coordinates(mesh: Mesh | None) -> list[str]:
    if mesh is None:
        return []
    lines = ["", "Coordinates"]
    for axis in mesh.active():
        ranks, local = mesh.ranks(axis), max(mesh.world.local_size, 1)
        hosts = len({rank // local for rank in ranks})
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
