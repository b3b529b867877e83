"""Wrappers of Megatron-LM's model, optimizer and schedule: a forward is a full training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from ...optional import require
from ...parallel.base import SteppedOptimizer, SteppedScheduler

if TYPE_CHECKING:
    from .steps import MegatronRun

_PURPOSE = "Megatron-LM"


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
    """Megatron-LM's model, whose call in training mode computes gradients and updates the parameters.

    Args:
        accelerator: anything with ``state.megatron_lm_plugin`` and ``device``.
        model: Megatron's list of model chunks.
        optimizer, scheduler: Megatron's own.
    """

    def __init__(
        self, accelerator: MegatronRun, model: list[torch.nn.Module], optimizer: Any, scheduler: object
    ) -> None:
        super().__init__()
        self.module: torch.nn.ModuleList = torch.nn.ModuleList(model)
        self.base_model: torch.nn.Module = model[0]
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.args: Any = require("megatron.training", purpose=_PURPOSE).get_args()
        self.train_step_handler: Any = make_train_step(accelerator, self.args)
        self.optimizer.skipped_iter = False
        self.iteration: int = 0
        self.skipped_iter: int = 0
        self.grad_norm: Any = None
        self.total_loss_dict: dict[str, Any] = {}

    def chunks(self) -> list[torch.nn.Module]:
        """Return Megatron's list of model chunks."""
        return list(self.module)

    def get_batch_data_iterator(self, batch_data: dict[str, torch.Tensor]) -> object:
        """Return an iterator over the batch's micro-batches, for each model chunk."""
        count = self.args.num_micro_batches
        pieces = {name: value.tensor_split(count) for name, value in batch_data.items()}
        micro_batches = [{name: chunk[number] for name, chunk in pieces.items()} for number in range(count)]
        iterators: list[Iterator[Any]] = [iter(micro_batches) for _ in self.module]
        return iterators if len(iterators) > 1 else iterators[0]

    def train_step(self, **batch_data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Make one update, and return Megatron's losses by name."""
        core, training = require("megatron.core.utils"), require("megatron.training.training", purpose=_PURPOSE)
        chunks = self.chunks()
        result = training.train_step(
            self.train_step_handler.forward_step,
            self.get_batch_data_iterator(batch_data),
            chunks,
            self.optimizer,
            self.scheduler,
            core.get_model_config(chunks[0]),
        )
        losses, self.skipped_iter = result[0], int(result[1])
        self.grad_norm = result[5] if len(result) > 5 else result[2]  # older ones don't say whether to stop
        self.optimizer.skipped_iter = self.skipped_iter == 1
        self.iteration += 1
        self.args.iteration = self.iteration
        return losses

    def eval_step(self, **batch_data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the losses of a batch by name, computed without gradients."""
        schedules = require("megatron.core.pipeline_parallel", purpose=_PURPOSE)
        with torch.no_grad():
            found = schedules.get_forward_backward_func()(
                forward_step_func=self.train_step_handler.forward_step,
                data_iterator=self.get_batch_data_iterator(batch_data),
                model=self.chunks(),
                num_microbatches=self.args.num_micro_batches,
                seq_length=self.args.seq_length,
                micro_batch_size=self.args.micro_batch_size,
                forward_only=True,
            )
        names = found[0] if found else {}
        return {name: torch.stack([torch.as_tensor(one[name]) for one in found]).mean() for name in names}

    def forward(self, **batch_data: torch.Tensor) -> StepOutput:
        """Make a training step in training mode or an evaluation otherwise, and return the sum of the losses."""
        losses = self.train_step(**batch_data) if self.training else self.eval_step(**batch_data)
        logits = losses.pop("logits", None)
        for name, value in losses.items():
            self.total_loss_dict[name] = self.total_loss_dict.get(name, 0) + value
        device = next(self.parameters()).device
        total = torch.zeros((), device=device)
        for value in losses.values():  # empty except on the last stage of a pipeline
            total = total + torch.as_tensor(value, device=device)
        return StepOutput(total, logits)

    def log_eval_results(self) -> dict[str, float]:
        """Return the losses since the last call, each divided by the number of iterations, and clear them."""
        found = {name: float(value) / max(self.iteration, 1) for name, value in self.total_loss_dict.items()}
        self.total_loss_dict.clear()
        return found

    def save_checkpoint(self, output_dir: str) -> None:
        """Write Megatron's checkpoint to ``output_dir``; a collective."""
        self.args.save = str(output_dir)
        library = require("megatron.training.checkpointing", purpose=_PURPOSE)
        library.save_checkpoint(
            self.iteration, self.chunks(), self.optimizer, self.scheduler, num_floating_point_operations_so_far=0
        )

    def load_checkpoint(self, input_dir: str) -> None:
        """Load Megatron's checkpoint from ``input_dir``; a collective."""
        self.args.load = str(input_dir)
        self.args.consumed_train_samples = self.args.consumed_valid_samples = 0
        library = require("megatron.training.checkpointing", purpose=_PURPOSE)
        found = library.load_checkpoint(self.chunks(), self.optimizer, self.scheduler)
        self.iteration = int(found[0] if isinstance(found, tuple) else found)
        self.args.iteration = self.iteration


def make_train_step(accelerator: MegatronRun, args: Any) -> Any:
    """Return ``custom_train_step_class``'s object, or the train step of the model's kind."""
    from .steps import TRAIN_STEPS

    plugin = accelerator.state.megatron_lm_plugin
    custom: Callable[..., Any] | None = plugin.custom_train_step_class
    if custom is not None:
        return custom(args, **(plugin.custom_train_step_kwargs or {}))
    return TRAIN_STEPS[args.model_type_name](accelerator, args)


@final
class MegatronLMOptimizerWrapper(SteppedOptimizer):
    """Megatron-LM's optimizer; the forward has already done what ``step`` and ``zero_grad`` would do."""

    _skipped = "skipped_iter"


@final
class MegatronLMSchedulerWrapper(SteppedScheduler):
    """Megatron-LM's schedule, which the forward has already stepped."""
