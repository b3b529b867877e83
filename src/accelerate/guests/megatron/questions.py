"""The questions of ``accelerate config`` about Megatron-LM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import MegatronOptions

if TYPE_CHECKING:
    from ...commands.config.questions import Questionnaire


def ask(questions: Questionnaire, machine: str) -> bool:
    """Ask whether Megatron-LM is used on this type of ``machine``, and for its options; return whether it is."""
    if not (questions.advanced and machine == "MULTI_GPU" and questions.uses("MEGATRON_LM")):
        return False
    degrees = questions.several(MegatronOptions, ("tp_degree",))
    if degrees["tp_degree"] > 1:
        questions.one(MegatronOptions, "sequence_parallelism", default=True)
    if int(questions.one(MegatronOptions, "pp_degree")) > 1:
        questions.one(MegatronOptions, "num_micro_batches")
    for name, default in (
        ("recompute_activations", True),
        ("use_distributed_optimizer", True),
        ("gradient_clipping", 1.0),
    ):
        questions.one(MegatronOptions, name, default=default)
    return True
