"""Import path kept for compatibility: Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..lazy import names_from

if TYPE_CHECKING:
    from ..guests.megatron.engine import MegatronEngine, MegatronLMOptimizerWrapper, MegatronLMSchedulerWrapper
    from ..guests.megatron.plugin import (
        MegatronLMDummyDataLoader,
        MegatronLMDummyScheduler,
        add_model_config_to_megatron_parser,
    )
    from ..guests.megatron.steps import (
        AbstractTrainStep,
        BertTrainStep,
        GPTTrainStep,
        T5TrainStep,
        avg_losses_across_data_parallel_group,
        gather_across_data_parallel_groups,
    )

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "T5TrainStep",
    "add_model_config_to_megatron_parser",
    "avg_losses_across_data_parallel_group",
    "gather_across_data_parallel_groups",
]

__getattr__: Callable[[str], Any] = names_from(
    __name__,
    "accelerate.guests.megatron",
    {
        "engine": "MegatronEngine MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper",
        "plugin": "MegatronLMDummyDataLoader MegatronLMDummyScheduler add_model_config_to_megatron_parser",
        "steps": "AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep avg_losses_across_data_parallel_group "
        "gather_across_data_parallel_groups",
    },
)
