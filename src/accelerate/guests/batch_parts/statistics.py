"""Running statistics of normalisation layers, which follow the parts of an update in the order of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
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


def has_statistics(model: torch.nn.Module) -> bool:
    """Return whether a layer of ``model`` has running statistics."""
    return any(map(_has_own, model.modules()))


def _has_own(layer: torch.nn.Module) -> bool:
    return isinstance(layer, _LAYERS) and layer.running_mean is not None


@final
class RunningStatistics:
    """The statistics of the batches that the layers of ``model`` have seen in the open update.

    A layer that computes a training pass gets empty buffers and a momentum of 1, so that afterwards they hold the
    statistics of this batch alone. At the end of the update they are applied in the order of one process.

    Raises:
        PreparationError: the model has a SyncBatchNorm, which normalises over ranks.
    """

    def __init__(self, model: torch.nn.Module, division: Division, group: dist.ProcessGroup | None) -> None:
        self._division, self._group = division, group
        self._layers: list[Any] = []
        #: By the id of a layer: (round, mean, variance) of each batch.
        self._seen: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        self._held: dict[int, tuple[dict[str, torch.Tensor], float | None]] = {}
        self.round = 0  # of all parts once, since the statistics were applied
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.SyncBatchNorm):
                raise PreparationError(
                    f"{name!r} is a SyncBatchNorm, which normalises over the samples of all ranks, so its results "
                    "depend on the number of ranks. With batch_parts use BatchNorm, which normalises over one part."
                )
            if _has_own(layer):
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
            self._seen[id(layer)].append((self.round, mean, variance))

    def apply(self) -> None:
        """Update the running statistics with what was seen in all parts, in their order; a collective."""
        layers = [(layer, self._seen[id(layer)]) for layer in self._layers]
        counts = self._counts([seen for _, seen in layers])
        self._seen, self.round = {id(layer): [] for layer in self._layers}, 0
        with torch.no_grad():
            for (layer, seen), of_layer in zip(layers, counts, strict=True):
                num_rows = int(of_layer.sum(0).max())
                if not num_rows:
                    continue
                own = layer.running_mean.new_zeros(num_rows, 2, layer.num_features)
                for row, (_, mean, variance) in zip(own, seen, strict=False):
                    row[0], row[1] = mean, variance
                of_ranks = list(map(iter, self._gathered(own)))
                for of_round in of_layer.tolist():  # in each, a rank has computed consecutive parts
                    for rows, count in zip(of_ranks, of_round, strict=True):
                        for mean, variance in islice(rows, count):
                            _follow(layer, mean, variance)

    def _counts(self, seen: Sequence[Sequence[tuple[int, Any, Any]]]) -> torch.Tensor:
        """Return how many batches each layer has seen in each round on each rank; [layers, rounds, ranks]."""
        own = torch.zeros(len(seen), self.round + 1, dtype=torch.int64)
        for counts, of_layer in zip(own, seen, strict=True):
            for round_, *_ in of_layer:
                counts[round_] += 1
        return torch.stack(self._gathered(own.to(self._layers[0].running_mean.device)), dim=-1).cpu()

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
