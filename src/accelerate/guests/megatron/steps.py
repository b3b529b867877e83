"""Train steps of Megatron-LM, one class per kind of model: how a batch is read and a loss computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from ...errors import SettingError
from ...optional import require
from .plugin import MegatronLMPlugin


class MegatronState(Protocol):
    """The member of a run's state that train steps use."""

    megatron_lm_plugin: MegatronLMPlugin


class MegatronRun(Protocol):
    """The members of an Accelerator that train steps use."""

    state: MegatronState
    device: torch.device


#: Micro-batches, with the names that transformers uses.
Batches: TypeAlias = Iterator[dict[str, torch.Tensor]]
#: (iterator) -> what the model and the loss need.
GetBatch = Callable[[Any], Any]
#: (loss mask or labels, output of the model) -> (loss, what is logged by name).
ComputeLoss = Callable[..., Any]
ForwardStep = Callable[[Any, Any], Any]


def avg_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """Average ``losses`` over the data-parallel ranks, and return them as one tensor."""
    return require("megatron.training.utils", purpose=_PURPOSE).average_losses_across_data_parallel_group(losses)


def gather_across_data_parallel_groups(tensor: torch.Tensor) -> torch.Tensor:
    """All-gather the tensors of the data-parallel ranks along the first dimension."""
    group = require("megatron.core.mpu", purpose=_PURPOSE).get_data_parallel_group()
    chunks = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(chunks, tensor.contiguous(), group=group)
    return torch.cat([chunk.reshape(1) if chunk.dim() == 0 else chunk for chunk in chunks])


_PURPOSE = "Megatron-LM"


class AbstractTrainStep(ABC):
    """The batch, forward and loss of one kind of model; subclass it for a kind of one's own."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: MegatronRun, megatron_dataset_flag: bool) -> GetBatch:
        """Return a function from an iterator to the model's inputs."""

    @abstractmethod
    def get_forward_step_func(self) -> ForwardStep:
        """Return ``(iterator, model) -> (output, loss of an output)``, as Megatron's schedules call it."""

    @abstractmethod
    def get_loss_func(self, accelerator: MegatronRun) -> ComputeLoss:
        """Return the function that computes the loss of an output."""


class _PluginTrainStep(AbstractTrainStep):
    """A train step whose batch and loss functions the plugin may replace."""

    kind: ClassVar[str]

    def __init__(self, accelerator: MegatronRun, args: Any) -> None:
        super().__init__(f"{type(self).__name__}")
        self.args = args
        self.get_batch: GetBatch = self.get_batch_func(accelerator, bool(getattr(args, "megatron_dataset_flag", False)))
        self.loss_func: ComputeLoss = self.get_loss_func(accelerator)
        self.forward_step: ForwardStep = self.get_forward_step_func()

    @staticmethod
    def plugin_of(accelerator: MegatronRun) -> MegatronLMPlugin:
        """Return the run's MegatronLMPlugin."""
        return accelerator.state.megatron_lm_plugin

    def get_batch_func(self, accelerator: MegatronRun, megatron_dataset_flag: bool) -> GetBatch:
        """Return ``custom_get_batch_function``, or a function that reads batches of a prepared loader.

        Raises:
            SettingError: data in Megatron's own format, without a function that reads it.
        """
        custom = self.plugin_of(accelerator).custom_get_batch_function
        if custom is not None:
            return custom
        if megatron_dataset_flag:
            raise SettingError(
                "megatron_dataset_flag=True: how a batch of Megatron's own format is read depends on its version. Give "
                "MegatronLMPlugin(custom_get_batch_function=...), e.g. `get_batch` of Megatron's pretrain script."
            )
        device = accelerator.device
        return lambda iterator: self.read({name: value.to(device) for name, value in next(iterator).items()})

    def get_loss_func(self, accelerator: MegatronRun) -> ComputeLoss:
        """Return ``custom_loss_function``, or that of this kind of model."""
        return self.plugin_of(accelerator).custom_loss_function or self.loss

    @abstractmethod
    def read(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return the inputs of the forward step, from a batch with transformers' names."""

    @abstractmethod
    def loss(self, mask: torch.Tensor, /, *outputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of the outputs, and the values to log by name."""


def _masked_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask = mask.reshape(-1).float()
    return (losses.float().reshape(-1) * mask).sum() / mask.sum()


def _logged(**losses: torch.Tensor) -> dict[str, torch.Tensor]:
    averaged = avg_losses_across_data_parallel_group(list(losses.values()))
    return {name.replace("_", " "): averaged[number] for number, name in enumerate(losses)}


class GPTTrainStep(_PluginTrainStep):
    """Causal language models: each token is predicted from those before it."""

    kind = "gpt"

    def read(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return (tokens, labels, loss mask, attention mask, positions), every token's label the next one."""
        end = self.args.eos_token_id if getattr(self.args, "eos_token_id", None) is not None else self._end()
        tokens = batch["input_ids"]
        labels = torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), end)], dim=1)
        make = require("megatron.training.utils", purpose=_PURPOSE).get_ltor_masks_and_position_ids
        args = self.args
        attention_mask, loss_mask, positions = make(
            tokens, end, args.reset_position_ids, args.reset_attention_mask, args.eod_mask_loss
        )
        return tokens, labels, loss_mask, attention_mask, positions

    @staticmethod
    def _end() -> int:
        return require("megatron.training", purpose=_PURPOSE).get_tokenizer().eod

    def get_forward_step_func(self) -> ForwardStep:
        """Return a forward step whose model computes the loss of every token."""

        def forward_step(
            iterator: Batches, model: Callable[..., torch.Tensor]
        ) -> tuple[torch.Tensor, Callable[..., object]]:
            tokens, labels, loss_mask, attention_mask, positions = self.get_batch(iterator)
            output = model(tokens, positions, attention_mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step

    def loss(self, mask: torch.Tensor, /, *outputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean over the tokens that count; logits beside it with ``return_logits``."""
        losses, logits = outputs[0] if getattr(self.args, "return_logits", False) else (outputs[0], None)
        loss = _masked_mean(losses, mask)
        logged = _logged(lm_loss=loss)
        return loss, logged if logits is None else {**logged, "logits": logits}


class BertTrainStep(_PluginTrainStep):
    """Masked language models with the order of sentences, or classifiers."""

    kind = "bert"

    def read(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return (tokens, types, order of the sentences, loss mask, labels, padding mask)."""
        labels = batch.get("labels")
        loss_mask = None if labels is None else (labels != -100).float()
        return (
            batch["input_ids"],
            batch.get("token_type_ids"),
            batch.get("next_sentence_label"),
            loss_mask,
            labels,
            batch["attention_mask"],
        )

    def get_forward_step_func(self) -> ForwardStep:
        """Return a forward step that gives the model masked labels in pretraining, and classifies otherwise."""

        def forward_step(
            iterator: Batches, model: Callable[..., torch.Tensor]
        ) -> tuple[torch.Tensor, Callable[..., object]]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(iterator)
            if getattr(self.args, "pretraining_flag", True):
                output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
                return output, partial(self.loss_func, loss_mask, order)
            return model(tokens, padding_mask, tokentype_ids=types), partial(self.loss_func, labels)

        return forward_step

    def loss(self, mask: torch.Tensor, /, *outputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of masked tokens and sentence order, or of the classes."""
        if not getattr(self.args, "pretraining_flag", True):
            logits, labels = outputs[-1], mask
            loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))
            return loss, _logged(loss=loss)
        order, (losses, order_logits) = outputs
        masked = _masked_mean(losses, mask)
        if order_logits is None or order is None:
            return masked, _logged(lm_loss=masked)
        ordered = torch.nn.functional.cross_entropy(order_logits.view(-1, 2).float(), order.view(-1), ignore_index=-1)
        return masked + ordered, _logged(lm_loss=masked, sop_loss=ordered)


class T5TrainStep(_PluginTrainStep):
    """Encoder-decoder models: the target is predicted token by token from the source."""

    kind = "t5"

    def read(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """Return (source, target in, labels, loss mask, and three attention masks, True where attention is masked)."""
        source, labels = batch["input_ids"], batch["labels"]
        target = batch.get("decoder_input_ids")
        if target is None:  # the labels, one later, after the start token
            start = labels.new_full((len(labels), 1), getattr(self.args, "decoder_start_token_id", None) or 0)
            target = torch.cat([start, labels[:, :-1]], dim=1)
            target = target.masked_fill(target == -100, 0)
        source_mask = batch["attention_mask"].bool()
        target_mask = torch.ones_like(target, dtype=torch.bool)
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).tril()
        return (
            source,
            target,
            labels.clamp(min=0),
            (labels != -100).float(),
            ~(source_mask.unsqueeze(1) & source_mask.unsqueeze(2)),
            ~((target_mask.unsqueeze(1) & target_mask.unsqueeze(2)) & causal),
            ~(target_mask.unsqueeze(2) & source_mask.unsqueeze(1)),
        )

    def get_forward_step_func(self) -> ForwardStep:
        """Return a forward step whose model computes the loss of every target token."""

        def forward_step(
            iterator: Batches, model: Callable[..., torch.Tensor]
        ) -> tuple[torch.Tensor, Callable[..., object]]:
            source, target, labels, loss_mask, *masks = self.get_batch(iterator)
            return model(source, target, *masks, lm_labels=labels), partial(self.loss_func, loss_mask)

        return forward_step

    def loss(self, mask: torch.Tensor, /, *outputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the mean over the target tokens that count."""
        loss = _masked_mean(outputs[0], mask)
        return loss, _logged(lm_loss=loss)


#: The train step of each kind of model.
TRAIN_STEPS: dict[str, Callable[[Any, Any], AbstractTrainStep]] = {
    step.kind: step for step in (GPTTrainStep, BertTrainStep, T5TrainStep)
}
