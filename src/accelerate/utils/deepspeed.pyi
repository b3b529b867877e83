"""The names of this address, for editors, type checkers and `names_of_stub`: where each is defined."""

# isort: off
from ..guests.deepspeed.engine import DeepSpeedEngineWrapper as DeepSpeedEngineWrapper
from ..guests.deepspeed.engine import DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper
from ..guests.deepspeed.engine import DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper
from ..guests.deepspeed.engine import GatheredParameters as GatheredParameters
from ..guests.deepspeed.engine import map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed
from ..guests.deepspeed.plugin import DummyOptim as DummyOptim, DummyScheduler as DummyScheduler
from ..guests.deepspeed.plugin import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from ..guests.deepspeed.plugin import HfDeepSpeedConfig as HfDeepSpeedConfig
