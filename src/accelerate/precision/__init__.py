"""Precisions: the dtypes in which a model computes. One file per kind; :func:`choose` picks one."""

from __future__ import annotations

from .base import Precision as Precision
from .choose import choose as choose
from .choose import scaler_of_shards as scaler_of_shards
