"""What stands for data and schedules that Megatron-LM makes from its own arguments."""

from __future__ import annotations

from typing import Any


class MegatronLMDummyDataLoader:
    """Stands for a loader over data in Megatron-LM's own format.

    Args:
        dataset_kwargs: Megatron-LM's arguments about data (``data_path``, ``splits_string``, ``seq_length``, ...),
            which it gets with all others.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args: dict[str, Any] = {**dataset_kwargs, "megatron_dataset_flag": True}


class MegatronLMDummyScheduler:
    """Stands for the schedule that Megatron-LM makes: how long it is, and how long it warms up."""

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs
