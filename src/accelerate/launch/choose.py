"""Which engine starts a run: the first of :data:`ORDER` that suits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..errors import NotBuilt
from .engine import LaunchEngine, is_cpu_run
from .local import LocalProcesses
from .simple import OneProcess
from .torchrun import Torchrun

if TYPE_CHECKING:
    from ..settings.tree import Settings
    from .host import Host

ORDER: Final[tuple[LaunchEngine, ...]] = (Torchrun(), LocalProcesses(), OneProcess())


def choose(settings: Settings, host: Host) -> LaunchEngine:
    """The engine for what the user asked for.

    Raises:
        NotBuilt: what was asked for needs an engine that this version doesn't have.
    """
    refuse_unbuilt_engines(settings)
    return next(engine for engine in ORDER if engine.suits(settings, host))


def refuse_unbuilt_engines(settings: Settings) -> None:
    """Returns when the run can be started by one of :data:`ORDER`."""
    launch = settings.launch
    if launch.compute_environment == "AMAZON_SAGEMAKER":
        missing, instead = "SageMaker jobs", "start the script inside the job with this command"
    elif launch.use_tpu or launch.distributed_type in ("TPU", "XLA"):
        missing, instead = "TPU machines", "use --cpu or GPUs"
    elif settings.mpi.mpirun_hostfile is not None and is_cpu_run(settings):
        missing, instead = (
            "mpirun",
            "run `mpirun ... python script.py`, which joins its ranks without a launcher",
        )
    elif launch.num_machines > 1 and settings.deepspeed_launch.deepspeed_multinode_launcher not in (
        None,
        "standard",
    ):
        missing, instead = (
            "DeepSpeed's own multi-node launchers",
            "use --deepspeed_multinode_launcher standard",
        )
    else:
        return
    raise NotBuilt(f"Launching on {missing} isn't built yet in this version; {instead}.")
