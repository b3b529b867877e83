"""How the layers of a model are dealt to the stages of a pipeline, and in which order stages work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import SettingError
from ..settings.option import OptionGroup, option

SCHEDULES = ("1f1b", "gpipe", "interleaved")


@dataclass
class PipelineParallelConfig(OptionGroup, title="Parallelism"):
    """How pipeline parallelism splits a model and a batch.

    Args:
        schedule: ``"1f1b"`` (a stage keeps as many activations as there are stages), ``"gpipe"`` (all forwards, then
            all backwards) or ``"interleaved"`` (several stages per rank: shorter waits, more messages).
        num_micro_batches: into how many parts a batch is cut; by default as many as there are stages. A batch that
            doesn't divide is cut into fewer.
        split_points: names of the modules at which a new stage begins; by default stages of about equal parameters.
        stages_per_rank: how many stages each rank has; by default 2 when interleaved, else 1.
        example_inputs: the model's positional inputs for one micro-batch, for a model whose forward looks at values:
            it is traced with them (by torch.export), and its batches have this shape.
        reshard_between_parts: with ``dp_shard_size``, parameters are gathered for each part of a batch, as the FSDP
            plugin says, instead of once for all: less memory, more traffic.
    """

    schedule: str = option("1f1b", "In which order stages work.", choices=SCHEDULES)
    num_micro_batches: int | None = option(None, "Into how many parts a batch is cut.", minimum=1)
    split_points: Any = option(None, "At which modules a new stage begins.", kind="object")
    stages_per_rank: int | None = option(None, "How many stages each rank has.", minimum=1)
    example_inputs: Any = option(None, "The model's inputs for one micro-batch.", kind="object")
    reshard_between_parts: bool = option(False, "Shards are gathered for each part of a batch.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule not in SCHEDULES:
            raise SettingError(
                f"PipelineParallelConfig(schedule={self.schedule!r}): choose one of {', '.join(map(repr, SCHEDULES))}."
            )
        if self.stages_per_rank is None:
            self.stages_per_rank = 2 if self.schedule == "interleaved" else 1
        for name in ("num_micro_batches", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise SettingError(f"PipelineParallelConfig({name}={value!r}): a whole number of at least 1.")
        if (self.stages_per_rank > 1) != (self.schedule == "interleaved"):
            raise SettingError(
                f"PipelineParallelConfig(schedule={self.schedule!r}, stages_per_rank={self.stages_per_rank}): several "
                "stages per rank are what 'interleaved' means. Set both, or neither."
            )
        if isinstance(self.split_points, str):
            self.split_points = [self.split_points]
        if self.example_inputs is not None and not isinstance(self.example_inputs, (tuple, list)):
            self.example_inputs = (self.example_inputs,)
