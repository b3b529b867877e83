"""Import path kept for compatibility: the questions about one's own machines."""

from __future__ import annotations

from .config_args import ClusterConfig
from .interview import get_cluster_input

__all__ = ["ClusterConfig", "get_cluster_input"]
