"""The outer weights of a model, and the exchange of one fragment of it between islands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import nn

from ...errors import NotBuilt, SettingError
from .compression import Codec
from .islands import Islands, sharded_optimizers

if TYPE_CHECKING:
    from ...accelerator import Accelerator

#: Makes the optimizer of outer weights, which are flat and in float32.
OuterOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, or a plain tensor itself, sharing its memory."""
    local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)
    return tensor.detach() if local is None else local().detach()


@torch.no_grad()
def average_optimizer_states(run: Accelerator, model: torch.nn.Module, islands: Islands) -> int:
    """Set the optimizer states of ``model`` to their mean over the islands; return the bytes that leave.

    With equal weights but other momentum, replicas would part again at the next update. State that isn't of
    floating-point numbers is that of the first island. Where only some ranks have state of a parameter, because the
    others never used it, it begins anew on all.
    """
    optimizers = sharded_optimizers(run)
    parameters = [one for _, one in run.strategy.state.named_parameters(model)]
    states = {
        (number, place): optimizer.state[parameter]
        for number, optimizer in enumerate(optimizers)
        for place, parameter in enumerate(parameters)
        if optimizer.state.get(parameter)
    }
    found = islands.gather_object(list(states))
    common = set(states).intersection(*found)
    averaged = {number for number, _ in common}
    for number, place in states.keys() - common:
        if number in averaged:
            del optimizers[number].state[parameters[place]]
    values = (value for key in sorted(common) for value in states[key].values())
    return islands.average([local_values(one) for one in values if isinstance(one, torch.Tensor) and not one.is_meta])


@final
class OuterWeight:
    """The outer weights of one parameter on this rank, and what compression has left of its changes.

    A rank with a shard keeps those of its shard. Where the ranks of an island hold replicas, each keeps an equal part.

    Args:
        part: the number of this rank's part, and of all parts.
    """

    def __init__(self, name: str, parameter: torch.Tensor, part: tuple[int, int]) -> None:
        if torch.promote_types(parameter.dtype, torch.float32) != torch.float32:
            raise NotBuilt(
                f"DiLoCo keeps outer weights in float32, but {name!r} is {parameter.dtype}. Train in float32 or bf16."
            )
        self.name = name
        self._parameter, self._index, self._count = parameter, *part
        self.outer: nn.Parameter = nn.Parameter(self.current())
        self.error: torch.Tensor = torch.zeros_like(self.outer)

    @property
    def num_values(self) -> int:
        """The number of values that this rank has of the parameter."""
        return self._values.numel()

    @property
    def _values(self) -> torch.Tensor:
        return local_values(self._parameter)

    def part_of(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of flat ``values``, as a copy in float32."""
        padded = nn.functional.pad(values.to(torch.float32), (0, -values.numel() % self._count))
        return padded.view(self._count, -1)[self._index].clone()

    def current(self) -> torch.Tensor:
        """Return this rank's part of the parameter's current values."""
        return self.part_of(self._values.reshape(-1))

    def change(self) -> torch.Tensor:
        """Return what is to be sent: outer weights minus current ones, and what was left of earlier changes."""
        # Rounded as the model has them: without training there is no change.
        begin = self.outer.detach().to(self._parameter.dtype).to(torch.float32)
        change = begin - self.current() + self.error
        change[max(0, self.num_values - self._index * change.numel()) :] = 0  # what only makes parts equal in size
        return change

    def assign(self, outer: torch.Tensor, kept: float) -> None:
        """Set the parameter to the outer weights of all parts, mixed with the share ``kept`` of its own values."""
        values = self._values
        outer = outer.reshape(-1)[: values.numel()].view(values.shape)
        values.copy_(outer if kept == 0 else values.to(torch.float32) * kept + outer * (1 - kept))


@final
@dataclass
class Arriving:
    """The mean change of a fragment that was sent and not yet applied.

    Attributes:
        due: the step at which it is applied.
        receive: waits for it, if it isn't known yet.
        means: the mean by parameter, once it is known.
    """

    due: int
    receive: Callable[[], list[torch.Tensor]] | None
    means: list[torch.Tensor] | None = None

    def take(self) -> list[torch.Tensor]:
        """Return the mean change of each parameter."""
        if self.means is None:
            assert self.receive is not None, "sent, or loaded"
            self.means, self.receive = self.receive(), None
        return self.means


@final
class Fragment:
    """Some parameters of the model, which are exchanged together.

    Args:
        offset: the first step after which it is sent.

    Raises:
        SettingError: ``optimizer`` didn't make an optimizer of all outer weights.
    """

    def __init__(
        self, weights: Sequence[OuterWeight], offset: int, islands: Islands, codec: Codec, optimizer: OuterOptimizer
    ) -> None:
        self.weights: list[OuterWeight] = list(weights)
        self.offset = offset
        given = [weight.outer for weight in self.weights]
        self.optimizer: torch.optim.Optimizer = optimizer(given)
        groups: Any = getattr(self.optimizer, "param_groups", [])
        if {id(parameter) for group in groups for parameter in group["params"]} != {*map(id, given)}:
            raise SettingError(
                f"DiLoCo(outer_optimizer=...): the function returned a {type(self.optimizer).__name__}, not an "
                "optimizer of all parameters that it was given. Return `torch.optim.SGD(parameters, lr=0.7)`, for "
                "example."
            )
        self.arriving: Arriving | None = None
        self._islands, self._codec = islands, codec

    def send(self, due: int) -> int:
        """Begin to exchange the changes since the last exchange; return the bytes that leave this rank."""
        encoded: list[torch.Tensor] = []
        for weight in self.weights:
            change = weight.change()
            encoded.append(self._codec.encode(change))
            if not self._codec.is_exact:
                weight.error = change - self._codec.decode(encoded[-1], change.numel())
        sizes = [one.numel() for one in encoded]
        arrived = self._islands.gather(torch.cat(encoded))

        def receive() -> list[torch.Tensor]:
            rows = [row.split(sizes) for row in arrived()]
            return [
                _mean(self._codec.decode(row[number], weight.outer.numel()) for row in rows)
                for number, weight in enumerate(self.weights)
            ]

        self.arriving = Arriving(due, receive)
        return sum(sizes) * (self._islands.count - 1)

    def apply(self, kept: float) -> None:
        """Step the outer weights by the mean change, and mix the parameters with them.

        Args:
            kept: the share of the parameters' own values; with 0 they are equal on all islands.
        """
        assert self.arriving is not None, "sent before"
        for weight, mean in zip(self.weights, self.arriving.take(), strict=True):
            weight.outer.grad = mean
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.arriving = None
        self._assign(kept)

    def average(self) -> int:
        """Set outer weights and parameters to the mean of the islands' parameters; return the bytes that leave."""
        own = torch.cat([weight.current() - weight.error for weight in self.weights])
        means = _mean(iter(self._islands.gather(own)())).split([weight.outer.numel() for weight in self.weights])
        for weight, mean in zip(self.weights, means, strict=True):
            weight.outer.detach().copy_(mean)
        self.begin()
        return own.nbytes * (self._islands.count - 1)

    def state(self) -> dict[str, Any]:
        """Return what is equal on all islands: the outer weights, their optimizer and the change on its way."""
        return {
            "names": [weight.name for weight in self.weights],
            "outer": [weight.outer.detach() for weight in self.weights],
            "optimizer": self.optimizer.state_dict(),
            "due": None if self.arriving is None else self.arriving.due,
            "means": None if self.arriving is None else self.arriving.take(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved state, or with that of another island."""
        for weight, outer in zip(self.weights, state["outer"], strict=True):
            weight.outer.detach().copy_(outer)
        self.optimizer.load_state_dict(state["optimizer"])
        self.arriving = None
        if state["due"] is not None:
            means = [mean.to(weight.outer.device) for mean, weight in zip(state["means"], self.weights, strict=True)]
            self.arriving = Arriving(state["due"], None, means)

    def begin(self) -> None:
        """Set the parameters to the outer weights; nothing is left of compression."""
        for weight in self.weights:
            weight.error.zero_()
        self._assign(0.0)

    def _assign(self, kept: float) -> None:
        outer = torch.cat([weight.outer.detach() for weight in self.weights])
        rows = outer.unsqueeze(0)
        if self._islands.holds_replicas and self._islands.num_parts > 1:
            rows = self._islands.gather_inside(outer)
        columns = rows.split([weight.outer.numel() for weight in self.weights], dim=1)
        for weight, column in zip(self.weights, columns, strict=True):
            weight.assign(column, kept)


def _mean(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the mean of ``rows``, added in their order: the same bits on every rank."""
    total, count = torch.tensor(0.0), 0
    for row in rows:
        total, count = (row.clone() if count == 0 else total.add_(row)), count + 1
    return total.div_(count)


def divide(weights: Sequence[OuterWeight], sizes: Sequence[int], count: int) -> list[list[OuterWeight]]:
    """Divide ``weights`` among ``count`` fragments of about equal size, so that each has layers of all depths.

    Args:
        sizes: the size of each whole parameter, equal on all ranks.
    """
    fragments: list[list[OuterWeight]] = [[] for _ in range(count)]
    totals = [0] * count
    for weight, size in zip(weights, sizes, strict=True):
        smallest = totals.index(min(totals))
        fragments[smallest].append(weight)
        totals[smallest] += size
    return [fragment for fragment in fragments if fragment]
