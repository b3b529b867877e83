"""The same bits on any number of ranks: an update's global batch is computed in parts of one shape. Internal.

- `options`: the option, its flag and variable.
- `fixed_order`: the order of sums: one binary tree over the parts, and norms that don't depend on sharding.
- `exchange`: gradients are summed in the order of the tree between ranks.
- `loaders`: which batches are which parts.
- `statistics`: running statistics of BatchNorm, in the order of the parts.
- `hashes`: one hash of all that training has changed, and the file of such hashes, one each n updates.
- `parts`: the random streams of a part, and what begins and ends with a part or an update.
- `replicas`, `sharded`: the strategies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ...seams import Candidate, Guest, LoopHook

if TYPE_CHECKING:
    from ...accelerator import Accelerator
    from ...distributed.world import World
    from ...settings.run import Settings
    from .parts import Parts


def _has_parts(settings: Settings) -> bool:
    from .options import BatchPartsOptions

    asked = settings.find(BatchPartsOptions)
    return asked is not None and asked.batch_parts is not None


def _shards(settings: Settings, world: World) -> bool:
    is_version_2 = settings.fsdp is not None and settings.fsdp.fsdp_version == 2
    return _has_parts(settings) and world.backend is not None and is_version_2


def _splits_layers(settings: Settings, world: World) -> bool:
    return _shards(settings, world) and settings.parallelism is not None and settings.parallelism.pp_size > 1


GUEST: Final = Guest(
    strategies=(
        Candidate(f"{__name__}.sharded", "PartStages", _splits_layers, is_instead_of_others=True),
        Candidate(f"{__name__}.sharded", "PartShards", _shards, is_instead_of_others=True),
        Candidate(
            f"{__name__}.replicas",
            "PartReplicas",
            lambda settings, world: _has_parts(settings),
            is_instead_of_others=True,
        ),
    ),
    runs=(f"{__name__}:attach", f"{__name__}:attach_log"),
    functions={"fingerprint": f"{__name__}:fingerprint"},
    settings=f"{__name__}.options:GROUPS",
)


def fingerprint(run: Accelerator) -> str:
    """Return the fingerprint of ``run``; see :mod:`.hashes`."""
    from .hashes import fingerprint

    parts = getattr(run.strategy, "parts", None)
    return fingerprint(run, None if parts is None else parts.shared_streams)


def attach(run: Accelerator, asked: object) -> LoopHook | None:
    """Return the hook at which parts begin and end; None if ``run`` has no parts."""
    if not _has_parts(run.settings):
        return None
    strategy: Any = run.strategy  # each one that is chosen for such settings has parts
    parts: Parts = strategy.parts
    parts.attach(run)
    return parts


def attach_log(run: Accelerator, asked: object) -> LoopHook | None:
    """Return the hook that writes the fingerprints of ``run``; None if they aren't asked for."""
    from .options import FingerprintOptions

    options = run.settings.find(FingerprintOptions)
    if options is None or options.fingerprint_every is None:
        return None
    from .hashes import FingerprintLog

    return FingerprintLog(run, options.fingerprint_every)
