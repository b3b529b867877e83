"""Running statistics of normalisation layers, which follow the parts of an update in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import distributed as dist
from torch import nn

from ...errors import PreparationError
from .exchange import Division

_LAYERS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
_NAMES = ("running_mean", "running_var", "num_batches_tracked")


@final
class RunningStatistics:
    """The statistics of the batches that the layers of ``model`` have seen in the open update.

    A layer that computes a training pass gets empty buffers and a momentum of 1, so that afterwards they hold the
    statistics of this batch alone. At the end of the update they are applied in the order of the parts.

    Raises:
        PreparationError: the model has a SyncBatchNorm, which normalises over ranks.
    """

    def __init__(self, model: torch.nn.Module, division: Division, group: dist.ProcessGroup | None) -> None:
        self._division, self._group = division, group
        self._layers: list[Any] = []
        #: By the id of a layer: (part, mean, variance) of each batch.
        self._seen: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        self._held: dict[int, tuple[dict[str, torch.Tensor], float | None]] = {}
        self.part = -1  # that is computed now
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.SyncBatchNorm):
                raise PreparationError(
                    f"{name!r} is a SyncBatchNorm, which normalises over the samples of all ranks, so its results "
                    "depend on the number of ranks. With batch_parts use BatchNorm, which normalises over one part."
                )
            if isinstance(layer, _LAYERS) and layer.running_mean is not None:
                self._layers.append(layer)
                self._seen[id(layer)] = []
                layer.register_forward_pre_hook(self._before)
                layer.register_forward_hook(self._after, always_call=True)

    def __bool__(self) -> bool:
        return bool(self._layers)

    def buffers(self) -> Iterator[torch.Tensor]:
        """Iterate over the buffers that this object updates."""
        return (buffer for layer in self._layers for name in _NAMES if (buffer := getattr(layer, name)) is not None)

    def _before(self, layer: Any, _: object) -> None:
        if not layer.training or id(layer) in self._held:
            return
        own = {name: layer._buffers[name] for name in _NAMES if layer._buffers.get(name) is not None}
        self._held[id(layer)] = own, layer.momentum
        layer._buffers.update({name: torch.zeros_like(buffer) for name, buffer in own.items()})
        layer.momentum = 1.0

    def _after(self, layer: Any, _: object, output: object) -> None:
        held = self._held.pop(id(layer), None)
        if held is None:
            return
        own, layer.momentum = held
        mean, variance = layer.running_mean, layer.running_var
        layer._buffers.update(own)
        if output is not None:  # else the pass has raised
            self._seen[id(layer)].append((self.part, mean, variance))

    def apply(self) -> None:
        """Update the running statistics with what was seen in all parts, in their order; a collective."""
        layers = [(layer, self._seen[id(layer)]) for layer in self._layers]
        self._seen = {id(layer): [] for layer in self._layers}
        counts = self._counts(seen for _, seen in layers)
        with torch.no_grad():
            for number, (layer, seen) in enumerate(layers):
                if not counts[:, number].any():
                    continue
                own = layer.running_mean.new_zeros(int(counts[:, number].max()), 3, layer.num_features)
                for row, (part, mean, variance) in zip(own, seen, strict=False):
                    row[0], row[1], row[2] = part, mean, variance
                rows = self._gathered(own)
                shown = [row for rank, held in enumerate(rows) for row in held[: int(counts[rank, number])]]
                for row in sorted(shown, key=lambda row: int(row[0, 0])):
                    _follow(layer, row[1], row[2])

    def _counts(self, seen: Iterable[Sequence[object]]) -> torch.Tensor:
        """Return how many batches each layer has seen on each rank; [ranks, layers]."""
        own = torch.tensor([len(one) for one in seen], device=self._layers[0].running_mean.device)
        return torch.stack([*self._gathered(own)]).cpu()

    def _gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        if self._division.num_ranks == 1:
            return [own]
        found = [torch.empty_like(own) for _ in range(self._division.num_ranks)]
        dist.all_gather(found, own.contiguous(), group=self._group)
        return found


def _follow(layer: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Update the running statistics of ``layer`` with those of one batch."""
    momentum = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if momentum is None:  # the average of all batches
            momentum = 1.0 / float(layer.num_batches_tracked)
    for running, seen in ((layer.running_mean, mean), (layer.running_var, variance)):
        running.mul_(1 - momentum).add_(seen, alpha=momentum)
