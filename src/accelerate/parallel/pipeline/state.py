"""Access to state that is distributed over pipeline stages, with the names and the order of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import distributed as dist

from ...checkpointing.sharded import NamedParameters, ShardedModel, StateAccess, gather_tensor
from ...distributed.mesh import Mesh
from ..matrix_optimizer import shard_state
from ..rebind import canonical_name


@final
class StageAccess(StateAccess):
    """Access to models whose tensors have values on their stages' ranks, and are on the meta device elsewhere."""

    def __init__(self, mesh: Mesh, device: torch.device, named_parameters: NamedParameters) -> None:
        super().__init__(named_parameters, canonical_name)
        self._mesh, self._device = mesh, device

    # -- models --------------------------------------------------------------------------------------------

    def load_target(self, model: torch.nn.Module) -> ShardedModel:
        """Return a load target that takes full state dicts and keeps this rank's tensors."""
        return ShardedModel(self, model)

    def full_model_state(self, model: torch.nn.Module, keeps: bool) -> dict[str, object]:
        """Broadcast each tensor from its stage, and return the state dict; tied names share one tensor."""
        owners: dict[str, tuple[int, ...]] = model.__dict__["owners"]  # of a PipelinedModel
        state: dict[str, object] = {}
        sent: dict[int, torch.Tensor | None] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                state[name] = tensor
                continue
            if id(tensor) not in sent:
                sent[id(tensor)] = self._send(tensor, owners[name][0], keeps)
            if keeps:
                state[canonical_name(name)] = sent[id(tensor)]
        return state if keeps else {}

    def _send(self, tensor: torch.Tensor, owner: int, keeps: bool) -> torch.Tensor | None:
        """Broadcast ``tensor`` from the pipeline rank ``owner``, and return it in CPU memory if ``keeps``."""
        if owner == self._mesh.place("pp"):
            value = gather_tensor(tensor).to(self._device).contiguous()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        dist.broadcast(value, self._mesh.ranks("pp")[owner], self._mesh.group("pp"))
        return value.cpu() if keeps else None

    # -- optimizers ----------------------------------------------------------------------------------------

    def load_optimizer_shards(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], shards: dict[str, Any]
    ) -> None:
        """Load the optimizer state of this rank's stages, and drop that of other stages."""
        super().load_optimizer_shards(optimizer, models, shards)
        _drop_state_of_other_stages(optimizer)

    def full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], keeps: bool
    ) -> dict[str, object]:
        """Return the optimizer state for the parameters of all stages, by number; a collective."""
        shard_state(optimizer)
        own = optimizer.state_dict()
        parts: list[Any] = [None] * self._mesh.size("pp")
        outline = {
            number: {key: _without_values(value) for key, value in entries.items()}
            for number, entries in own["state"].items()
        }
        dist.all_gather_object(parts, outline, self._mesh.group("pp"))
        state: dict[int, dict[str, Any]] = {}
        for owner, part in enumerate(parts):
            for number, entries in part.items():
                if number in state:  # a parameter that several stages have
                    continue
                state[number] = {}
                for key, value in entries.items():
                    if isinstance(value, torch.Tensor):  # only its shape
                        mine = own["state"][number][key] if owner == self._mesh.place("pp") else value
                        value = self._send(mine, owner, keeps)
                    state[number][key] = value
        return {**own, "state": dict(sorted(state.items()))} if keeps else {}

    def load_full_optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module], state: dict[str, Any]
    ) -> None:
        """Load the optimizer state of this rank's stages, and drop that of other stages."""
        super().load_full_optimizer_state(optimizer, models, state)
        _drop_state_of_other_stages(optimizer)


def _without_values(value: object) -> object:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value


def _drop_state_of_other_stages(optimizer: torch.optim.Optimizer) -> None:
    for parameter in [parameter for parameter in optimizer.state if parameter.is_meta]:
        del optimizer.state[parameter]
