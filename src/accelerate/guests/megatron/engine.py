"""Wrappers of Megatron-LM's model, optimizer and schedule: a forward is a full training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from ...optional import require
from ...parallel.base import SteppedOptimizer, SteppedScheduler
from .steps import PURPOSE, GPTTrainStep

if TYPE_CHECKING:
    from .steps import MegatronRun


@final
@dataclass
class StepOutput:
    """The result of an engine's step: the loss, averaged over micro-batches and data-parallel ranks, and logits."""

    loss: torch.Tensor
    logits: torch.Tensor | None = None

    def __getitem__(self, key: str | int) -> Any:
        return getattr(self, key) if isinstance(key, str) else (self.loss, self.logits)[key]


@final
class MegatronEngine(torch.nn.Module):
    """Megatron-LM's model; a call in training mode computes gradients and updates the parameters.

    Args:
        accelerator: any object with ``state.megatron_lm_plugin`` and ``device``.
        model: Megatron's list of model chunks.
        optimizer, scheduler: Megatron's own objects.
    """

    def __init__(
        self, accelerator: MegatronRun, model: list[torch.nn.Module], optimizer: Any, scheduler: object
    ) -> None:
        super().__init__()
        self.module: torch.nn.ModuleList = torch.nn.ModuleList(model)
        self.base_model: torch.nn.Module = model[0]
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.args: Any = require("megatron.training", purpose=PURPOSE).get_args()
        plugin = accelerator.state.megatron_lm_plugin
        custom: Callable[..., Any] | None = plugin.custom_train_step_class
        self.train_step_handler: Any = (
            GPTTrainStep(accelerator, self.args)
            if custom is None
            else custom(self.args, **(plugin.custom_train_step_kwargs or {}))
        )
        self.optimizer.skipped_iter = False
        self.iteration: int = 0
        self.grad_norm: Any = None

    def get_batch_data_iterator(self, batch_data: dict[str, torch.Tensor]) -> object:
        """Return an iterator over the batch's micro-batches, for each model chunk."""
        pieces = [value.tensor_split(self.args.num_micro_batches) for value in batch_data.values()]
        micro_batches = [dict(zip(batch_data, values, strict=True)) for values in zip(*pieces, strict=True)]
        iterators = [iter(micro_batches) for _ in self.module]
        return iterators if len(iterators) > 1 else iterators[0]

    def train_step(self, **batch_data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run one update, and return Megatron's losses by name."""
        step = require("megatron.training.training", purpose=PURPOSE).train_step
        config = require("megatron.core.utils", purpose=PURPOSE).get_model_config(self.base_model)
        arguments = [
            self.get_batch_data_iterator(batch_data),
            list(self.module),
            self.optimizer,
            self.scheduler,
            config,
        ]
        if "forward_backward_func" in inspect.signature(step).parameters:  # in newer versions, an argument
            arguments.append(_schedule())
        result = step(self.train_step_handler.forward_step, *arguments)
        self.grad_norm = result[5] if len(result) > 5 else result[2]  # older versions return fewer values
        self.optimizer.skipped_iter = int(result[1]) == 1
        self.iteration += 1
        self.args.iteration = self.iteration
        return result[0]

    def eval_step(self, **batch_data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the losses of a batch by name, computed without gradients."""
        with torch.no_grad():
            found = _schedule()(
                forward_step_func=self.train_step_handler.forward_step,
                data_iterator=self.get_batch_data_iterator(batch_data),
                model=list(self.module),
                num_microbatches=self.args.num_micro_batches,
                seq_length=self.args.seq_length,
                micro_batch_size=self.args.micro_batch_size,
                forward_only=True,
            )
        names = found[0] if found else {}
        return {name: torch.stack([torch.as_tensor(one[name]) for one in found]).mean() for name in names}

    def forward(self, **batch_data: torch.Tensor) -> StepOutput:
        """Run a training step in training mode, else an evaluation, and return the sum of the losses."""
        losses = dict(self.train_step(**batch_data) if self.training else self.eval_step(**batch_data))
        logits = losses.pop("logits", None)
        device = next(self.parameters()).device
        total = torch.zeros((), device=device)
        for value in losses.values():  # empty except on the last stage of a pipeline
            total = total + torch.as_tensor(value, device=device)
        return StepOutput(total, logits)

    def save_checkpoint(self, output_dir: str) -> None:
        """Write Megatron's checkpoint to ``output_dir``; a collective."""
        self.args.save = output_dir
        save = require("megatron.training.checkpointing", purpose=PURPOSE).save_checkpoint
        objects = (list(self.module), self.optimizer, self.scheduler)
        save(self.iteration, *objects, num_floating_point_operations_so_far=0)

    def load_checkpoint(self, input_dir: str) -> None:
        """Load Megatron's checkpoint from ``input_dir``; a collective."""
        self.args.load = input_dir
        self.args.consumed_train_samples = self.args.consumed_valid_samples = 0
        load = require("megatron.training.checkpointing", purpose=PURPOSE).load_checkpoint
        found = load(list(self.module), self.optimizer, self.scheduler)
        self.iteration = int(found[0] if isinstance(found, tuple) else found)
        self.args.iteration = self.iteration


def _schedule() -> Callable[..., Any]:
    return require("megatron.core.pipeline_parallel", purpose=PURPOSE).get_forward_backward_func()


@final
class MegatronLMOptimizerWrapper(SteppedOptimizer):
    """Megatron-LM's optimizer; the forward already includes ``step`` and ``zero_grad``."""

    _skipped = "skipped_iter"


@final
class MegatronLMSchedulerWrapper(SteppedScheduler):
    """Megatron-LM's schedule; the forward already steps it."""
