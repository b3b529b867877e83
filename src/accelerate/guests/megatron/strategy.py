"""Megatron-LM builds and trains a tensor, pipeline, context or expert parallel model; this strategy sets its arguments.

Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019. The
arguments are inferred from the prepared objects; model, optimizer and schedule are Megatron's own (decision 021).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final

import torch
from torch.utils.data import DataLoader

from ...checkpointing import StagingDirectory
from ...checkpointing.layout import holds_engine_state
from ...checkpointing.run_state import Stateful, StrategyState
from ...checkpointing.sharded import StateAccess
from ...distributed.world import World
from ...errors import CheckpointError, NotBuilt, PreparationError, SettingError
from ...names import engine_tag
from ...optional import require
from ...parallel.base import (
    Clipping,
    PreparedArgument,
    PreparedArguments,
    Reduction,
    Role,
    Strategy,
    StrategyOptions,
    refuse_placeholders,
)
from ...parallel.rebind import canonical_name
from ...parallel.state import HeldTensor, ModelState
from ...precision import Precision
from ...settings.labels import DistributedType
from .engine import PURPOSE, MegatronEngine, MegatronLMOptimizerWrapper, MegatronLMSchedulerWrapper
from .plugin import MegatronLMDummyDataLoader, MegatronLMDummyScheduler, MegatronLMPlugin

if TYPE_CHECKING:
    from argparse import ArgumentParser

Batch = TypeVar("Batch")


@final
class Megatron(Strategy):
    """The strategy for Megatron-LM, which builds model, optimizer, schedule and data from its arguments."""

    reduction: ClassVar[Reduction] = Reduction(one_backward="Megatron-LM updates the parameters inside its own step")

    def __init__(self, world: World, options: StrategyOptions) -> None:
        super().__init__(world, options)
        self._engine: MegatronEngine | None = None

    @property
    def label(self) -> DistributedType:
        """The distributed type: MEGATRON_LM."""
        return DistributedType.MEGATRON_LM

    @property
    def plugin(self) -> MegatronLMPlugin:
        """The current MegatronLMPlugin."""
        plugin = self.options.plugins.engine
        assert isinstance(plugin, MegatronLMPlugin)  # this strategy is chosen for it
        return plugin

    # -- placing -------------------------------------------------------------------------------------------

    def check(self, arguments: PreparedArguments) -> None:
        """Raise unless one model comes with an optimizer of a known kind and data, and without its own schedule."""
        refuse_placeholders(arguments, PURPOSE)
        models = [one for one in arguments.of(Role.MODEL) if not isinstance(one.current, MegatronEngine)]
        if arguments.has_placements:
            raise PreparationError(
                "You can't customize device placements with DeepSpeed or Megatron-LM: leave `device_placement` out."
            )
        if len(models) > 1 or (models and self._engine is not None):
            raise PreparationError(
                "Megatron-LM builds one model: prepare one, and use another process (or another strategy) for others."
            )
        for argument in arguments.of(Role.SCHEDULER):
            if not isinstance(argument.current, (MegatronLMDummyScheduler, MegatronLMSchedulerWrapper)):
                raise PreparationError(
                    f"{type(argument.current).__name__}: Megatron-LM makes its schedule itself. You can't use a custom "
                    "scheduler with Megatron-LM; give prepare() a MegatronLMDummyScheduler(optimizer, ...) instead."
                )
        if models and not any(arguments.of(Role.LOADER)):
            raise PreparationError(
                "You must provide a training or evaluation dataloader to prepare() with Megatron-LM: its arguments "
                "need the size of a micro-batch."
            )

    def place(self, arguments: PreparedArguments, precision: Precision) -> None:
        """Replace the model by a MegatronEngine, optimizer and schedule by Megatron's; loaders give full batches."""
        argument = next((one for one in arguments.of(Role.MODEL) if not isinstance(one.current, MegatronEngine)), None)
        if argument is None:
            return
        if self.options.plugins.recompute is not None:
            raise PreparationError(
                "ActivationCheckpointing has no effect in Megatron-LM, whose layers recompute by its own options. "
                "Leave it out, and set MegatronLMPlugin(recompute_activations=True)."
            )
        optimizers = list(arguments.of(Role.OPTIMIZER))
        schedulers = list(arguments.of(Role.SCHEDULER))
        loaders = list(arguments.of(Role.LOADER))
        self._set_arguments(
            argument.current,
            optimizers[0].current if optimizers else None,
            schedulers[0].current if schedulers else None,
            [one.current for one in loaders],
        )
        initialise(self.plugin)
        view: Any = SimpleNamespace(state=SimpleNamespace(megatron_lm_plugin=self.plugin), device=self.world.device)
        chunks, optimizer, scheduler = build(self.plugin)
        self._engine = argument.current = MegatronEngine(view, chunks, optimizer, scheduler)
        wrapped = MegatronLMOptimizerWrapper(optimizer)
        for one in optimizers:
            one.current = wrapped
        for one in schedulers:
            one.current = MegatronLMSchedulerWrapper(scheduler, wrapped)
        self._place_loaders(loaders)

    def _set_arguments(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        scheduler: MegatronLMDummyScheduler | None,
        loaders: Sequence[object],
    ) -> None:
        """Set Megatron's arguments in the plugin from the objects given to ``prepare``."""
        plugin = self.plugin
        megatron_arguments = plugin.megatron_lm_default_args
        data = next((one for one in loaders if isinstance(one, MegatronLMDummyDataLoader)), None)
        if data is not None:
            megatron_arguments.update(data.dataset_args)
        sizes = [one.batch_size or 0 for one in loaders if isinstance(one, DataLoader)]
        if 0 in sizes:
            raise PreparationError("A loader has `None` as batch size: Megatron-LM needs the size of a micro-batch.")
        given = megatron_arguments.get("micro_batch_size")
        if given is None and not sizes:
            raise PreparationError(
                "Megatron-LM needs the size of a micro-batch: give prepare() a loader with a batch size, or "
                "MegatronLMDummyDataLoader(micro_batch_size=...)."
            )
        micro = int(given) if given is not None else (min if plugin.is_train_batch_min else max)(sizes)
        plugin.set_training_args(micro, self.mesh.data_share().count)
        plugin.set_network_size_args(model)
        if optimizer is not None:
            plugin.set_optimizer_type(optimizer)
        if scheduler is not None:
            plugin.set_scheduler_args(scheduler)

    def _place_loaders(self, loaders: Sequence[PreparedArgument]) -> None:
        own = [argument for argument in loaders if isinstance(argument.current, MegatronLMDummyDataLoader)]
        for argument, iterator in zip(own, build_iterators(self.plugin) if own else (), strict=False):
            argument.current = MegatronDataIterator(iterator)
        for argument in loaders:
            if isinstance(argument.current, DataLoader):
                argument.current = with_batches_of(argument.current, self.plugin.num_micro_batches)

    def unwrap(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Return the engine's model chunk, which Megatron built: it isn't the model given to ``prepare``."""
        if not isinstance(model, MegatronEngine):
            return super().unwrap(model, keep_fp32_wrapper, keep_torch_compile)
        inner: Any = model.base_model
        while isinstance(getattr(inner, "module", None), torch.nn.Module):
            inner = inner.module
        return inner

    def release(self) -> None:
        """Drop all references to the engine."""
        self._engine = None

    # -- training ------------------------------------------------------------------------------------------

    def backward(
        self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None, num_steps: float = 1, **kwargs: object
    ) -> None:
        """Do nothing, because the forward was a full training step."""

    def clip_grad_norm(self, parameters: Sequence[torch.Tensor], clipping: Clipping) -> torch.Tensor:
        """Return the norm of the last step, which clips to the plugin's `gradient_clipping`."""
        norm = None if self._engine is None else self._engine.grad_norm
        return torch.tensor(float("nan") if norm is None else float(norm))

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Raise, because Megatron-LM clips only by the norm.

        Raises:
            PreparationError: Megatron-LM has already stepped when this is called.
        """
        raise PreparationError(
            f"clip_grad_value_(..., {clip_value}): Megatron-LM clips by the norm only, inside its own step. Set "
            "MegatronLMPlugin(gradient_clipping=...)."
        )

    # -- state ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState[Megatron]:
        """The state of the engine."""
        return _MegatronState(self)


@final
class _MegatronState(ModelState[Megatron]):
    """The state of Megatron's engine, which saves itself."""

    def is_whole(self, model: torch.nn.Module | None = None) -> bool:
        """Return False, because the engine saves itself on all ranks."""
        return False

    def saved_model(self, model: torch.nn.Module, prepared: torch.nn.Module) -> torch.nn.Module:
        """Return the engine, because it saves itself."""
        return prepared

    def checkpoint_state(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Stateful], *, model_only: bool = False
    ) -> StrategyState:
        """Return a writer of Megatron's own checkpoint, in a folder of its own."""
        engine = self.strategy._engine
        if engine is None or model_only:
            raise CheckpointError("Megatron-LM saves a whole run, after prepare(): model, optimizer and schedule.")

        def write(staging: StagingDirectory) -> None:
            engine.save_checkpoint(str(staging.folder / engine_tag()))

        return StrategyState(write=write)

    def held_tensors(self, model: torch.nn.Module) -> list[HeldTensor]:
        """Raise, because only the engine knows the layout of its weights.

        Raises:
            NotBuilt: always.
        """
        raise NotBuilt(
            "stream_weights() doesn't read the weights of Megatron-LM's engine. Save them with save_state()."
        )

    @property
    def access(self) -> StateAccess:
        """The direct access, except to the engine, which loads Megatron's own checkpoint."""
        return _EngineAccess(self.named_parameters, canonical_name)

    def restorable(self, optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        """Return an empty list, because Megatron restores its own optimizer."""
        return []


@final
class _EngineAccess(StateAccess):
    """Access to the state of models; the engine loads Megatron's own checkpoint."""

    def restorer(self, model: torch.nn.Module, folder: Path, index: int, **_: object) -> Callable[[], object] | None:
        """Return a function that loads Megatron's own checkpoint into the engine; None for other models.

        Raises:
            CheckpointError: ``folder`` has none.
        """
        if not isinstance(model, MegatronEngine):
            return None
        if not holds_engine_state(folder, index):
            raise CheckpointError(f"{folder} was not saved by Megatron-LM, and holds nothing that its engine can load.")
        return partial(model.load_checkpoint, str(folder / engine_tag(index)))


@final
class MegatronDataIterator:
    """An iterator over data in Megatron-LM's own format, instead of a prepared loader."""

    _is_accelerate_prepared = True

    def __init__(self, iterator: Iterable[object]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[object]:
        return iter(self.iterator)


def initialise(plugin: MegatronLMPlugin) -> None:
    """Initialise Megatron-LM with the plugin's arguments, without parsing the script's command line.

    Raises:
        MissingDependency: Megatron-LM isn't installed.
    """
    library = require("megatron.training.initialize", purpose=PURPOSE)

    def set_defaults(parser: ArgumentParser) -> ArgumentParser:
        if plugin.set_all_logging_options:
            known = vars(parser.parse_known_args([])[0])
            parser.set_defaults(**{name: True for name in known if name.startswith("log_") and known[name] is False})
        parser.set_defaults(**{**plugin.megatron_lm_default_args, **(plugin.other_megatron_args or {})})
        return parser

    before, sys.argv = sys.argv, sys.argv[:1]
    try:
        library.initialize_megatron(extra_args_provider=set_defaults, ignore_unknown_args=True)
    finally:
        sys.argv = before


def build(plugin: MegatronLMPlugin) -> tuple[list[torch.nn.Module], Any, Any]:
    """Return (model chunks, optimizer, schedule) built by Megatron-LM.

    Raises:
        SettingError: the function that builds the model is unknown.
    """
    provider = plugin.custom_model_provider_function
    if provider is None:
        raise SettingError(
            "Megatron-LM builds the model itself, and how differs between its versions. Give "
            "MegatronLMPlugin(custom_model_provider_function=...), e.g. `model_provider` of Megatron's pretrain script."
        )
    kind = require("megatron.core.enums", purpose=PURPOSE).ModelType.encoder_or_decoder
    library = require("megatron.training.training", purpose=PURPOSE)
    chunks, optimizer, scheduler = library.setup_model_and_optimizer(provider, kind)
    prepare = plugin.custom_prepare_model_function
    return (chunks if prepare is None else prepare(chunks)), optimizer, scheduler


def build_iterators(plugin: MegatronLMPlugin) -> Sequence[Iterable[object]]:
    """Return the iterators over training, validation and test data in Megatron's own format.

    Raises:
        SettingError: the function that builds the datasets is unknown.
    """
    provider = plugin.custom_megatron_datasets_provider_function
    if provider is None:
        raise SettingError(
            "MegatronLMDummyDataLoader: how the data sets are built differs between Megatron's versions. Give "
            "MegatronLMPlugin(custom_megatron_datasets_provider_function=...), e.g. "
            "`train_valid_test_datasets_provider` of Megatron's pretrain script."
        )
    library = require("megatron.training.training", purpose=PURPOSE)
    return library.build_train_valid_test_data_iterators(provider)


#: Arguments of a DataLoader that stay when its batches grow.
_KEPT = (
    "dataset", "sampler", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "generator", "persistent_workers",
)  # fmt: skip


def with_batches_of(loader: DataLoader[Batch], num_micro_batches: int) -> DataLoader[Batch]:
    """Return ``loader`` with its batch size multiplied by that number, for one update on one rank."""
    if num_micro_batches == 1 or loader.batch_size is None:
        return loader
    kept: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
    return DataLoader(**kept, batch_size=loader.batch_size * num_micro_batches, drop_last=True)
