"""Launch engines of clusters: job scripts, and other programs that start the processes.

- `slurm`, `kubernetes`, `sagemaker`: a job is written and handed in.
- `mpi`, `ray`: mpirun or Ray Train starts the processes.
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
