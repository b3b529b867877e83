"""Old address: Megatron-LM."""

from __future__ import annotations

from ..plugins.megatron_data import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from ..plugins.megatron_models import add_model_config_to_megatron_parser
from ..strategies.megatron_engine import MegatronEngine, MegatronLMOptimizerWrapper, MegatronLMSchedulerWrapper
from ..strategies.megatron_steps import (
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
