"""The layouts of a script's runs: the number of processes, and how they share a batch and the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from .record import Record
from .runs import VerificationError


@final
@dataclass(frozen=True)
class Layout:
    """One way to run a script.

    Attributes:
        ranks: the number of processes.
        flags: of `accelerate launch`.
        mesh: the size of each axis of parallelism that isn't 1.
        precision: the mixed precision, of the reference too; "" leaves it out.
        num_parts: how many micro-batches each batch becomes.
        recomputes: computes activations again in the backward pass.
        resumes: how often the run is stopped and resumed.
        resumed_ranks: the number of processes of the resumed runs; 0: as before.
        is_exact: with parts of a batch, it computes the bits of one process.
        needs: returns why a script with this reference can't be run so; "" if it can.
    """

    name: str
    text: str
    ranks: int = 1
    flags: tuple[str, ...] = ()
    mesh: tuple[tuple[str, int], ...] = ()
    precision: str = ""
    num_parts: int = 1
    recomputes: bool = False
    resumes: int = 0
    resumed_ranks: int = 0
    is_exact: bool = False
    needs: Callable[[Record], str] = lambda reference: ""

    @property
    def num_shares(self) -> int:
        """The number of shares of the data."""
        return self.ranks // math.prod(size for axis, size in self.mesh if axis in ("tp", "cp", "pp"))


def _accelerated(reference: Record) -> str:
    return "" if "Accelerator" in reference.uses else "the script doesn't use the Accelerator"


def accumulating(reference: Record) -> str:
    """Return why a script's batches can't be divided into micro-batches; "" if they can."""
    if not {"accumulate", "Trainer"} & set(reference.uses):
        return "the script doesn't call accelerator.accumulate()"
    if "batch sampler" in reference.uses:
        return "the script's own batch sampler makes its batches, which can't be cut into micro-batches"
    return _accelerated(reference)


def _resumable(reference: Record) -> str:
    if "Trainer" in reference.uses:
        return "a Trainer saves its checkpoints itself, not by accelerator.save_state()"
    return _accelerated(reference)


def _using(name: str, why: str) -> Callable[[Record], str]:
    return lambda reference: _accelerated(reference) or ("" if name in reference.uses else why)


_with_tensor_plan = _using("tensor plan", "neither the script nor the model has a plan of tensor parallelism")
_with_expert_plan = _using("expert plan", "the script has no plan of expert parallelism")
_with_context = _using("context", "the script doesn't call accelerator.maybe_context_parallel()")
_with_pipeline = _using("pipeline", "the script doesn't call accelerator.pipeline_step()")


_FSDP: Final = ("--use_fsdp", "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP", "--fsdp_min_num_params", "1")
_FSDP2: Final = (*_FSDP, "--fsdp_version", "2")
_COPIES: Final = (("dp_replicate", 2), ("dp_shard", 2))
_SPLIT: Final = (("dp_shard", 2), ("tp", 2))

#: In the order of the report.
LAYOUTS: Final = (
    Layout("ranks2", "2 processes that share each batch", 2, is_exact=True),
    Layout("ranks4", "4 processes that share each batch", 4, is_exact=True),
    Layout("parts2", "each batch in 2 micro-batches", num_parts=2, needs=accumulating),
    Layout("parts4", "each batch in 4 micro-batches", num_parts=4, needs=accumulating),
    Layout("ranks2_parts2", "2 processes, each batch in 2 micro-batches", 2, num_parts=2, needs=accumulating),
    Layout("fsdp2", "2 processes, sharded by FSDP 2", 2, _FSDP2, is_exact=True, needs=_accelerated),
    Layout("hsdp", "4 processes: 2 copies, each sharded over 2", 4, _FSDP2, _COPIES, is_exact=True, needs=_accelerated),
    Layout("fsdp1", "2 processes, sharded by FSDP 1", 2, (*_FSDP, "--fsdp_version", "1"), needs=_accelerated),
    Layout("tp2", "2 processes, matrices split by the plan", 2, mesh=(("tp", 2),), needs=_with_tensor_plan),
    Layout(
        "tp2_fsdp2", "4 processes: matrices split over 2, sharded over 2", 4, _FSDP2, _SPLIT, needs=_with_tensor_plan
    ),
    Layout("cp2", "2 processes, sequences split", 2, _FSDP2, (("cp", 2),), needs=_with_context),
    Layout("ep2", "2 processes, experts split", 2, _FSDP2, (("ep", 2),), needs=_with_expert_plan),
    Layout("pp2", "2 processes, layers split into stages", 2, mesh=(("pp", 2),), needs=_with_pipeline),
    Layout("bf16", "2 processes in bfloat16", 2, precision="bf16", needs=_accelerated),
    Layout("fsdp2_bf16", "2 processes in bfloat16, sharded", 2, _FSDP2, precision="bf16", needs=_accelerated),
    Layout("recompute", "activations computed again", recomputes=True, needs=_accelerated),
    Layout("compile", "torch.compile", flags=("--dynamo_backend", "aot_eager"), needs=_accelerated),
    Layout("resume", "stopped and resumed, twice", resumes=2, is_exact=True, needs=_resumable),
    Layout(
        "resume_ranks",
        "stopped on 2 processes, resumed on 1",
        2,
        resumes=1,
        resumed_ranks=1,
        is_exact=True,
        needs=_resumable,
    ),
)


def chosen(names: str | None, *, same_bits: bool = False) -> tuple[Layout, ...]:
    """Return the layouts with these names, separated by commas; None means all.

    Args:
        same_bits: know only those that compute the bits of one process.

    Raises:
        VerificationError: a layout has no such name, or none is named.
    """
    known = {layout.name: layout for layout in LAYOUTS if layout.is_exact or not same_bits}
    if names is None:
        return tuple(known.values())
    asked = names.replace(",", " ").split()
    wrong = ", ".join(name for name in asked if name not in known)
    if wrong or not asked:
        kind = "layout of --same_bits" if same_bits else "layout"
        why = f"{wrong}: no such {kind}" if wrong else f"{names!r} names no {kind}"
        raise VerificationError(f"--layouts {why}. Choose among {', '.join(known)}.")
    return tuple(known[name] for name in asked)
