"""How loaders share their data among processes."""

from __future__ import annotations

from dataclasses import dataclass

from ..optional import require
from ..settings.data import DataLoaderOptions
from ..settings.option import options_of
from .base import settle


@dataclass
class DataLoaderConfiguration(DataLoaderOptions):
    """How prepared loaders split, complete, order and move their batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        settle(self, *(option.name for option in options_of(DataLoaderOptions)))
        if self.use_stateful_dataloader:
            require("torchdata", purpose="DataLoaderConfiguration(use_stateful_dataloader=True)", at_least="0.8.0")
