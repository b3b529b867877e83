"""Launch engines for clusters: job scripts, and other programs that start the processes.

- `slurm`, `kubernetes`, `sagemaker`: write a job and submit it.
- `mpi`, `ray`: let mpirun or Ray Train start the processes.
"""

from __future__ import annotations

from typing import Final

from ...seams import Guest

GUEST: Final = Guest(
    engines=(
        f"{__name__}.sagemaker:SageMaker",
        f"{__name__}.kubernetes:Kubernetes",
        f"{__name__}.ray:RayTrain",
        f"{__name__}.slurm:Slurm",
        f"{__name__}.mpi:Mpirun",
    )
)
