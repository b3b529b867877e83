"""Trace the memory of one training step on tensors without values. Internal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias, final

import torch
from torch import nn

from ...devices.allocations import AllocationTracker
from ...devices.table import available_kind
from ...errors import PreparationError, SettingError
from ...nested import honor_type
from ...optional import require
from ...torch_private.tracing import data_dependent_errors, fake_tensor_mode
from ...training.recompute import recompute_activations, repeated_blocks

#: Optimizers of torchao, by the names of their classes.
_FEW_BITS: Final = ("AdamW8bit", "AdamWFp8", "Adam8bit", "AdamFp8")

#: Layers whose weights tensor parallelism divides.
_DIVISIBLE_LAYERS = ("Linear", "Embedding", "Conv1D")


#: The arguments of a model: keywords, or positional ones.
ModelInputs: TypeAlias = Mapping[str, object] | tuple[object, ...]
OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Traceable(Protocol):
    """A model that can be built without values, and its inputs."""

    @property
    def name(self) -> str:
        """The model's name in messages."""
        ...

    def build(self) -> nn.Module:
        """Build a new model, with its parameters on the meta device."""
        ...

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> ModelInputs | None:
        """Return inputs with arbitrary values for the model; None if they aren't known."""
        ...


@final
@dataclass(frozen=True)
class Moment:
    """The live bytes at one moment of the forward or backward pass, without weights and optimizer state."""

    gradients: int
    activations: int


@final
@dataclass(frozen=True)
class TrainingTrace:
    """The bytes of one training step on one device, when optimizer state exists."""

    name: str
    batch: int
    sequence: int
    device_type: str
    optimizer_name: str
    num_parameters: int
    weights: int
    buffers: int
    gradients: int
    """Of all trainable parameters together."""
    optimizer: int
    """Optimizer state."""
    num_trainable: int
    """Parameters (not bytes) that get gradients."""
    autocast_bytes: int | None
    """Of one number in the precision of the forward pass; None if the weights have it."""
    largest_block: int
    """Weights of the largest of the repeated blocks."""
    outside_blocks: int
    """Weights that lie outside of the repeated blocks."""
    divisible: int
    """Weights that tensor parallelism divides."""
    moments: tuple[Moment, ...]
    """The moments of the forward and backward pass that no other surpasses in both numbers."""
    held_in_step: int
    """Activations (the last outputs, the batch) that are still there while the optimizer steps."""
    step_temporaries: int
    """What the optimizer's step needs beside its state."""
    narrow: TrainingTrace | None = None
    """The same step with weights stored in the precision of computation, if theirs is another one: without autocast
    copies, as when whole weights are gathered from shards."""

    @property
    def activations(self) -> int:
        """The peak bytes of activations."""
        return max((moment.activations for moment in self.moments), default=0)

    @property
    def peak(self) -> int:
        """The peak bytes of the step."""
        during = max((moment.gradients + moment.activations for moment in self.moments), default=0)
        stepping = self.gradients + self.held_in_step + self.step_temporaries
        return self.weights + self.buffers + self.optimizer + max(during, stepping)


def trace_training(
    subject: Traceable,
    *,
    batch: int = 1,
    sequence: int = 512,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    optimizer: str | OptimizerFactory = "adamw",
    recompute: bool = False,
    activations: bool = True,
    device: torch.device | str | None = None,
) -> TrainingTrace:
    """Trace the memory of one training step of the model, in seconds and without allocating it.

    Args:
        subject: the model, from ``find_subject``.
        batch: the number of samples in one micro-batch.
        sequence: the number of tokens in one sample, for text models.
        dtype: the dtype of the weights; None keeps the model's.
        autocast: the lower precision in which the forward pass computes.
        optimizer: the name of a class in ``torch.optim``, or a function that creates one from parameters.
        recompute: use activation checkpointing for the repeated blocks.
        activations: trace the forward and backward; otherwise the model isn't run, and its inputs need not be known.
        device: the device type whose kernels and allocator are simulated; by default, this machine's best.

    Raises:
        SettingError: the optimizer is unknown.
        PreparationError: the model can't run without values, or its inputs are unknown.
    """
    target = torch.device(available_kind().name if device is None else device)

    def traced(weights: torch.dtype | None) -> TrainingTrace:
        return _traced(subject, batch, sequence, weights, autocast, optimizer, recompute, activations, target)

    whole = traced(dtype)
    return whole if autocast is None or not activations else replace(whole, narrow=traced(autocast))


def trace_or_sizes(subject: Traceable, **step: Any) -> tuple[TrainingTrace, str | None]:
    """Return the trace of ``trace_training``; if the model can't be traced, one without activations, and the reason."""
    try:
        return trace_training(subject, **step), None
    except PreparationError as error:
        return trace_training(subject, **step, activations=False), str(error)


def _traced(
    subject: Traceable,
    batch: int,
    sequence: int,
    dtype: torch.dtype | None,
    autocast: torch.dtype | None,
    optimizer: str | OptimizerFactory,
    recompute: bool,
    activations: bool,
    target: torch.device,
) -> TrainingTrace:
    model = subject.build().train()
    # Initialise autograd now: under the fake tensor mode, torch's GPU builds would start threads for fake devices, and
    # a process that is forked from this one couldn't run a backward any more.
    torch.zeros((), requires_grad=True).backward()
    # Compiled functions, such as the step of torchao's optimizers, can't run without values.
    eager = torch.compiler.set_stance("force_eager") if _few_bits(optimizer) else nullcontext()
    with eager, fake_tensor_mode():
        _move_to_fake_device(model, target, dtype)
        inputs = subject.inputs(model, batch, sequence) if activations else None
        if activations and inputs is None:
            raise PreparationError(
                f"{subject.name}: what {type(model).__name__} is called with isn't known, so its activations can't be "
                "traced. A function given as 'module:function' may return the model and `inputs(batch, sequence)`."
            )
        if recompute:
            recompute_blocks(model)
        given = None if inputs is None else _moved(inputs, target)
        run = _TracedStep(model, given, target, autocast, optimizer_of(optimizer, model, target))
        try:
            with run.tracker:
                run.step()
                run.moments.clear()
                run.step()
        except data_dependent_errors() as error:
            raise PreparationError(
                f"{subject.name}: the forward pass of {type(model).__name__} depends on values ({error}), so it can't "
                "be traced without any."
            ) from error
    sizes, blocks = run.tracker.num_bytes, repeated_blocks(model)
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    return TrainingTrace(
        name=subject.name,
        batch=batch,
        sequence=sequence,
        device_type=target.type,
        optimizer_name=type(run.optimizer).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights=sizes["weights"],
        buffers=sizes["buffers"],
        gradients=run.all_gradients,
        optimizer=sizes["optimizer"],
        num_trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        autocast_bytes=None if autocast is None else autocast.itemsize,
        largest_block=max((_num_bytes(block.parameters()) for block in blocks), default=0),
        outside_blocks=_num_bytes(parameter for parameter in model.parameters() if id(parameter) not in in_blocks),
        divisible=_divisible(model),
        moments=_frontier(run.moments),
        held_in_step=run.held_in_step,
        step_temporaries=run.step_temporaries,
    )


def optimizer_of(requested: str | OptimizerFactory, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Return a new optimizer for the model's trainable parameters.

    Raises:
        SettingError: torch has no optimizer of that name.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if callable(requested):
        return requested(parameters)
    known = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    few_bits = _few_bits(requested)
    if few_bits is not None:
        return few_bits(parameters)
    if requested.lower() not in known:
        raise SettingError(
            f"optimizer={requested!r}: torch.optim has {', '.join(sorted(known))}, torchao {', '.join(_FEW_BITS)}."
        )
    kind: Any = known[requested.lower()]
    # torch chooses foreach by itself on an accelerator, but not for tensors without values.
    wants_foreach = device.type != "cpu" and "foreach" in kind.__init__.__annotations__
    return kind(parameters, **({"foreach": True} if wants_foreach else {}))


@final
class _TracedStep:
    """A model with its optimizer, whose training steps are traced."""

    def __init__(
        self,
        model: nn.Module,
        inputs: ModelInputs | None,
        device: torch.device,
        autocast: torch.dtype | None,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.optimizer = optimizer
        self.tracker = AllocationTracker(device)
        self.moments: list[Moment] = []
        self.all_gradients = self.held_in_step = self.step_temporaries = 0
        self._model, self._inputs, self._device, self._autocast = model, inputs, device, autocast
        self._kept: object = None
        self.tracker.count(model.parameters(), "weights")
        self.tracker.count(model.buffers(), "buffers")
        self.tracker.count(inputs.values() if isinstance(inputs, Mapping) else inputs or ())
        self._counts = [
            parameter.register_post_accumulate_grad_hook(self._count_gradient)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def _count_gradient(self, parameter: torch.Tensor) -> None:
        self.tracker.count([parameter.grad], "gradients")

    def _record(self) -> None:
        found = self.tracker.num_bytes
        self.moments.append(Moment(found["gradients"], found["other"]))

    def step(self) -> None:
        """Run forward, backward and optimizer step; the outputs stay alive until the next step replaces them."""
        tracker = self.tracker
        tracker.on_growth = self._record
        self._record()
        inputs = self._inputs
        if inputs is None:
            self._make_gradients()
        else:
            with nullcontext() if self._autocast is None else torch.autocast(self._device.type, self._autocast):
                output = self._model(**inputs) if isinstance(inputs, Mapping) else self._model(*inputs)
                loss = loss_of(output)
            self._kept = (output, loss)
            loss.backward()
        self.all_gradients = tracker.num_bytes["gradients"]
        self.held_in_step = most = tracker.num_bytes["other"]

        def look() -> None:
            nonlocal most
            tracker.count(_state_tensors(self.optimizer), "optimizer")
            most = max(most, tracker.num_bytes["other"])

        tracker.on_growth = look
        self.optimizer.step()
        tracker.count(_state_tensors(self.optimizer), "optimizer")
        self.step_temporaries = most - self.held_in_step
        self.optimizer.zero_grad()

    def _make_gradients(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                self._count_gradient(parameter)
        self._record()


def _few_bits(requested: str | OptimizerFactory) -> Any:
    """Return torchao's low-bit optimizer of this name; None if torchao has none."""
    name = next((name for name in _FEW_BITS if isinstance(requested, str) and requested.lower() == name.lower()), None)
    if name is None:
        return None
    kind = getattr(require("torchao.optim", "fp8", purpose=f"optimizer={name}"), name)
    for signed in (True, False):  # create its lookup tables now, because that needs values, which the trace lacks
        kind._subclass_zeros(torch.empty(256), signed, 256)
    return kind


def loss_of(output: object) -> torch.Tensor:
    """Return the loss in a model's output, or the mean of the first floating-point tensor in it."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else [output]
    )
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
            return value if value.dim() == 0 else value.float().mean()
    raise PreparationError(f"The model's output ({type(output).__name__}) has no loss and no tensor with a gradient.")


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[object]:
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, Mapping) else ():
            parts = getattr(value, "tensor_attrs", ())  # torchao's low-bit tensors
            yield from (getattr(value, part) for part in parts) if parts else [value]


def _move_to_fake_device(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Replace parameters and buffers by fake tensors on the device, and keep ties."""
    done: dict[int, tuple[torch.Tensor, Any]] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in list(slots.items()):
                if tensor is None:
                    continue
                if id(tensor) not in done:
                    done[id(tensor)] = (tensor, _without_values(tensor, device, dtype))
                slots[name] = done[id(tensor)][1]


def _without_values(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _moved(inputs: ModelInputs, device: torch.device) -> ModelInputs:
    def move(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    if isinstance(inputs, Mapping):
        return {name: move(value) for name, value in inputs.items()}
    return honor_type(inputs, map(move, inputs))


def recompute_blocks(model: nn.Module) -> None:
    """Make the repeated blocks save only their inputs for the backward pass."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # a recomputed forward of a block would append its keys again
    recompute_activations(repeated_blocks(model))


def _num_bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in {id(each): each for each in parameters}.values())


def _divisible(model: nn.Module) -> int:
    return _num_bytes(
        parameter
        for module in model.modules()
        if type(module).__name__ in _DIVISIBLE_LAYERS
        for parameter in module.parameters(recurse=False)
    )


def _frontier(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Return the Pareto frontier of the moments: those that no other moment exceeds in both numbers."""
    kept: list[Moment] = []
    for moment in sorted(moments, key=lambda each: (-each.gradients, -each.activations)):
        if not kept or moment.activations > kept[-1].activations:
            kept.append(moment)
    return tuple(reversed(kept))
