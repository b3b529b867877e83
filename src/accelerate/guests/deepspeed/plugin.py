"""The options of DeepSpeed, and its configuration document completed from them; DeepSpeed need not be installed."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import math
import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from torch import nn

from ...errors import NotBuilt, SettingError
from ...optional import is_installed, require
from ...plugins import Placeholder
from ...plugins.fsdp import get_module_class_from_name
from ...plugins.handlers import LaunchedOptions, canonicalize
from ...settings import env
from ...settings.fp8 import MSAMP_IS_GONE
from .options import DeepSpeedOptions

if TYPE_CHECKING:
    import torch

    from ...settings.tree import Settings

#: The oldest DeepSpeed whose engine this package drives.
DEEPSPEED_FLOOR: Final = "0.9.3"
#: Fields of the plugin -> the corresponding entries of DeepSpeed's document.
_ENTRIES: Final = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_CHECKED: Final = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "msamp_opt_level",
)


@dataclass(repr=False, eq=False)
class DeepSpeedPlugin(LaunchedOptions, DeepSpeedOptions):
    """A DeepSpeed configuration, given as a document or built from these options.

    ``deepspeed_config`` is the document for DeepSpeed. Entries with ``"auto"`` are filled in from the options, and
    later from the prepared objects. Other entries of the document override the options.
    """

    def _resolve(self, given: Mapping[str, object]) -> None:
        canonicalize(self, *_CHECKED)
        if self.enable_msamp is None:
            self.enable_msamp: bool | None = (env.read("ACCELERATE_FP8_BACKEND") or "").upper() == "MSAMP"
        self.dschf: Any = None
        if self.hf_ds_config is None:
            self.hf_ds_config: Any = HfDeepSpeedConfig(self._document_of_options())
        else:
            self._read_document()
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = math.inf  # the training script reports progress
        if self.zero3_init_flag is None:
            self.zero3_init_flag = self.hf_ds_config.is_zero3()
        if self.zero3_init_flag and not self.hf_ds_config.is_zero3():
            warnings.warn("zero3_init_flag is only applicable for ZeRO stage 3: it is set to False.", stacklevel=4)
            self.zero3_init_flag = False
        self._selected = False
        if self.enable_msamp:
            raise NotBuilt(
                f"DeepSpeedPlugin asks for MS-AMP (enable_msamp, or ACCELERATE_FP8_BACKEND), {MSAMP_IS_GONE}"
            )

    def _document_of_options(self) -> dict[str, object]:
        def offload(device: str, path: str | None) -> dict[str, object]:
            return {"device": device, "nvme_path": path if device == "nvme" else None}

        return {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "zero_optimization": {
                "stage": self.zero_stage,
                "offload_optimizer": offload(self.offload_optimizer_device, self.offload_optimizer_nvme_path),
                "offload_param": offload(self.offload_param_device, self.offload_param_nvme_path),
                "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
            },
            "gradient_clipping": self.gradient_clipping,
        }

    def _read_document(self) -> None:
        """Complete the given document, and set the options from it."""
        given = self.hf_ds_config
        # A library's own config object, made from the same document, is used as it is.
        if isinstance(given, (str, os.PathLike, Mapping)):
            self.hf_ds_config = HfDeepSpeedConfig(cast("str | Mapping[str, object]", given))
        document = self.hf_ds_config.config
        if "zero_optimization" not in document:
            raise SettingError("Please specify the ZeRO optimization config in the DeepSpeed config.")
        self._deepspeed_config_checks()
        document.setdefault("gradient_accumulation_steps", 1)
        self.deepspeed_config = document
        options = {entry: getattr(self, name) for name, entry in _ENTRIES.items() if getattr(self, name) is not None}
        for entry in options:
            self.fill_match(entry, must_match=False, **options)
        self.hf_ds_config.set_stage_and_offload()
        for name, entry in _ENTRIES.items():
            value = self.hf_ds_config.get_value(entry)
            if value is not None and value != "auto":
                setattr(self, name, value)

    def _deepspeed_config_checks(self) -> None:
        """Check that options from the launcher's configuration file are "auto" in the document.

        Raises:
            SettingError: an entry is in both, or would be ignored because it isn't in the document.
        """
        fields = (env.read("ACCELERATE_CONFIG_DS_FIELDS", "") or "").split(",")
        found = {name: self.hf_ds_config.get_value(_ENTRIES[name]) for name in fields if name in _ENTRIES}
        settled = {name: value for name, value in found.items() if value != "auto"}
        if settled:
            raise SettingError(
                f"{', '.join(settled)}: given in the accelerate config, where the DeepSpeed config "
                + ("says nothing of it" if None in settled.values() else "gives it as well")
                + ". Keep them in the DeepSpeed config only, or write them as 'auto' there."
            )

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: object
    ) -> None:
        """Fill an ``"auto"`` entry from ``kwargs``; add a conflicting entry to ``mismatches``."""
        node, name = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        value = node.get(name)
        if value == "auto":
            if ds_key_long not in kwargs:
                raise SettingError(
                    f"`{ds_key_long}` not found in kwargs. Please specify `{ds_key_long}` without `auto` (set to "
                    "correct value) in the DeepSpeed config file or pass it in kwargs."
                )
            node[name] = kwargs[ds_key_long]
        elif must_match and value is not None and ds_key_long in kwargs and value != kwargs[ds_key_long]:
            found = f"- ds {ds_key_long}={value} vs arg {ds_key_long}={kwargs[ds_key_long]}"
            (mismatches if mismatches is not None else []).append(found)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return True if the entry is ``"auto"``."""
        return self.hf_ds_config.get_value(ds_key_long) == "auto"

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return the entry's value, or ``default`` if there is no such entry."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, object] | None = None,
        must_match: bool = True,
        **kwargs: object,
    ) -> None:
        """Fill every ``"auto"`` entry below ``prefix`` from ``kwargs``.

        Raises:
            SettingError: an entry conflicts with ``kwargs``, or is ``"auto"`` without a value in ``kwargs``.
        """
        mismatches = [] if mismatches is None else mismatches
        for name, value in list((self.deepspeed_config if config is None else config).items()):
            if isinstance(value, dict):
                below = cast("dict[str, Any]", value)
                self.deepspeed_config_process(f"{prefix}{name}.", mismatches, below, must_match, **kwargs)
            else:
                self.fill_match(prefix + name, mismatches, must_match=must_match, **kwargs)
        if mismatches and not prefix:
            raise SettingError(
                "Please correct the following DeepSpeed config values that mismatch kwargs values:\n"
                + "\n".join(mismatches)
                + "\nThe easiest method is to set these DeepSpeed config values to 'auto'."
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Set the document's ``fp16`` and ``bf16`` for ``mixed_precision``, if they are missing.

        Raises:
            SettingError: the document enables the other precision.
        """
        document = self.deepspeed_config
        half = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}.get(mixed_precision)
        if half is not None:
            other = "bf16" if half == "fp16" else "fp16"
            if str(document.get(other, {}).get("enabled", False)).lower() == "true":
                raise SettingError(
                    f"`--mixed_precision` arg cannot be set to `{mixed_precision}` when `{other}` is set in the "
                    "DeepSpeed config file."
                )
        if half is not None and half not in document:
            document[half] = {"enabled": True, "auto_cast": True} if half == "fp16" else {"enabled": True}
        for name in ("fp16", "bf16"):
            document.setdefault(name, {"enabled": False})
        enabled: dict[str, Any] = {f"{name}.enabled": half == name for name in ("fp16", "bf16")}
        for entry in enabled:
            self.fill_match(entry, must_match=False, **enabled)

    def set_deepspeed_weakref(self) -> None:
        """Pass the document to transformers, so that it shards models during construction (stage 3)."""
        document = copy.deepcopy(self.deepspeed_config)
        for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if document.get(name, "auto") == "auto":
                document[name] = 1
        if document.get("train_batch_size") == "auto":
            del document["train_batch_size"]
        library = require("transformers.integrations", purpose="`zero3_init_flag`")
        # transformers keeps only a weak reference, so keep one here.
        self.dschf = library.HfDeepSpeedConfig(document)

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks over which DeepSpeed shards each layer (AutoTP)."""
        return int(self.deepspeed_config.get("tensor_parallel", {}).get("autotp_size", 1) or 1)

    @property
    def mesh_axes(self) -> dict[str, int]:
        """The tensor-parallel axis, along which DeepSpeed shards the model."""
        return {"tp": self.tensor_parallel_size}

    def is_zero3_init_enabled(self) -> bool:
        """Return True if parameters are sharded during a model's construction."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Generator[None]:
        """Enter a context in which ``enable`` turns sharding during construction on or off."""
        before = self.is_zero3_init_enabled()
        if before == enable:
            yield
            return
        self._switch_zero3_init(enable)
        try:
            yield
        finally:
            self._switch_zero3_init(before)

    def _switch_zero3_init(self, enable: bool) -> None:
        self.zero3_init_flag = enable
        self.dschf = None
        if enable:
            self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Make DeepSpeed gather each layer of the named mixture-of-experts classes as a whole."""
        names = self.transformer_moe_cls_names
        if names is None:
            return
        library = require("deepspeed.utils", "deepspeed", purpose="transformer_moe_cls_names", at_least="0.14.0")
        classes: list[type[nn.Module]] = []
        for name in (part.strip() for part in names.split(",") if part.strip()):
            found = get_module_class_from_name(model, name)
            if found is None:
                raise SettingError(f"Could not find a transformer layer class called '{name}' to wrap in the model.")
            classes.append(found)
        library.set_z3_leaf_modules(model, classes)

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Make this plugin the active one of several; only the state may call this."""
        if not _from_accelerator_state:
            raise SettingError(
                "A DeepSpeedPlugin is made active by `AcceleratorState().select_deepspeed_plugin(name)`."
            )
        self._selected = True
        # By default, transformers shards models during construction, if it is installed.
        if self.is_zero3_init_enabled() and is_installed("transformers"):
            self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False
        self.dschf = None

    @property
    def selected(self) -> bool:
        """Whether this is the active one of several plugins."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            "'selected' can only be set through 'AcceleratorState().select_deepspeed_plugin(name)'."
        )


def get_active_deepspeed_plugin(state: object) -> DeepSpeedPlugin:
    """Return the plugin in use: the only one, or the selected one of several.

    Raises:
        SettingError: ``state`` belongs to a run without DeepSpeed.
    """
    plugins = getattr(state, "deepspeed_plugins", None)
    if plugins is None:
        raise SettingError(
            "Couldn't retrieve the active `DeepSpeedPlugin` as none were enabled. Pass one (or a "
            "dictionary of them) to "
            "the Accelerator as `deepspeed_plugin`."
        )
    return active_plugin(plugins)


def active_plugin(plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin]) -> DeepSpeedPlugin:
    """Return the only plugin, or the selected one of several by name."""
    if isinstance(plugins, Mapping):
        return next(plugin for plugin in plugins.values() if plugin.selected)
    return plugins


def complete(
    settings: Settings, arguments: Mapping[str, object], known: Mapping[str, Any]
) -> tuple[DeepSpeedPlugin | dict[str, DeepSpeedPlugin], DeepSpeedPlugin]:
    """Return the DeepSpeedPlugin (or several by name) and the active one, in the run's precision.

    Raises:
        MissingDependency: DeepSpeed isn't installed, or is too old.
        NotImplementedError: a second Accelerator has another plugin (the documented exception).
    """
    if not is_installed("deepspeed", at_least=DEEPSPEED_FLOOR):
        asked = settings.quote("paradigm.use_deepspeed")
        require("deepspeed", "deepspeed", purpose=f"DeepSpeed, asked for by {asked},", at_least=DEEPSPEED_FLOOR)
    given = arguments["deepspeed_plugin"] or arguments["deepspeed_plugins"] or None
    earlier: dict[str, DeepSpeedPlugin] | None = known.get("deepspeed_plugins")
    if earlier is not None:
        if given is not None:
            raise NotImplementedError(
                "You cannot pass in a `deepspeed_plugin` when creating a second `Accelerator`. Please make sure the "
                "first `Accelerator` is initialized with all the plugins you want to use, as a dictionary by name."
            )
        return earlier, active_plugin(earlier)
    options = settings.find(DeepSpeedOptions)
    assert options is not None  # it is called then only
    found: Any = DeepSpeedPlugin.of(options) if given is None else given
    every: list[object] = list(found.values()) if isinstance(found, dict) else [found]
    for plugin in every:
        if not isinstance(plugin, DeepSpeedPlugin):
            raise TypeError(f"`deepspeed_plugin` has to hold DeepSpeedPlugin objects, not {type(plugin).__name__}.")
        plugin.set_mixed_precision(str(settings.run.mixed_precision))
    (next(iter(found.values())) if isinstance(found, dict) else found).select(_from_accelerator_state=True)
    return found, active_plugin(found)


# --------------------------------------------------------------------------------------------------
# The DeepSpeed configuration document, read and changed by dotted names; works without DeepSpeed

_OFFLOADS = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")


class HfDeepSpeedConfig:
    """A DeepSpeed document, read from a path, a mapping, JSON text or base64-encoded JSON.

    An entry is named by its path, such as ``zero_optimization.stage``.
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | Mapping[str, object]) -> None:
        self.config: dict[str, Any] = _document(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the ZeRO stage and offloading from the document."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        self._offload = self._stage in (2, 3) and any(self.get_value(name) in ("cpu", "nvme") for name in _OFFLOADS)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the mapping that holds the entry (None if there is none) and the entry's name in it."""
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for name in path:
            node = node.get(name)
            if not isinstance(node, dict):
                return None, last
        return cast("dict[str, Any]", node), last

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return the entry's value, or ``default`` if there is no such entry."""
        node, name = self.find_config_node(ds_key_long)
        return default if node is None else node.get(name, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete the entry and all entries below it."""
        node, name = self.find_config_node(ds_key_long)
        if node is not None and name in node:
            del node[name]
        elif must_exist:
            raise SettingError(f"Can't find {ds_key_long} entry in the DeepSpeed config: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return True if the entry exists and is true."""
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Return True if the entry exists and is false."""
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_zero2(self) -> bool:
        """Return True if gradients and optimizer state are sharded, and parameters are not."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Return True if parameters are also sharded."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Return True if parameters or optimizer state are offloaded to CPU memory or NVMe."""
        return self._offload


def _document(given: str | os.PathLike[str] | Mapping[str, object]) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    text = os.fspath(given)
    try:
        if os.path.exists(text):
            with open(text, encoding="utf-8") as file:
                document = json.load(file)
        elif text.lstrip().startswith("{"):
            document = json.loads(text)
        else:
            document = json.loads(base64.urlsafe_b64decode(text).decode("utf-8"))
    except json.JSONDecodeError as error:
        raise SettingError(f"The DeepSpeed config {text!r} is not valid JSON: {error}.") from error
    except (UnicodeDecodeError, binascii.Error, ValueError):
        raise SettingError(
            "Expected a path to an existing DeepSpeed config, a dictionary, JSON text or base64-encoded JSON. "
            f"Received: {text}"
        ) from None
    if not isinstance(document, dict):
        raise SettingError(f"The DeepSpeed config {text!r} must be a JSON object, not a {type(document).__name__}.")
    return cast("dict[str, Any]", document)


# --------------------------------------------------------------------------------------------------
# Placeholders for the optimizer and the schedule that DeepSpeed makes from its own configuration


class DummyOptim(Placeholder):
    """A placeholder for the optimizer that DeepSpeed creates from its configuration."""

    role: ClassVar[str] = "optimizer"
    engine: ClassVar[str] = "DeepSpeed"
    asked_by: ClassVar[str] = "deepspeed"

    def __init__(self, params: object, lr: float = 0.001, weight_decay: float = 0, **kwargs: object) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler(Placeholder):
    """A placeholder for the scheduler that DeepSpeed creates from its configuration."""

    role: ClassVar[str] = "scheduler"
    engine: ClassVar[str] = "DeepSpeed"
    asked_by: ClassVar[str] = "deepspeed"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | DummyOptim,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[..., object] | None = None,
        **kwargs: object,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs
