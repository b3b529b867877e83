"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..guests.megatron.engine import MegatronEngine as MegatronEngine
from ..guests.megatron.engine import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
from ..guests.megatron.engine import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
from ..guests.megatron.plugin import add_model_config_to_megatron_parser as add_model_config_to_megatron_parser
from ..guests.megatron.plugin import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from ..guests.megatron.plugin import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from ..guests.megatron.engine import AbstractTrainStep as AbstractTrainStep
from ..guests.megatron.engine import avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group
from ..guests.megatron.engine import BertTrainStep as BertTrainStep
from ..guests.megatron.engine import gather_across_data_parallel_groups as gather_across_data_parallel_groups
from ..guests.megatron.engine import GPTTrainStep as GPTTrainStep, T5TrainStep as T5TrainStep
