"""The model of a training script: it runs until it calls ``prepare``, with parameters that take no memory."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import DataLoader

from ..accelerator import Accelerator
from ..big_modeling import init_empty_weights
from ..errors import PreparationError


class _Reached(BaseException):
    """The script has come to ``prepare``; no ``except Exception`` of its own stops that."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = objects


@final
class FromScript:
    """What a script gives to its first ``prepare`` call: a model, and perhaps its optimizer and its batches."""

    def __init__(self, path: str, arguments: Sequence[str] = ()) -> None:
        """Run the script up to there.

        Raises:
            PreparationError: it ends or fails before, or prepares no model.
        """
        self.name = path
        objects = _objects_of(path, arguments)
        models = [each for each in objects if isinstance(each, nn.Module)]
        if not models:
            raise PreparationError(
                f"{path}: the first accelerator.prepare() has no model. Give a function that builds it: "
                f"'{Path(path).name}:function'."
            )
        self._model = models[0]
        self._optimizer = next((each for each in objects if isinstance(each, torch.optim.Optimizer)), None)
        loader = next((each for each in objects if isinstance(each, DataLoader)), None)
        self._batch = None if loader is None else next(iter(loader))

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of the script; None where it prepares no loader."""
        from ..nested import ignorant_find_batch_size

        return None if self._batch is None else ignorant_find_batch_size(self._batch)

    @property
    def optimizer(self) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None:
        """Makes the script's kind of optimizer; None where it prepares none."""
        used = self._optimizer
        return None if used is None else lambda parameters: type(used)(parameters, **_own(used))

    def build(self) -> nn.Module:
        """The script's model."""
        import copy

        return copy.deepcopy(self._model)

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> Mapping[str, Any] | tuple[Any, ...] | None:
        """The script's own batch: as keywords, or its first tensor."""
        if self._batch is None or isinstance(self._batch, Mapping):
            return self._batch
        return (self._batch[0] if isinstance(self._batch, (list, tuple)) else self._batch,)


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"lr": optimizer.defaults.get("lr", 1e-3), "foreach": optimizer.defaults.get("foreach")}


def _objects_of(path: str, arguments: Sequence[str]) -> Sequence[Any]:
    def reached(_: Any, *objects: Any, **__: Any) -> None:
        raise _Reached(objects)

    before, words, folders = Accelerator.prepare, sys.argv, list(sys.path)
    Accelerator.prepare = reached  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with init_empty_weights():
            runpy.run_path(path, run_name="__main__")
    except _Reached as found:
        return found.objects
    except (Exception, SystemExit) as error:  # a script can fail in every way
        raise PreparationError(
            f"{path} can't be run up to accelerator.prepare() with parameters that take no memory: "
            f"{type(error).__name__}: {error}. Give its arguments after --, or a function that builds the model: "
            f"'{Path(path).name}:function'."
        ) from error
    finally:
        Accelerator.prepare = before
        sys.argv, sys.path[:] = words, folders
    raise PreparationError(
        f"{path} ended without accelerator.prepare(). Give a function that builds the model: "
        f"'{Path(path).name}:function'."
    )
