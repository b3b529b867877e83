"""Wrappers of Megatron-LM's model, optimizer and schedule: a forward is a full training step.

A training step reads a batch and computes a loss.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, final

import torch

from ...errors import SettingError
from ...optional import require
from ...parallel.base import SteppedOptimizer, SteppedScheduler
from .plugin import MegatronLMPlugin

PURPOSE = "Megatron-LM"


class MegatronState(Protocol):
    """The attribute of a run's state that training steps use."""

    megatron_lm_plugin: MegatronLMPlugin


class MegatronRun(Protocol):
    """The attributes of an Accelerator that training steps use."""

    state: MegatronState
    device: torch.device


#: (iterator) -> the inputs of the model and the loss.
GetBatch = Callable[[Any], Any]
#: (loss mask, output of the model) -> (loss, values to log by name).
ComputeLoss = Callable[..., Any]
#: (iterator, model) -> (output, loss of an output), as Megatron's schedules call it.
ForwardStep = Callable[[Any, Any], Any]


def avg_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """Average ``losses`` over the data-parallel ranks, and return them as one tensor."""
    return require("megatron.training.utils", purpose=PURPOSE).average_losses_across_data_parallel_group(losses)


def gather_across_data_parallel_groups(tensor: torch.Tensor) -> torch.Tensor:
    """All-gather the tensors of the data-parallel ranks along the first dimension."""
    group = require("megatron.core.mpu", purpose=PURPOSE).get_data_parallel_group()
    row = tensor.reshape(1) if tensor.dim() == 0 else tensor.contiguous()
    rows = [torch.empty_like(row) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(rows, row, group=group)
    return torch.cat(rows)


class AbstractTrainStep(ABC):
    """The batch, forward and loss for one kind of model; subclass it for ``custom_train_step_class``.

    Megatron's schedules call its ``forward_step``.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: MegatronRun, megatron_dataset_flag: bool) -> GetBatch:
        """Return a function from an iterator to the model's inputs."""

    @abstractmethod
    def get_forward_step_func(self) -> ForwardStep:
        """Return ``(iterator, model) -> (output, loss of an output)``."""

    @abstractmethod
    def get_loss_func(self, accelerator: MegatronRun) -> ComputeLoss:
        """Return the function that computes the loss of an output."""


class GPTTrainStep(AbstractTrainStep):
    """The training step of causal language models, which predict each token from the tokens before it."""

    def __init__(self, accelerator: MegatronRun, args: Any) -> None:
        super().__init__("GPTTrainStep")
        self.args = args
        self.get_batch: GetBatch = self.get_batch_func(accelerator, bool(getattr(args, "megatron_dataset_flag", False)))
        self.loss_func: ComputeLoss = self.get_loss_func(accelerator)
        self.forward_step: ForwardStep = self.get_forward_step_func()

    def get_batch_func(self, accelerator: MegatronRun, megatron_dataset_flag: bool) -> GetBatch:
        """Return ``custom_get_batch_function``, or a function that reads batches of a prepared loader.

        Raises:
            SettingError: the data are in Megatron's own format, and no function reads them.
        """
        custom = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        if custom is None and megatron_dataset_flag:
            raise SettingError(
                "megatron_dataset_flag=True: how a batch of Megatron's own format is read depends on its version. Give "
                "MegatronLMPlugin(custom_get_batch_function=...), e.g. `get_batch` of Megatron's pretrain script."
            )
        device = accelerator.device
        return custom or (lambda iterator: self._read(next(iterator)["input_ids"].to(device)))

    def _read(self, tokens: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return (tokens, labels, loss mask, attention mask, positions); None leaves the causal mask to the model."""
        end = getattr(self.args, "eos_token_id", None)
        if end is None:
            end = require("megatron.training", purpose=PURPOSE).get_tokenizer().eod
        labels = torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), end)], dim=1)
        counts = tokens != end if getattr(self.args, "eod_mask_loss", False) else torch.ones_like(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return tokens, labels, counts.float(), None, positions

    def get_forward_step_func(self) -> ForwardStep:
        """Return a forward step whose model computes the loss of every token."""

        def forward_step(iterator: object, model: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ComputeLoss]:
            tokens, labels, loss_mask, attention_mask, positions = self.get_batch(iterator)
            return model(tokens, positions, attention_mask, labels=labels), partial(self.loss_func, loss_mask)

        return forward_step

    def get_loss_func(self, accelerator: MegatronRun) -> ComputeLoss:
        """Return ``custom_loss_function``, or the mean over the unmasked tokens."""
        return accelerator.state.megatron_lm_plugin.custom_loss_function or self._mean

    def _mean(
        self, mask: torch.Tensor, output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses, logits = output if isinstance(output, tuple) else (output, None)  # with `return_logits`
        loss = (losses.float() * mask).sum() / mask.sum()
        logged = {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}
        return loss, logged if logits is None else {**logged, "logits": logits}


def _refuse(kind: str, script: str) -> NoReturn:
    raise SettingError(
        f"{kind}: Megatron-LM keeps the train step of such models in {script}. Put its functions into a subclass of "
        "AbstractTrainStep, and give MegatronLMPlugin(custom_train_step_class=..., custom_model_provider_function=...)."
    )


@final
class BertTrainStep:
    """An unsupported training step: that of encoders is in Megatron-LM's own script."""

    def __init__(self, *_: object, **__: object) -> None:
        _refuse("BertTrainStep", "pretrain_bert.py")


@final
class T5TrainStep:
    """An unsupported training step: that of encoder-decoder models is in Megatron-LM's own script."""

    def __init__(self, *_: object, **__: object) -> None:
        _refuse("T5TrainStep", "pretrain_t5.py")


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
