"""The options of prepared data loaders."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SettingError
from ..optional import require
from ..settings.training import DataLoaderOptions
from .handlers import canonicalize


@dataclass(repr=False, eq=False)
class DataLoaderConfiguration(DataLoaderOptions):
    """The options of prepared loaders: how they form, split, pad, order and move batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        canonicalize(self)
        if self.use_stateful_dataloader:
            require("torchdata", purpose="DataLoaderConfiguration(use_stateful_dataloader=True)", at_least="0.8.0")
        if self.token_budget is None and (self.length_of is not None or self.packed):
            raise SettingError(
                "DataLoaderConfiguration(length_of=..., packed=...) say what fills a batch of token_budget tokens, and "
                "token_budget isn't given. Give it, or leave them out."
            )
        if self.token_budget is not None and self.length_of is None:
            raise SettingError(
                f"DataLoaderConfiguration(token_budget={self.token_budget}) needs the lengths of the samples: give "
                "length_of, a function of a sample, the lengths of all samples or the name of a column of them."
            )
