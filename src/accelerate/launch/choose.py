"""The choice of the launch engine: the first of :data:`ORDER` that suits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..errors import SettingError
from .deepspeed import DeepSpeedLauncher
from .engine import LaunchEngine, count_processes
from .kubernetes import Kubernetes
from .local import LocalProcesses, OneProcess
from .mpi import Mpirun
from .pretended import PretendedRank
from .ray import RayTrain
from .sagemaker import SageMaker
from .slurm import Slurm
from .torchrun import Torchrun
from .tpu import Tpu

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .preflight import Host

#: Options that the local supervisor doesn't support.
_ONLY_TORCHRUN: Final = ("launch.num_machines", "launch.max_restarts", "launch.rdzv_backend", "launch.rdzv_conf")

ORDER: Final[tuple[LaunchEngine, ...]] = (
    PretendedRank(),
    SageMaker(),
    Kubernetes(),
    RayTrain(),
    Slurm(),
    Tpu(),
    DeepSpeedLauncher(),
    Mpirun(),
    Torchrun(),
    LocalProcesses(),
    OneProcess(),
)


def choose(settings: Settings, host: Host) -> LaunchEngine:
    """Return the engine for the given settings: the one that was named, else the first that suits.

    Raises:
        SettingError: the engine that was named can't do what else was asked for.
    """
    if settings.launch.keep_replicas:
        return _keeping_replicas(settings, host)
    if settings.was_given("launch.min_replicas"):
        raise SettingError(
            f"{settings.quote('launch.min_replicas')} is for ranks that go on when others are lost. Give "
            "--keep_replicas N as well, or leave it out."
        )
    named = settings.cluster.launcher
    if named is None or settings.launch.pretend is not None:
        return next(engine for engine in ORDER if engine.suits(settings, host))
    for address in _ONLY_TORCHRUN if named == "local" else ():
        if settings.was_given(address):
            raise SettingError(
                f"{settings.quote('cluster.launcher')} starts processes once, on this machine, which "
                "contradicts "
                f"{settings.quote(address)}. Leave one of them out, or give --launcher torchrun."
            )
    return next(engine for engine in ORDER if engine.name == named)


def _keeping_replicas(settings: Settings, host: Host) -> LaunchEngine:
    """Return the engine that keeps the replicas of a run when one is lost: the local supervisor.

    Raises:
        SettingError: another one is needed for what else was asked for.
    """
    named, launch = settings.cluster.launcher, settings.launch
    chosen = next(engine for engine in ORDER if (engine.name == named if named else engine.suits(settings, host)))
    is_here = launch.num_machines == 1 and launch.rdzv_backend == "static" and not launch.rdzv_conf
    if not named and chosen.name == Torchrun.name and is_here and count_processes(settings, host) > 1:
        chosen = next(engine for engine in ORDER if engine.name == LocalProcesses.name)  # which starts it again, too
    if chosen.name == LocalProcesses.name and launch.min_replicas > count_processes(settings, host):
        raise SettingError(
            f"{settings.quote('launch.min_replicas')} is more than the {count_processes(settings, host)} processes of "
            "this launch, so too few would live from the start. Give at most as many."
        )
    if chosen.name != LocalProcesses.name:
        raise SettingError(
            f"{settings.quote('launch.keep_replicas')} keeps several processes of one machine, which --launcher local "
            f"starts, but these settings start {chosen.name!r}. Give --num_processes of at least 2 on one machine, "
            "without a rendezvous, or leave --keep_replicas out."
        )
    return chosen
