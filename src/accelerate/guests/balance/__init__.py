"""Ranks of different speeds: a slower rank reads fewer samples of each global batch. Internal.

- `clock`: the time that a rank computes per sample.
- `sizes`: the sizes of the ranks' micro-batches, from these times.
- `loop`: when ranks measure and agree, and how gradients are weighted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...errors import SettingError
from ...seams import Guest, LoopHook

if TYPE_CHECKING:
    from ...accelerator import Accelerator

GUEST: Final = Guest(runs=(f"{__name__}:attach",))


def attach(run: Accelerator, asked: object) -> LoopHook | None:
    """Return the hook that balances the loaders of ``run``; None if nobody asks for it, or one rank reads all data.

    Raises:
        SettingError: another option decides what each rank reads, or a rank's own time can't be measured.
    """
    if not asked or run.mesh.data_share().count == 1:
        return None
    for option, reason in _contradictions(run).items():
        if reason:
            raise SettingError(
                f"balance=True (DataLoaderConfiguration or --balance) with {option}: {reason}. Leave one of them out."
            )
    from .loop import Balance

    return Balance(run)


def _contradictions(run: Accelerator) -> dict[str, object]:
    """Return by option why it can't be used with balance; the reason is false if the option isn't in use."""
    config, settings, mesh = run.dataloader_config, run.settings, run.mesh
    is_compiled = settings.compile.backend not in (None, "NO")
    lockstep = "its ranks wait for each other inside the model, so none knows its own speed"
    return {
        "batch_parts": getattr(getattr(settings, "batch_parts", None), "batch_parts", None)
        and "a rank's part of an update is fixed",
        "--keep_replicas": run.world.members is not None and "ranks read as many samples as they have time for already",
        "dispatch_batches=True": config.dispatch_batches and "rank 0 reads equal batches for all ranks",
        "token_budget": config.token_budget is not None and "batches are filled by tokens for all ranks alike",
        "even_batches=False": not config.even_batches and "the last ranks may have no batch at the end of an epoch",
        "already_sharded=True": config.already_sharded and "each rank has samples of its own, whatever its speed",
        f"the engine {settings.engine}": settings.engine and "it weights all ranks equally",
        f"devices of {run.world.kind.name}": run.world.kind.runtime
        and "one program computes equal shapes on all ranks",
        "FSDP version 1": settings.fsdp is not None and settings.fsdp.fsdp_version == 1 and lockstep,
        "FSDP and torch.compile": settings.fsdp is not None and is_compiled and lockstep,
        "pipeline parallelism": mesh.size("pp") > 1 and "forward and backward are one call, whose stages wait",
        "expert parallelism": mesh.size("ep") > 1 and lockstep,
    }
