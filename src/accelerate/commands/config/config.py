"""Import path kept for compatibility: the command ``accelerate config`` and what it asks."""

from __future__ import annotations

from . import config_command, config_command_parser, main
from .config_args import cache_dir, default_config_file, default_yaml_config_file, load_config_from_file
from .interview import get_cluster_input, get_sagemaker_input, get_user_input

__all__ = [
    "cache_dir",
    "config_command",
    "config_command_parser",
    "default_config_file",
    "default_yaml_config_file",
    "get_cluster_input",
    "get_sagemaker_input",
    "get_user_input",
    "load_config_from_file",
    "main",
]
