"""What a replay records of each update: samples, losses, and the norm of each tensor in the order of computation."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch

from ...modules import is_sharded
from ...nested import named_tensors
from ...parallel.rebind import canonical_name
from .child import UpdateObserver, as_number
from .rerun import Facts

if TYPE_CHECKING:
    from ...accelerator import Accelerator

#: Kinds of tensors, in the order in which an update computes them.
WEIGHT, INPUT, OUTPUT, LOSS, GRADIENT, PARAMETER = "weight", "input", "output", "loss", "gradient", "parameter gradient"
#: The number of bytes of a tensor whose values are hashed at once.
_NUM_HASHED: Final = 1 << 24


@final
class Observer(UpdateObserver):
    """An observer of the batches, modules, gradients and weights of each update.

    Options:
        hashes: also keep a checksum of each tensor, and of each sample of a batch, to compare two replays.
    """

    def __init__(self, run: Accelerator, options: Mapping[str, object]) -> None:
        self._run, self._hashes = run, bool(options.get("hashes"))
        self._seen: set[int] = set()  # modules with a hook
        self._is_backward = False  # activation checkpointing computes outputs again
        self._clear()

    def _clear(self) -> None:
        self._batches: list[Facts] = []
        self._tensors: list[list[Any]] = []
        self._norm: float | None = None
        self._squares = 0.0
        self._rates: list[float] = []

    def facts(self, update: int) -> Facts:
        """Return what was recorded since the last update."""
        found = {
            "batches": self._batches,
            "tensors": self._tensors,
            "grad_norm": self._norm,
            "grad_squares": self._squares,
            "lr": self._rates,
        }
        self._clear()
        return found

    # -- the loop --------------------------------------------------------------------------------------

    def begin_batch(self, loader: object) -> None:
        """Keep the samples of a batch, and the weights that it meets."""
        models = [self._run.strategy.unwrap(model, keep_torch_compile=False) for model in self._run._wrapped_models]
        if not any(model.training for model in models):
            return
        if not self._batches:
            for name, parameter in _parameters(models):
                self._keep(WEIGHT, name, parameter)
        for model in models:
            for name, module in model.named_modules():
                if id(module) not in self._seen and not any(True for _ in module.children()):
                    self._seen.add(id(module))
                    module.register_forward_hook(self._forward_hook(canonical_name(name)))
        info = getattr(getattr(loader, "progress", None), "batch_info", None)
        indices = getattr(info, "indices", None)
        samples = [int(one) for one in indices] if isinstance(indices, Sequence) else []
        self._batches.append({"samples": samples, "loss": None})
        for name, tensor in named_tensors(getattr(loader, "current_batch", None)):
            self._keep(INPUT, name.lstrip("."), tensor)

    def _forward_hook(self, name: str) -> Callable[[torch.nn.Module, object, object], None]:
        def after_forward(module: torch.nn.Module, inputs: object, output: object) -> None:
            if self._is_backward or not torch.is_grad_enabled() or not module.training:
                return
            for place, tensor in named_tensors(output):
                part = place.lstrip(".")
                full = f"{name}[{part}]" if part else name
                self._keep(OUTPUT, full, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_hook(full))

        return after_forward

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def after_backward(gradient: torch.Tensor) -> None:
            self._keep(GRADIENT, name, gradient)

        return after_backward

    def before_backward(self, loss: object, weight: object) -> None:
        """Keep the loss of the micro-batch."""
        self._is_backward = True
        if isinstance(loss, torch.Tensor):
            self._keep(LOSS, "", loss)
            if self._batches:
                self._batches[-1]["loss"] = float(loss.detach().double().mean())

    def after_backward(self, loss: object, weight: object) -> None:
        """Keep forward passes again."""
        self._is_backward = False

    def after_clip(self, norm: object) -> None:
        """Keep the norm before clipping."""
        self._norm = as_number(norm)

    def before_step(self, optimizer: object) -> None:
        """Keep the gradient of each parameter, and the sum of squares of those that this rank alone holds."""
        models = [self._run.strategy.unwrap(model, keep_torch_compile=False) for model in self._run._wrapped_models]
        squares = {True: 0.0, False: 0.0}
        for name, parameter in _parameters(models):
            if parameter.grad is not None:
                kept = self._keep(PARAMETER, name, parameter.grad)
                squares[is_sharded(parameter.grad)] += kept * kept
        scale = 1.0 if self._run.scaler is None else self._run.scaler.get_scale()
        self._squares = squares[True] / scale**2
        if self._norm is None and not squares[True]:
            self._norm = math.sqrt(squares[False]) / scale

    def after_step(self, optimizer: object) -> None:
        """Keep the learning rates with which the optimizer has stepped."""
        self._rates += [float(group.get("lr", 0.0)) for group in getattr(optimizer, "param_groups", ())]

    def _keep(self, kind: str, name: str, tensor: torch.Tensor) -> float:
        """Keep the norm of what this rank holds of a tensor, its outstanding row and checksums; return the norm."""
        with torch.no_grad():
            held: Any = tensor.detach()
            held = held.to_local() if is_sharded(held) else held
            norm = float(torch.linalg.vector_norm(held, dtype=torch.float64)) if held.is_floating_point() else None
            rows = len(self._batches[-1]["samples"]) if self._batches and kind in (INPUT, OUTPUT, GRADIENT) else 0
            is_per_sample = rows > 0 and held.ndim > 0 and held.shape[0] == rows
            facts = [
                kind,
                name,
                norm,
                len(self._batches) - 1,
                _top_row(held) if is_per_sample and norm is not None else None,
            ]
            if self._hashes:
                facts.append(_checksum(held))
                facts.append([_checksum(row) for row in held] if is_per_sample and kind == INPUT else None)
            self._tensors.append(facts)
        return norm or 0.0


def _top_row(tensor: torch.Tensor) -> list[Any]:
    """Return the rows that stand out: those that aren't finite, or the largest, and its norm over the median's."""
    norms = tensor.reshape(tensor.shape[0], -1).double().norm(dim=1)
    wrong = (~norms.isfinite()).nonzero().flatten().tolist()
    if wrong:
        return [wrong, math.inf if len(wrong) < len(norms) else 1.0]
    others = norms.median()
    return [[int(norms.argmax())], float(norms.max() / others) if others else 1.0]


def _checksum(tensor: torch.Tensor) -> int:
    whole = 0
    for part in tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).split(_NUM_HASHED):
        whole = zlib.crc32(part.numpy().tobytes(), whole)
    return whole


def _parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the trained parameters of all models by names; those of several models begin with a number."""
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not parameter.is_meta:
                yield f"{number}." * (len(models) > 1) + canonical_name(name), parameter
