"""The options of prepared data loaders."""

from __future__ import annotations

from dataclasses import dataclass

from ..optional import require
from ..settings.training import DataLoaderOptions
from .handlers import canonicalize


@dataclass
class DataLoaderConfiguration(DataLoaderOptions):
    """The options of prepared loaders: how they split, complete, order and move their batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        canonicalize(self)
        if self.use_stateful_dataloader:
            require("torchdata", purpose="DataLoaderConfiguration(use_stateful_dataloader=True)", at_least="0.8.0")
