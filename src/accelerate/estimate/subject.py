"""The model that is asked about: a name on the hub, a folder, or a function that builds it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, final

import torch
from torch import nn

from ..big_modeling import init_empty_weights
from ..device_map.sources import find_files, open_source
from ..errors import CheckpointNotFound, SettingError
from ..optional import require
from .inputs import inputs_of_timm, inputs_of_transformers
from .trace import Traceable

Library = Literal["timm", "transformers"]

_CONFIG: Final = "config.json"


def find_subject(model: str, library_name: Library | None = None, trust_remote_code: bool = False) -> Traceable:
    """The model of that name: ``module:function`` or ``file.py:function``, a folder, or a name on the hub.

    A function returns the model, or the model and ``inputs(batch, sequence)``, which makes what it is called with.
    Models of the hub are looked for among the downloaded files first.

    Raises:
        SettingError: there is no such function, or it doesn't build a model.
        CheckpointNotFound: there is no such model here, and it can't be downloaded.
        MissingDependency: the library that builds the model isn't installed.
    """
    if ":" in model and not Path(model).exists():
        return FromFunction(model)
    folder = Path(model)
    if not folder.is_dir():
        if folder.exists() or model.startswith((".", "/", "~")):
            raise CheckpointNotFound(f"{model} is no folder. Give the folder that holds {_CONFIG}.")
        return _from_config(model, _config_of_hub(model), library_name, trust_remote_code)
    if (folder / _CONFIG).is_file():
        return _from_config(model, folder / _CONFIG, library_name, trust_remote_code)
    return FromWeights(folder)


def _from_config(name: str, path: Path, library_name: Library | None, trust_remote_code: bool) -> Traceable:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingError(f"{path} can't be read: {error}") from error
    library = library_name or ("timm" if "architecture" in config and "model_type" not in config else "transformers")
    if library == "timm":
        return FromTimm(name, config)
    return FromTransformers(name, path.parent, config, trust_remote_code)


def _config_of_hub(name: str) -> Path:
    hub = require("huggingface_hub", "hub", purpose=f"Looking for the model {name!r} on the hub")
    try:
        return Path(hub.hf_hub_download(name, _CONFIG))
    except Exception as error:  # a hub library has many errors of its own; all mean that there is no model
        offline = getattr(hub.constants, "HF_HUB_OFFLINE", False)
        why = "downloads are switched off (HF_HUB_OFFLINE)" if offline else f"the hub says: {error}".splitlines()[0]
        raise CheckpointNotFound(
            f"{name!r} is no folder here, it isn't among the downloaded models in {hub.constants.HF_HUB_CACHE}, and "
            f"{why}. Give a folder with a {_CONFIG}, a downloaded model, or a function as 'module:function'."
        ) from error


@final
class FromFunction:
    """A model that a function of the user builds."""

    def __init__(self, address: str) -> None:
        """Import the function.

        Raises:
            SettingError: it isn't there.
        """
        self.name = address
        self._function = _imported(address)
        self._inputs: Callable[[int, int], Any] | None = None

    def build(self) -> nn.Module:
        with init_empty_weights():
            made = self._function()
        model, self._inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise SettingError(f"{self.name} returned {model!r}, which is no torch module.")
        return model

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> Mapping[str, Any] | tuple[Any, ...] | None:
        if self._inputs is None:
            return None
        made = self._inputs(batch, sequence)
        return made if isinstance(made, (Mapping, tuple)) else (made,)


def _imported(address: str) -> Callable[[], Any]:
    where, _, name = address.rpartition(":")
    try:
        if where.endswith(".py"):
            spec: Any = importlib.util.spec_from_file_location(Path(where).stem, where)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))  # a command has the folder of its script there
            module = importlib.import_module(where)
    except (ImportError, FileNotFoundError) as error:
        raise SettingError(f"{address}: {where} can't be imported ({error}).") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(each for each, value in vars(module).items() if callable(value) and not each.startswith("_"))
        raise SettingError(f"{address}: {where} has no function {name!r}; it has {', '.join(found) or 'none'}.")
    return function


@final
class FromTransformers:
    """A model that transformers builds from its configuration."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], trust_remote_code: bool) -> None:
        self.name = name
        self._folder, self._architectures = folder, config.get("architectures") or []
        self._remote_code = config.get("auto_map") or {}
        self._trusted = trust_remote_code
        if self._remote_code and not trust_remote_code:
            raise SettingError(
                f"{name} brings code of its own ({', '.join(self._remote_code.values())}). Read it, and if you trust "
                "it give --trust_remote_code."
            )

    def build(self) -> nn.Module:
        library: Any = require("transformers", purpose=f"Building {self.name}")
        config = library.AutoConfig.from_pretrained(self._folder, trust_remote_code=self._trusted)
        known = [getattr(library, each) for each in self._architectures if getattr(library, each, None)]
        with init_empty_weights():
            if known:
                return known[0](config)
            auto = next((each for each in self._remote_code if each.startswith("AutoModel")), "AutoModel")
            return getattr(library, auto).from_config(config, trust_remote_code=self._trusted)

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> Mapping[str, Any] | tuple[Any, ...] | None:
        return inputs_of_transformers(model, batch, sequence)


@final
class FromTimm:
    """A model that timm builds by the name in its configuration."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self._architecture, self._arguments = str(config.get("architecture")), config.get("model_args") or {}
        if config.get("num_classes") is not None:
            self._arguments = {"num_classes": config["num_classes"], **self._arguments}

    def build(self) -> nn.Module:
        library: Any = require("timm", purpose=f"Building {self.name}")
        with init_empty_weights():
            return library.create_model(self._architecture, pretrained=False, **self._arguments)

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> Mapping[str, Any] | tuple[Any, ...] | None:
        return inputs_of_timm(model, batch)


@final
class FromWeights:
    """A folder of weights without a configuration: how large they are is known, not how they run."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of the files.

        Raises:
            CheckpointError: there are no weights in the folder, or they are damaged.
        """
        self.name = str(folder)
        self._shapes = {
            name: source.describe(name) for source in map(open_source, find_files(folder)) for name in source.names()
        }

    def build(self) -> nn.Module:
        model = nn.Module()
        for name, (dtype, shape) in self._shapes.items():
            *path, own = name.split(".")
            owner = model
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            values = torch.empty(shape, dtype=dtype, device="meta")
            owner.register_parameter(own, nn.Parameter(values, requires_grad=values.is_floating_point()))
        return model

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> Mapping[str, Any] | tuple[Any, ...] | None:
        return None
