"""Access to the state of DeepSpeed engines: the engine's own folder to resume, full weights for other strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch

from ...checkpointing.fit import require_fit
from ...checkpointing.run_state import StateDict
from ...checkpointing.sharded import StateAccess
from ...errors import CheckpointError
from ...logging import MultiProcessAdapter, get_logger
from ...names import engine_tag
from ...optional import require
from ...torch_private.modules import loaded
from .engine import Engine, GatheredParameters, is_engine, is_partitioned

logger: MultiProcessAdapter = get_logger(__name__)


@final
class EngineState(StateAccess):
    """Access to the state of engines: full weights, and optimizer state only in the engine's own folder.

    Models without an engine (prepared for evaluation) are accessed directly.
    """

    trusts_engine = True  # DeepSpeed itself unpickles its files

    def buffers(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the live buffers in a state dict, by the user's names."""
        return super().buffers(model.module if is_engine(model) else model)

    def restorer(
        self, model: torch.nn.Module, folder: Path, index: int, *, model_only: bool = False, **options: object
    ) -> Callable[[], object] | None:
        """Return a function that loads the engine's own folder if an identical engine saved it on as many ranks."""
        if not is_engine(model):
            return None
        tag = engine_tag(index)
        saved, own = _saved_layout(folder / tag), _own_layout(model)
        if saved != own:
            logger.warning(
                "%s was saved by %s, and is loaded by %s: the model gets its weights, and the optimizer starts anew.",
                folder,
                saved,
                own,
            )
            return None

        def restore() -> None:
            path, _ = model.load_checkpoint(
                str(folder),
                tag=tag,
                load_module_strict=bool(options.get("strict", True)),
                load_optimizer_states=not model_only,
                load_lr_scheduler_states=not model_only,
                load_module_only=model_only,
            )
            if path is None:
                raise CheckpointError(f"DeepSpeed could not load {folder / tag}; its own log says why.")

        return restore

    def load_target(self, model: torch.nn.Module) -> Any:
        """Return a load target that takes full tensors for the engine's partitioned parameters."""
        return _Receiver(model) if is_engine(model) else super().load_target(model)

    def full_model_state(self, model: torch.nn.Module, keeps: bool) -> dict[str, object]:
        """Return full weights in CPU memory, in full precision if the engine has it; a collective."""
        return full_weights(model, keeps) if is_engine(model) else super().full_model_state(model, keeps)

    def model_shards(self, model: torch.nn.Module) -> dict[str, object]:
        """Return, for an engine, empty tensors of the full shapes to read into."""
        if not is_engine(model):
            return super().model_shards(model)
        return _empty_state(model, "cpu", floats=torch.float32)

    def load_model_shards(self, model: torch.nn.Module, shards: dict[str, Any]) -> None:
        """Load ``shards`` into the model or its engine."""
        if is_engine(model):
            load_full_weights(model, shards)
        else:
            super().load_model_shards(model, shards)

    def _refuse(self, *_: object, **__: object) -> Any:
        """Raise: the engine saves and loads its optimizer itself."""
        raise CheckpointError("The state of DeepSpeed's optimizer is saved and loaded by its engine only.")

    layouts = optimizer_layout = _refuse
    optimizer_shards = load_optimizer_shards = full_optimizer_state = load_full_optimizer_state = _refuse


def _saved_layout(folder: Path) -> str:
    """Describe the layout with which ``folder`` was saved, in the terms of :func:`_own_layout`."""
    if not folder.is_dir():
        return "another strategy"
    num_pieces = len(list(folder.glob("*_optim_states.pt")))
    if not num_pieces:
        return "DeepSpeed without ZeRO"
    is_in_pieces = any(folder.glob("*zero_pp_rank_*_model_states.pt"))
    return f"{num_pieces} ranks with ZeRO stage {'3' if is_in_pieces else '1 or 2'}"


def _own_layout(engine: Engine) -> str:
    stage = int(engine.zero_optimization_stage())
    if stage == 0:
        return "DeepSpeed without ZeRO"
    return f"{torch.distributed.get_world_size()} ranks with ZeRO stage {'3' if stage == 3 else '1 or 2'}"


@final
class _Receiver:
    """An engine as a load target for full tensors."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self, keep_vars: bool = True) -> StateDict:
        """Return names and shapes; tied names share one tensor."""
        return _empty_state(self._engine, "meta")

    def load_state_dict(self, state: StateDict, strict: bool = True, **_: object) -> object:
        """Load ``state`` into the engine; a tied tensor may have only one of its names."""
        live = self.state_dict()
        missing, unexpected = require_fit(live, state, strict=strict)
        # Tensors that a Selection left out are the meta tensors of state_dict().
        load_full_weights(self._engine, {name: v for name, v in state.items() if name in live and not v.is_meta})
        return loaded(missing, unexpected)


def full_weights(engine: Engine, keeps: bool, *, half: bool = False) -> dict[str, object]:
    """Return the engine's full state dict in CPU memory on ranks where ``keeps`` is true; a collective.

    Tensors are gathered one by one, in full precision if the engine has it, or with ``half`` in the model's compute
    dtype. Tied names share one tensor.
    """
    masters = None if half else require("deepspeed.utils", "deepspeed").safe_get_full_fp32_param
    gathered: dict[int, torch.Tensor | None] = {}
    state: dict[str, object] = {}
    for name, value in _named_state(engine.module):
        if id(value) not in gathered:
            gathered[id(value)] = _full_tensor(value, masters, keeps)
        if keeps:
            state[name] = gathered[id(value)]
    return state


def _full_tensor(
    value: torch.Tensor, masters: Callable[[torch.Tensor], torch.Tensor | None] | None, keeps: bool
) -> torch.Tensor | None:
    if masters is not None and isinstance(value, torch.nn.Parameter) and value.requires_grad:
        master = masters(value)
        if master is not None:
            return master.detach().reshape(_shape(value)).to("cpu", copy=True) if keeps else None
    with GatheredParameters([value]):  # a copy: the engine's parameters are views of flat buffers
        return value.detach().to("cpu", copy=True) if keeps else None


def load_full_weights(engine: Engine, state: StateDict) -> None:
    """Load ``state`` into the engine's model and into its full-precision master weights; a collective.

    Every rank needs ``state``.
    """
    tools = require("deepspeed.utils", "deepspeed")
    optimizer = engine.optimizer
    with torch.no_grad():
        for name, value in _named_state(engine.module):
            if name in state:
                with GatheredParameters([value], modifier_rank=0):
                    value.data.copy_(state[name].to(value.device))
        refresh = getattr(optimizer, "refresh_fp32_params", None)
        if refresh is not None:
            refresh()
        for name, value in _named_state(engine.module):
            if name in state and isinstance(value, torch.nn.Parameter) and value.requires_grad:
                # In the saved precision, so that it equals the model's own weights.
                _set_master(tools, value, state[name].to(device=value.device, dtype=torch.float32))


def _set_master(tools: ModuleType, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the full-precision master weight of ``parameter`` to ``value``."""
    if is_partitioned(parameter):
        # Set it shard by shard, because DeepSpeed's own division ignores the padding of the last rank's shard.
        size = tools.safe_get_local_fp32_param(parameter).numel()
        start = size * torch.distributed.get_rank(parameter.ds_process_group)
        piece = value.flatten()[start : start + size]
        tools.safe_set_local_fp32_param(parameter, torch.nn.functional.pad(piece, (0, size - piece.numel())))
    else:
        tools.safe_set_full_fp32_param(parameter, value)


def _named_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over parameters and persistent buffers under all their names, without gathering."""
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _empty_state(engine: Engine, device: str, floats: torch.dtype | None = None) -> dict[str, Any]:
    """Return empty tensors of the full shapes, in their own dtype or in that of ``floats``; tied names share one."""
    made: dict[int, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in _named_state(engine.module):
        if id(value) not in made:
            dtype = floats if floats is not None and value.is_floating_point() else value.dtype
            made[id(value)] = torch.empty(_shape(value), dtype=dtype, device=device)
        state[name] = made[id(value)]
    return state


def _shape(value: torch.Tensor) -> torch.Size:
    return torch.Size(value.ds_shape) if is_partitioned(value) else value.shape
