"""The options of FSDP, version 1 or 2."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import nn

from ..callers import warn_of_old_spelling
from ..errors import MissingDependency, SettingError
from ..settings import env
from ..settings.fsdp import HYBRID_IN_VERSION_2, ONLY_VERSION_1, RESHARDS, FsdpOptions
from ..settings.option import option_of
from ..torch_private.fsdp import hybrid_without_resharding
from ..versions import is_torch_version
from .handlers import LaunchedOptions, argument, canonicalize

if TYPE_CHECKING:
    from torch.distributed import fsdp as torch_fsdp
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, StateDictType

Member = TypeVar("Member")

_DTYPES: Final = {
    "fp8": torch.bfloat16,  # layers that don't compute in fp8 use bf16
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_POLICY_KEYS: Final = {
    1: ("param_dtype", "reduce_dtype", "buffer_dtype"),
    2: ("param_dtype", "reduce_dtype", "output_dtype"),
}
_SWITCHES: Final = (
    "limit_all_gathers",
    "use_orig_params",
    "sync_module_states",
    "forward_prefetch",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "cpu_ram_efficient_loading",
)
#: Values of version 1's switches that version 2 can't follow; with the other one it does the same.
_CONTRARY: Final = {"use_orig_params": False, "limit_all_gathers": False}


@dataclass(repr=False, eq=False)
class FullyShardedDataParallelPlugin(LaunchedOptions, FsdpOptions):
    """The options of FSDP: sharding, wrap units, precision, and saving.

    The constructor converts names to the torch objects of the chosen version; options of the other version become None.
    """

    def _resolve(self, given: Mapping[str, object]) -> None:
        canonicalize(self, "fsdp_version", *_SWITCHES)
        self._resolve_sharding(given)
        self._resolve_version_1_options(given)
        self._resolve_wrapping()
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self.set_state_dict_type(self.state_dict_type)
        if self.mixed_precision_policy is not None:
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        self._check_activation_checkpointing()
        if self.ignored_modules is not None and self._is_version_2 and not is_torch_version(">=", "2.7.0"):
            raise MissingDependency(
                f"`ignored_modules` with FSDP2 needs torch>=2.7, but {torch.__version__} is installed."
            )
        if "cpu_ram_efficient_loading" in given:
            # Libraries read from the environment whether to load weights on every rank.
            env.set_variables_for(self, {"FSDP_CPU_RAM_EFFICIENT_LOADING": self.cpu_ram_efficient_loading})

    @property
    def _is_version_2(self) -> bool:
        return self.fsdp_version == 2

    def _resolve_sharding(self, given: Mapping[str, object]) -> None:
        """Resolve ``reshard_after_forward`` (version 2) or ``sharding_strategy`` (version 1)."""
        if "sharding_strategy" in given:
            warn_of_old_spelling(
                "FullyShardedDataParallelPlugin(sharding_strategy=...) is deprecated: use reshard_after_forward."
            )
        names = ("sharding_strategy", "reshard_after_forward")
        for name, other in (names, names[::-1]):
            if name in given and other not in given:  # an argument comes before the environment under the other name
                setattr(self, other, None)
        self.sharding_strategy: Any = _member(self, "sharding_strategy", _strategies())
        if self._is_version_2:
            self.reshard_after_forward: Any = self._reshard_of_version_2(given)
            self.sharding_strategy = None
            return
        if isinstance(given.get("reshard_after_forward"), bool):
            raise SettingError(
                f"reshard_after_forward={self.reshard_after_forward} is for FSDP2. With FSDP1 give a sharding "
                f"strategy ({', '.join(_strategies())}), or set fsdp_version=2."
            )
        if isinstance(self.reshard_after_forward, bool):  # the launcher exports it for both versions
            self.reshard_after_forward = "FULL_SHARD" if self.reshard_after_forward else "SHARD_GRAD_OP"
            if self.sharding_strategy is not None:
                self.reshard_after_forward = None
        self.reshard_after_forward = _member(self, "reshard_after_forward", _strategies())
        both = [self.sharding_strategy, self.reshard_after_forward]
        if None not in both and both[0] is not both[1]:
            warnings.warn(
                f"reshard_after_forward={both[1].name}: left out, FSDP1 reads sharding_strategy={both[0].name}.",
                stacklevel=5,
            )
        self.sharding_strategy = both[0] or both[1] or _strategies()["FULL_SHARD"]

    def _reshard_of_version_2(self, given: Mapping[str, object]) -> bool:
        reshard = self.reshard_after_forward
        if isinstance(reshard, (str, int)):
            reshard = option_of(type(self), "reshard_after_forward").read(
                reshard, argument(self, "reshard_after_forward")
            )
        if reshard is not None and not isinstance(reshard, bool):
            raise SettingError(
                f"reshard_after_forward={reshard!r} is for FSDP1. With FSDP2 give True (saves memory) or False "
                "(saves traffic)."
            )
        if self.sharding_strategy is None:
            return True if reshard is None else reshard
        name = self.sharding_strategy.name.lstrip("_")
        is_argument = "sharding_strategy" in given
        quoted = f"sharding_strategy={name}" if is_argument else f"FSDP_SHARDING_STRATEGY={name}"
        if reshard is None:
            if name not in RESHARDS:
                raise SettingError(
                    f"{quoted} has no equal in FSDP2: use DDP, or fsdp_version=1, or set "
                    "reshard_after_forward to True (saves memory) or False (saves traffic)."
                )
            if name.startswith("HYBRID"):
                warnings.warn(f"{quoted}: {HYBRID_IN_VERSION_2}.", stacklevel=6)
            return RESHARDS[name]
        is_launchers = name == "FULL_SHARD" and not is_argument  # launchers export their default for both versions
        if not is_launchers and (name.startswith("HYBRID") or RESHARDS.get(name) != reshard):
            warnings.warn(f"{quoted}: left out, FSDP2 reads reshard_after_forward={reshard}.", stacklevel=6)
        return reshard

    def _resolve_version_1_options(self, given: Mapping[str, object]) -> None:
        """Convert the options of version 1 to torch's values; in version 2, set them to None."""
        self.backward_prefetch: Any = _member(self, "backward_prefetch", _prefetches())
        if self._is_version_2:
            if given.get("forward_prefetch"):
                raise SettingError(
                    "forward_prefetch=True: FSDP2 has no such option. Leave it out, or use fsdp_version=1."
                )
            names = ("backward_prefetch", "use_orig_params", "sync_module_states", "param_init_fn")
            dropped = [name for name in names if given.get(name)]
            dropped += [name for name, value in _CONTRARY.items() if name in given and getattr(self, name) is value]
            dropped += self._dropped_of_environment(given)
            if dropped:
                warnings.warn(f"FSDP2 has no {', '.join(dropped)}: left out.", stacklevel=5)
            for name in ONLY_VERSION_1:
                setattr(self, name, None)
            return
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            if "sync_module_states" in given:
                warnings.warn(
                    "cpu_ram_efficient_loading needs rank 0's weights to be sent to the others: "
                    "sync_module_states is "
                    "set to True.",
                    stacklevel=5,
                )
            self.sync_module_states: bool | None = True
        if self.sync_module_states and self.param_init_fn is None:
            self.param_init_fn = _allocate

    def _dropped_of_environment(self, given: Mapping[str, object]) -> list[str]:
        """Return the variables of version 1 with other values than launchers export for both versions."""
        options = (option_of(type(self), name) for name in ONLY_VERSION_1 if name not in given)
        return [
            option.env[0]
            for option in options
            if getattr(self, option.name) not in (None, option.launched) and env.read(option.env[0])
        ]

    def _resolve_wrapping(self) -> None:
        """Convert ``auto_wrap_policy`` to a function or None, and check its options."""
        names = cast("list[str] | str | None", self.transformer_cls_names_to_wrap)
        if isinstance(names, str):
            self.transformer_cls_names_to_wrap: list[str] | None = [
                name.strip() for name in names.split(",") if name.strip()
            ]
        if not callable(self.auto_wrap_policy):
            canonicalize(self, "auto_wrap_policy", "min_num_params")
            self.auto_wrap_policy: Any = _wrap_policies()[self.auto_wrap_policy or "NO_WRAP"]
        if self.auto_wrap_policy is _wrap_policies()["SIZE_BASED_WRAP"] and self.min_num_params is None:
            self.min_num_params: int | None = 0

    def _check_activation_checkpointing(self) -> None:
        if not self.activation_checkpointing_offload:
            return
        if not self._is_version_2:
            raise SettingError("`activation_checkpointing_offload=True` requires `fsdp_version=2`.")
        if not self.activation_checkpointing:
            raise SettingError("`activation_checkpointing_offload=True` requires `activation_checkpointing=True`.")

    def set_state_dict_type(self, state_dict_type: str | int | StateDictType | None = None) -> None:
        """Set whether saved state is full or sharded; the default is sharded in version 2 and full in 1."""
        torch_fsdp = _torch_fsdp()
        types = torch_fsdp.StateDictType
        if state_dict_type is not None:
            self.state_dict_type = state_dict_type
        if self.state_dict_type is None:
            self.state_dict_type = "SHARDED_STATE_DICT" if self._is_version_2 else "FULL_STATE_DICT"
        self.state_dict_type: Any = _member(self, "state_dict_type", types.__members__)
        if self.state_dict_type is types.LOCAL_STATE_DICT and self._is_version_2:
            raise SettingError(
                "FSDP2 has no LOCAL_STATE_DICT: set state_dict_type to SHARDED_STATE_DICT or FULL_STATE_DICT."
            )
        # A configuration of another type than the new one is dropped.
        if self.state_dict_type is types.FULL_STATE_DICT:
            if not isinstance(self.state_dict_config, torch_fsdp.FullStateDictConfig):
                self.state_dict_config: Any = torch_fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            if not isinstance(self.optim_state_dict_config, torch_fsdp.FullOptimStateDictConfig):
                self.optim_state_dict_config: Any = torch_fsdp.FullOptimStateDictConfig(
                    offload_to_cpu=True, rank0_only=True
                )
        elif self.state_dict_type is types.SHARDED_STATE_DICT:
            if not isinstance(self.state_dict_config, torch_fsdp.ShardedStateDictConfig):
                self.state_dict_config = torch_fsdp.ShardedStateDictConfig(offload_to_cpu=True)
            if not isinstance(self.optim_state_dict_config, torch_fsdp.ShardedOptimStateDictConfig):
                self.optim_state_dict_config = torch_fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True)

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Bind ``auto_wrap_policy`` to the layer classes of ``model``, or to the minimum size of a unit.

        Raises:
            SettingError: ``model`` has no layer of a class to wrap.
        """
        policies = _wrap_policies()
        if self.auto_wrap_policy is policies["TRANSFORMER_BASED_WRAP"]:
            names = self.transformer_cls_names_to_wrap
            if names is None:
                names = list(getattr(model, "_no_split_modules", None) or [])
            classes = {name: get_module_class_from_name(model, name) for name in names}
            missing = [name for name, found in classes.items() if found is None]
            if missing:
                raise SettingError(
                    f"Could not find the transformer layer class {', '.join(missing)} in the model. "
                    "Set transformer_cls_names_to_wrap to classes of its layers."
                )
            self.auto_wrap_policy = functools.partial(
                policies["TRANSFORMER_BASED_WRAP"],
                transformer_layer_cls={found for found in classes.values() if found is not None},
            )
        elif self.auto_wrap_policy is policies["SIZE_BASED_WRAP"]:
            self.auto_wrap_policy = (
                functools.partial(policies["SIZE_BASED_WRAP"], min_num_params=self.min_num_params)
                if self.min_num_params
                else None
            )

    def set_mixed_precision(
        self,
        mixed_precision: str
        | torch.dtype
        | Mapping[str, str | torch.dtype | None]
        | MixedPrecision
        | MixedPrecisionPolicy,
        buffer_autocast: bool = False,
        override: bool = False,
    ) -> None:
        """Set the policy for ``mixed_precision``; keep an existing one unless ``override``."""
        if self.mixed_precision_policy is not None and not override:
            return
        policy: Any = mixed_precision
        keys = _POLICY_KEYS[self.fsdp_version]
        if isinstance(policy, (str, torch.dtype)):
            dtype = _dtype(policy)
            policy = dict.fromkeys(keys, dtype)
            if buffer_autocast and "buffer_dtype" in policy:
                policy["buffer_dtype"] = torch.float32
        if isinstance(policy, Mapping):
            entries = cast("Mapping[str, str | torch.dtype | None]", policy)
            unknown = [key for key in entries if key not in keys]
            if unknown:
                raise SettingError(
                    f"Invalid mixed precision policy: {dict(entries)}. FSDP{self.fsdp_version} takes the keys "
                    f"{', '.join(keys)}."
                )
            wanted: Any = self._policy_class
            policy = wanted(**{key: dtype and _dtype(dtype) for key, dtype in entries.items()})
        self.mixed_precision_policy = policy
        self.validate_mixed_precision_policy()

    @property
    def _policy_class(self) -> type[MixedPrecision | MixedPrecisionPolicy]:
        """The class of ``mixed_precision_policy`` in the chosen version."""
        return _torch_fsdp().MixedPrecisionPolicy if self._is_version_2 else _torch_fsdp().MixedPrecision

    def validate_mixed_precision_policy(self) -> None:
        """Check that ``mixed_precision_policy`` has the class of the chosen version."""
        wanted = self._policy_class
        if self.mixed_precision_policy is not None and not isinstance(self.mixed_precision_policy, wanted):
            raise SettingError(
                f"`mixed_precision_policy` must be an instance of `{_path(wanted)}` in "
                f"FSDP{self.fsdp_version}, "
                f"got {self.mixed_precision_policy!r}."
            )

    def set_cpu_offload(self) -> None:
        """Replace a boolean ``cpu_offload`` by torch's object for it."""
        offload = self.cpu_offload
        if isinstance(offload, (str, int)):
            offload = option_of(type(self), "cpu_offload").read(offload, argument(self, "cpu_offload"))
        if not isinstance(offload, bool):
            return
        if not self._is_version_2:
            self.cpu_offload: Any = _torch_fsdp().CPUOffload(offload_params=offload)
        elif offload:
            # Pinned memory speeds up copies to a device; without one torch refuses to pin.
            self.cpu_offload = _torch_fsdp().CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
        else:
            self.cpu_offload = _torch_fsdp().OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Check that ``cpu_offload`` has the class of the chosen version."""
        wanted = _torch_fsdp().OffloadPolicy if self._is_version_2 else _torch_fsdp().CPUOffload
        if not isinstance(self.cpu_offload, wanted):
            raise SettingError(
                f"`cpu_offload` must be an instance of `{_path(wanted)}` in FSDP{self.fsdp_version}, "
                f"got {self.cpu_offload!r}."
            )

    @staticmethod
    def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
        """Return the class called ``name`` of ``module`` or one of its submodules."""
        return get_module_class_from_name(module, name)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class called ``name`` of ``module`` or one of its submodules; None if there is none."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def _torch_fsdp() -> Any:
    """Import and return ``torch.distributed.fsdp``; imported late because it takes half a second."""
    from torch.distributed import fsdp

    return fsdp


@functools.cache
def _strategies() -> dict[str, torch_fsdp.ShardingStrategy]:
    members = _torch_fsdp().ShardingStrategy.__members__
    public = {name: member for name, member in members.items() if not name.startswith("_")}
    return {**public, "HYBRID_SHARD_ZERO2": hybrid_without_resharding()}


@functools.cache
def _prefetches() -> dict[str, torch_fsdp.BackwardPrefetch | None]:
    return {**_torch_fsdp().BackwardPrefetch.__members__, "NO_PREFETCH": None}


@functools.cache
def _wrap_policies() -> dict[str, Any]:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    return {
        "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
        "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
        "NO_WRAP": None,
    }


def _member(plugin: FullyShardedDataParallelPlugin, name: str, members: Mapping[str, Member]) -> Member | None:
    """Return torch's enum member for the field's value: a name in any case, its number, or the member itself."""
    given = getattr(plugin, name)
    if given is None or given in members.values():
        return given
    shown = given
    if str(given).isdigit() and 1 <= int(given) <= len(members):
        given = list(members)[int(given) - 1]
    if str(given).upper() not in members:
        raise SettingError(
            f"FullyShardedDataParallelPlugin({name}={shown!r}): give one of {', '.join(members)}, or its number from 1."
        )
    return members[str(given).upper()]


def _dtype(given: str | torch.dtype) -> torch.dtype:
    if isinstance(given, torch.dtype) and given in _DTYPES.values():
        return given
    if given not in _DTYPES:
        raise SettingError(f"Invalid mixed precision: {given}. Must be one of {list(_DTYPES)}.")
    return _DTYPES[cast("str", given)]


def _path(cls: type) -> str:
    return f"torch.distributed.fsdp.{cls.__name__}"


def _allocate(module: nn.Module) -> None:
    """Allocate the parameters of ``module`` without initialising them, because rank 0 broadcasts the values."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module.to_empty(device=found or torch.device("cpu"), recurse=False)
