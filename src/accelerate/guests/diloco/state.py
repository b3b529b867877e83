"""The state of islands in a checkpoint: outer weights, what was left or sent, and each island's own training state.

Each rank writes one file of its outer weights. Where an island's ranks are replicas, the first one also writes the
island's weights, buffers and optimizer states, else each rank those of its shards. With another number of islands, new
ones take the state of an earlier one, and what was left on islands that are gone is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import torch

from ...checkpointing.codec import encode
from ...checkpointing.layout import read_state, write_encoded
from ...errors import CheckpointError
from ...modules import is_sharded
from .fragments import Fragment, OuterWeight, local_values
from .islands import Islands, sharded_optimizers

if TYPE_CHECKING:
    from ...accelerator import Accelerator

_FOLDER: Final = "diloco"
#: Gives this rank's part of a saved value, from those of all parts.
_Fit: TypeAlias = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@final
class DiLoCoState:
    """The state of this rank, to write it or to continue from it."""

    def __init__(
        self, run: Accelerator, model: torch.nn.Module, islands: Islands, fragments: Sequence[Fragment]
    ) -> None:
        self._run, self._model, self._islands, self._fragments = run, model, islands, fragments
        #: By part of the island; empty if the checkpoint has no state of DiLoCo.
        self._parts: list[dict[str, Any]] = []
        self._own: list[dict[str, Any]] = []
        self._inner: dict[str, Any] = {}

    # -- saving --------------------------------------------------------------------------------------------

    def write(self, folder: Path, num_steps: int) -> None:
        """Write this rank's file into the ``folder`` of a checkpoint."""
        islands = self._islands
        (folder / _FOLDER).mkdir(exist_ok=True)
        index, count = islands.saved
        writes_inner = islands.part == 0 or not islands.holds_replicas
        state = {
            "num_steps": num_steps,
            "num_islands": count,
            "num_parts": islands.num_parts,
            "holds_replicas": islands.holds_replicas,
            "fragments": [
                {**fragment.state(), "error": [weight.error for weight in fragment.weights]}
                for fragment in self._fragments
            ],
            "inner": self._inner_state() if writes_inner else None,
        }
        write_encoded(
            lambda name, pickle=False: (folder / name).open("wb"),
            _name(index, islands.part),
            encode(state, "DiLoCo"),
            beside=True,
        )

    def _inner_state(self) -> dict[str, Any]:
        return {
            "parameters": [local_values(parameter) for parameter in _held(self._model.parameters())],
            "buffers": [local_values(buffer) for buffer in _held(self._model.buffers())],
            "optimizers": [
                [_local_state(optimizer.state.get(parameter, {})) for parameter in _trained(optimizer)]
                for optimizer in sharded_optimizers(self._run)
            ],
        }

    # -- loading -------------------------------------------------------------------------------------------

    def read(self, folder: Path) -> None:
        """Read the state of the islands from the ``folder`` of a checkpoint.

        Raises:
            CheckpointError: the shards of an island were others, or the model was divided into other fragments.
        """
        if not (folder / _FOLDER).is_dir():
            return
        islands = self._islands
        first = read_state(folder, _name(0, 0))
        if first["holds_replicas"] != islands.holds_replicas or (
            not islands.holds_replicas and first["num_parts"] != islands.num_parts
        ):
            raise CheckpointError(
                f"{folder} has islands of {first['num_parts']} processes, and this run has islands of "
                f"{islands.num_parts}. Only their number may change where they hold shards: start with as many "
                "processes for each island."
            )
        source = islands.index % first["num_islands"]
        places = range(first["num_parts"]) if islands.holds_replicas else [islands.part]
        self._parts = [read_state(folder, _name(source, place)) for place in places]
        saved = [fragment["names"] for fragment in self._parts[0]["fragments"]]
        if saved != [[weight.name for weight in fragment.weights] for fragment in self._fragments]:
            raise CheckpointError(
                f"{folder} has other fragments of the model than this run. Give DiLoCo the same model and fragments=."
            )
        self._inner = self._parts[0]["inner"]
        if islands.index >= first["num_islands"]:  # what was left belongs to the island of that number
            for part in self._parts:
                for fragment in part["fragments"]:
                    fragment["error"] = [torch.zeros_like(error) for error in fragment["error"]]

    def apply(self) -> int:
        """Set the state that was read, and return the number of updates."""
        if not self._parts:
            self._start_anew()
            return 0
        self._apply_inner()
        for number, fragment in enumerate(self._fragments):
            saved = [part["fragments"][number] for part in self._parts]
            fits = [_fit(weight, self._islands.holds_replicas) for weight in fragment.weights]
            own = {"due": saved[0]["due"], "optimizer": _fitted([one["optimizer"] for one in saved], fits)}
            for name in ("outer", "error", *(["means"] if saved[0]["due"] is not None else [])):
                own[name] = [fit([one[name][position] for one in saved]) for position, fit in enumerate(fits)]
            fragment.restore(own)
            for weight, error in zip(fragment.weights, own["error"], strict=True):
                weight.error = error.to(weight.outer.device)
        return self._parts[0]["num_steps"]

    def _start_anew(self) -> None:
        """Begin with the weights that were loaded, because the checkpoint is of a run without DiLoCo."""
        for fragment in self._fragments:
            fragment.arriving = None
            fragment.optimizer.state.clear()
            for weight in fragment.weights:
                weight.outer.detach().copy_(weight.current())
                weight.error.zero_()

    def _apply_inner(self) -> None:
        """Set the weights, buffers and optimizer states of this island, over those of the first."""
        for name, tensors in (("parameters", self._model.parameters()), ("buffers", self._model.buffers())):
            for tensor, saved in zip(_held(tensors), self._inner[name], strict=True):
                local_values(tensor).copy_(saved)
        for optimizer, states in zip(sharded_optimizers(self._run), self._inner["optimizers"], strict=True):
            for parameter, saved in zip(_trained(optimizer), states, strict=True):
                if not saved:  # an island that hasn't used it
                    optimizer.state.pop(parameter, None)
                for name, value in saved.items():
                    known = optimizer.state[parameter].get(name)
                    if isinstance(value, torch.Tensor) and isinstance(known, torch.Tensor):
                        local_values(known).copy_(value)
                    else:
                        optimizer.state[parameter][name] = _placed_as(parameter, value)


def _name(island: int, part: int) -> str:
    return f"{_FOLDER}/island_{island}_part_{part}"


def _held(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``tensors`` without those of other pipeline stages."""
    return [tensor for tensor in tensors if not tensor.is_meta]


def _trained(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _placed_as(parameter: Any, value: Any) -> Any:
    """Return a saved ``value`` of optimizer state on the device of ``parameter``; a shard in its layout."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    local = value.to(parameter.device)
    if not is_sharded(parameter) or local.shape != local_values(parameter).shape:
        return local
    from ...parallel.matrix_optimizer import sharded_as

    return sharded_as(parameter, local)


def _local_state(state: dict[str, Any]) -> dict[str, Any]:
    return {name: local_values(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _fit(weight: OuterWeight, holds_replicas: bool) -> _Fit:
    """Return the function that gives this rank's part of a value of ``weight``."""

    def fit(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if not holds_replicas:
            return parts[0]
        return weight.part_of(torch.cat(list(parts))[: weight.num_values])

    return fit


def _fitted(saved: Sequence[dict[str, Any]], fits: Sequence[_Fit]) -> dict[str, Any]:
    """Return this rank's part of the state of a fragment's optimizer."""
    state: dict[int, dict[str, Any]] = {}
    for number, values in saved[0]["state"].items():
        fit = fits[int(number)]
        state[int(number)] = {
            name: fit([one["state"][number][name] for one in saved])
            if isinstance(value, torch.Tensor) and value.ndim
            else value
            for name, value in values.items()
        }
    return {**saved[0], "state": state}
