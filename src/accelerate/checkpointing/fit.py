"""Checks that a saved state fits the object to load it into, before any object is changed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError
from ..torch_private.modules import adapts_state
from .quantized_state import is_statistic, packed_layers
from .run_state import StateDict

#: The names and shapes of an optimizer's parameters, by group; the name is None if no model has the parameter.
OptimizerLayout: TypeAlias = Sequence[Sequence[tuple[str | None, torch.Size]]]

# -------------------------------------------------------------------------------------------------- models


def require_fit(
    own: Mapping[str, object], state: Mapping[str, object], *, strict: bool, packed: Container[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the names missing from ``state`` and its unexpected names.

    Args:
        own: the live tensors by name, or tensors of their shapes; for a tied tensor one name is enough.
        packed: the names of weights whose packed bits may have another shape.

    Raises:
        RuntimeError: with ``strict``, for such names; always for a tensor of another shape.
    """
    filled = {id(own[name]) for name in state if name in own}
    missing = [name for name, value in own.items() if id(value) not in filled and not is_statistic(name)]
    unexpected = [name for name in state if name not in own and not (packed and is_statistic(name))]
    text = ""
    if strict:
        text = f"{listed('missing', missing)}{listed('unexpected', unexpected)}"
    for name, value in state.items():
        if name in own and name not in packed and not _is_shaped_like(value, own[name]):
            text += f" {name!r} has shape {_shape(value)} there, and {_shape(own[name])} here."
            break
    if text:
        raise RuntimeError(text)
    return missing, unexpected


def listed(what: str, names: Sequence[object]) -> str:
    """Format the first five ``names`` as a sentence; "" without names."""
    return f" {what} {', '.join(map(repr, names[:5]))}{', ...' if len(names) > 5 else ''}." if names else ""


def _is_shaped_like(saved: object, own: object) -> bool:
    if not isinstance(saved, torch.Tensor) or not isinstance(own, torch.Tensor) or is_lazy(own):
        return True
    return saved.shape == own.shape or (own.ndim == 0 and saved.shape == (1,))  # as modules load it


def _shape(value: object) -> list[int]:
    return list(value.shape) if isinstance(value, torch.Tensor) else []


def check_module(model: torch.nn.Module, state: StateDict, *, strict: bool) -> None:
    """Raise what ``model.load_state_dict(state)`` would raise, without changing the model.

    Raises:
        RuntimeError: names or shapes don't fit.
    """
    own: dict[str, Any] = model.state_dict(keep_vars=True)
    packed = {f"{name}.weight".lstrip(".") for name, _ in packed_layers(model)}
    try:
        require_fit(own, state, strict=strict, packed=packed)
    except RuntimeError:
        if packed or any(map(is_lazy, own.values())):
            raise
        with _put_back(model):  # hooks of the module may rename, or it may load in its own way, so try it
            model.load_state_dict(state, strict=strict)


@contextmanager
def _put_back(model: torch.nn.Module) -> Iterator[None]:
    """Enter a context that restores the parameters and buffers of ``model``, and their values, at its end."""
    tables: list[Any] = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    entries = [dict(table) for table in tables]
    live = {id(one): one for one in chain(model.parameters(), model.buffers()) if not one.is_meta}.values()
    values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in live]
    try:
        yield
    finally:
        for table, before in zip(tables, entries, strict=True):
            table.clear()
            table.update(before)
        for tensor, value in values:
            tensor.data.copy_(value)


# ---------------------------------------------------------------------------------------------- optimizers
#
# ``optimizer.state_dict()`` identifies parameters by number, and a model may have its modules in another order later.
# So the names are saved with it, and a load reorders the state to match the live parameters.

PARAMETER_NAMES: Final = "param_names"
#: The entries of torch's own optimizers that have the shape of their parameter.
_LIKE_PARAMETER: Final = frozenset(
    (
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "ax", "prev"),
    )
)

#: The entries of groups that aren't the optimizer's settings: parameters, and what torch's schedulers keep there.
_NOT_OF_OPTIMIZER: Final = frozenset(
    ("params", PARAMETER_NAMES, "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)


def with_names(state: StateDict, layout: OptimizerLayout) -> StateDict:
    """Return the optimizer's ``state`` with the names of its parameters, if all have one."""
    names = [[name for name, _ in group] for group in layout]
    if not _is_numbered(state) or not any(names) or None in chain.from_iterable(names):
        return state
    return {**state, PARAMETER_NAMES: names}


def by_name(
    state: StateDict, layout: OptimizerLayout, optimizer: object, known: Container[str], what: str
) -> tuple[StateDict, str]:
    """Return the saved ``state`` in the order of the live parameters, and a remark (or "").

    Args:
        layout: of the live parameters.
        known: the names of all parameters of the models.
        what: the optimizer, in errors and remarks.

    Raises:
        CheckpointError: the state is that of other parameters.
    """
    if not _is_numbered(state):
        return state, ""
    saved: list[list[str]] | None = state.get(PARAMETER_NAMES)
    state = {name: value for name, value in state.items() if name != PARAMETER_NAMES}
    live, remark = [[name for name, _ in group] for group in layout], ""
    of_saved, of_live = set(chain.from_iterable(saved or ())), set(chain.from_iterable(live))
    if None in of_live or not of_live:
        pass  # no model has them, so they have no names
    elif saved is None:
        remark = f"{what} was saved without the names of its parameters, so its state goes by their order"
    elif of_saved == of_live:
        if saved != live:
            if isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):
                raise CheckpointError(
                    f"{what} was saved with its parameters in another order, by which the state of LBFGS goes. Make "
                    "the model's modules in the same order, or load with model_only=True."
                )
            check_groups(saved, live, what)
            state = _in_order(state, saved, live)
    elif all(name in known for name in of_saved):
        raise CheckpointError(other_parameters(what, of_saved, of_live))
    else:
        stranger = next(name for name in sorted(of_saved) if name not in known)
        remark = f"{what} was saved with parameters that no model has now ({stranger!r}), so it goes by their order"
    sizes, own_sizes = [len(group["params"]) for group in state["param_groups"]], list(map(len, layout))
    if own_sizes and sizes != own_sizes and not adapts_state(getattr(optimizer, "optimizer", optimizer)):
        raise CheckpointError(
            f"{what} was saved with parameter groups of {_counts(sizes)} parameters, and has groups of "
            f"{_counts(own_sizes)} now. Make it with the same groups, or load with model_only=True."
        )
    check_settings(state["param_groups"], optimizer, what)
    _check_shapes(state["state"], [entry for group in layout for entry in group], what)
    return state, remark


def other_parameters(what: str, saved: Iterable[object], live: Iterable[object]) -> str:
    """Return the error message for an optimizer that trains other parameters than when it was saved."""
    saved, live = set(saved), set(live)
    gone, new = sorted(map(str, saved - live)), sorted(map(str, live - saved))
    parts = [f"it trained {listed('', gone).strip(' .')} then"] * bool(gone)
    parts += [f"it trains {listed('', new).strip(' .')} now"] * bool(new)
    return (
        f"{what} has other parameters than when it was saved: {', and '.join(parts)}. Train the same parameters, or "
        "load with model_only=True."
    )


def check_entry(name: str, key: object, shape: Sequence[int], own: Sequence[int], what: str) -> None:
    """Raise if the saved tensor ``key`` of a parameter's state should have the parameter's shape but hasn't.

    Raises:
        CheckpointError: it has another shape.
    """
    if key in _LIKE_PARAMETER and len(shape) and list(shape) != list(own):
        raise CheckpointError(
            f"{what} was saved for other parameters: {key} of {name} has shape {list(shape)} there, and {list(own)} "
            "here."
        )


def check_groups(saved: Sequence[Sequence[str]], live: Sequence[Sequence[str | None]], what: str) -> None:
    """Raise if the saved and the live parameter groups combine different parameters.

    Raises:
        CheckpointError: the text names two such parameters.
    """
    group_of = {name: set(names) for names in saved for name in names}
    for names in live:
        together = group_of.get(names[0] or "", set()) if names else set()
        apart = sorted(map(str, together.symmetric_difference(names)))
        if apart:
            raise CheckpointError(
                f"{what} was saved with other parameter groups: {names[0]!r} and {apart[0]!r} share one there or here, "
                "and not in both, so their settings can't be told. Make it with the same groups, or load with "
                "model_only=True."
            )


def check_settings(groups: Iterable[Iterable[str]], optimizer: object, what: str) -> None:
    """Raise if the names of the groups' settings are those of another kind of optimizer.

    New releases of torch add settings, and so do schedulers. So it raises only if each side has settings that the other
    lacks.

    Raises:
        CheckpointError: the text lists these settings.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        return
    saved, live = (set(chain.from_iterable(each)) - _NOT_OF_OPTIMIZER for each in (groups, inner.param_groups))
    gone, new = sorted(saved - live), sorted(set(inner.defaults) - saved)
    if gone and new:
        raise CheckpointError(
            f"{what} was saved by another kind of optimizer: its settings have {', '.join(gone)} there, and "
            f"{', '.join(new)} here. Make the same optimizer, or load with model_only=True."
        )


def _check_shapes(state: Mapping[object, object], live: Sequence[tuple[str | None, torch.Size]], what: str) -> None:
    for number, entries in state.items():
        if not isinstance(number, int) or number >= len(live) or not isinstance(entries, Mapping):
            continue
        name, shape = live[number]
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                check_entry(repr(name or number), key, value.shape, shape, what)


def _is_numbered(state: object) -> bool:
    """Return whether ``state`` has the format of torch's optimizer state dicts."""
    if not isinstance(state, Mapping):
        return False
    groups, states = state.get("param_groups"), state.get("state")
    return isinstance(groups, list) and isinstance(states, Mapping) and not any(isinstance(key, str) for key in states)


def _in_order(
    state: StateDict, saved: Sequence[Sequence[str | None]], live: Sequence[Sequence[str | None]]
) -> StateDict:
    numbers: dict[str | None, Any] = dict(
        zip(chain(*saved), chain(*(group["params"] for group in state["param_groups"])), strict=True)
    )
    settings: dict[str | None, Any] = {
        name: group for group, names in zip(state["param_groups"], saved, strict=True) for name in names
    }
    states: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for position, names in enumerate(live):
        first = sum(map(len, live[:position]))
        group = settings[names[0]] if names else state["param_groups"][position]
        groups.append({**group, "params": list(range(first, first + len(names)))})
        groups[-1].pop("param_names", None)  # torch's own entry: the live group keeps its names
        for number, name in enumerate(names, start=first):
            if numbers[name] in state["state"]:
                states[number] = state["state"][numbers[name]]
    return {**state, "state": states, "param_groups": groups}


def _counts(sizes: Sequence[int]) -> str:
    return " and ".join(map(str, sizes)) or "no"
