"""Import path kept for compatibility: commands and environments of a launch."""

from __future__ import annotations

from ..launch.prepared import (
    PrepareForLaunch,
    _filter_args,
    env_var_path_add,
    prepare_deepspeed_cmd_env,
    prepare_extend_env_parallelism_config,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
    setup_fp8_env,
)
from ..launch.prepared import convert_nargs_to_dict as _convert_nargs_to_dict

__all__ = [
    "PrepareForLaunch",
    "_convert_nargs_to_dict",
    "_filter_args",
    "env_var_path_add",
    "prepare_deepspeed_cmd_env",
    "prepare_extend_env_parallelism_config",
    "prepare_multi_gpu_env",
    "prepare_sagemager_args_inputs",
    "prepare_simple_launcher_cmd_env",
    "prepare_tpu",
    "setup_fp8_env",
]
