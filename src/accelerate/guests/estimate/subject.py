"""The model to estimate: a name on the hub, a folder, a function, or a training script. Internal."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, final

import torch
from torch import nn
from torch.utils.data import DataLoader

from ...accelerator import Accelerator
from ...big_modeling import init_empty_weights
from ...big_models.load import find_files, open_weight_file
from ...errors import CheckpointNotFound, PreparationError, SettingError
from ...optional import require
from .trace import ModelInputs, OptimizerFactory, Traceable

Library = Literal["timm", "transformers"]

_CONFIG: Final = "config.json"


def find_subject(model: str, library_name: Library | None = None, trust_remote_code: bool = False) -> Traceable:
    """Return the model of that name: ``module:function`` or ``file.py:function``, a folder, or a name on the hub.

    A function returns the model, or the model and ``inputs(batch, sequence)``, which creates its inputs. Models of the
    hub are first looked up in the downloaded files.

    Raises:
        SettingError: the function doesn't exist, or doesn't build a model.
        CheckpointNotFound: the model isn't on this machine, and can't be downloaded.
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
    except Exception as error:  # hub libraries have many errors; all mean that there is no model
        offline = getattr(hub.constants, "HF_HUB_OFFLINE", False)
        why = "downloads are switched off (HF_HUB_OFFLINE)" if offline else f"the hub says: {error}".splitlines()[0]
        raise CheckpointNotFound(
            f"{name!r} is no folder here, it isn't among the downloaded models in {hub.constants.HF_HUB_CACHE}, and "
            f"{why}. Give a folder with a {_CONFIG}, a downloaded model, or a function as 'module:function'."
        ) from error


@final
class FromFunction:
    """A model built by a user's function."""

    def __init__(self, address: str) -> None:
        """Import the function.

        Raises:
            SettingError: it doesn't exist.
        """
        self.name = address
        self._function = _imported(address)
        self._inputs: Callable[[int, int], object] | None = None

    def build(self) -> nn.Module:
        with init_empty_weights():
            made = self._function()
        model, self._inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise SettingError(f"{self.name} returned {model!r}, which is no torch module.")
        return model

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> ModelInputs | None:
        if self._inputs is None:
            return None
        made = self._inputs(batch, sequence)
        return made if isinstance(made, (Mapping, tuple)) else (made,)


def _imported(address: str) -> Callable[[], object]:
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

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> ModelInputs | None:
        return inputs_of_transformers(model, batch, sequence)


@final
class FromTimm:
    """A model that timm builds from the name in its configuration."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self._architecture, self._arguments = str(config.get("architecture")), config.get("model_args") or {}
        if config.get("num_classes") is not None:
            self._arguments = {"num_classes": config["num_classes"], **self._arguments}

    def build(self) -> nn.Module:
        library: Any = require("timm", purpose=f"Building {self.name}")
        with init_empty_weights():
            return library.create_model(self._architecture, pretrained=False, **self._arguments)

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> ModelInputs | None:
        return inputs_of_timm(model, batch)


@final
class FromWeights:
    """A model given only by a folder of weights: its sizes are known, but not its forward."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of the files.

        Raises:
            CheckpointError: there are no weights in the folder, or they are damaged.
        """
        self.name = str(folder)
        self._shapes = {
            name: source.describe(name)
            for source in map(open_weight_file, find_files(folder))
            for name in source.names()
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

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> ModelInputs | None:
        return None


# --------------------------------------------------------------------------------------------------
# Inputs for models of known libraries

#: Parts of class names -> whether there is one label for a whole sample (or one for each token).
_ONE_LABEL_A_SAMPLE = {
    "ForSequenceClassification": True,
    "ForImageClassification": True,
    "ForAudioClassification": True,
    "ForVideoClassification": True,
    "ForMultipleChoice": True,
    "LMHead": False,
    "ForCausalLM": False,
    "ForMaskedLM": False,
    "ForConditionalGeneration": False,
    "ForSpeechSeq2Seq": False,
    "ForTokenClassification": False,
}
#: The size of ImageNet's images, for models that don't name their input size.
_CHANNELS = 3
_SIDE = 224


def inputs_of_transformers(model: nn.Module, batch: int, sequence: int) -> dict[str, torch.Tensor] | None:
    """Return a transformers model's arguments for a training step; None if its main input is of an unknown kind."""
    config = model.config
    main = getattr(model, "main_input_name", "input_ids")
    accepted = inspect.signature(model.forward).parameters
    found: dict[str, torch.Tensor] = {}
    if main == "input_ids":
        found["input_ids"] = _integers(batch, sequence)
    elif main == "pixel_values":
        found["pixel_values"] = _images(config, batch)
    elif main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", sequence)
        found["input_features"] = torch.zeros(batch, getattr(config, "num_mel_bins", 80), frames)
    elif main == "input_values":
        found["input_values"] = torch.zeros(batch, sequence)
    else:
        return None
    compares = callable(getattr(model, "get_image_features", None)) and callable(
        getattr(model, "get_text_features", None)
    )
    if compares:  # images and texts side by side
        found |= {"input_ids": _integers(batch, sequence), "pixel_values": _images(config, batch)}
    per_sample = next((one for part, one in _ONE_LABEL_A_SAMPLE.items() if part in type(model).__name__), None)
    if per_sample is not None and "labels" in accepted:
        found["labels"] = _integers(batch) if per_sample else _integers(batch, sequence)
    elif "start_positions" in accepted:
        found |= {"start_positions": _integers(batch), "end_positions": _integers(batch)}
    elif getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        found["decoder_input_ids"] = _integers(batch, sequence)
    return found


def inputs_of_timm(model: nn.Module, batch: int) -> tuple[torch.Tensor]:
    """Return the input images of a timm model."""
    about: Any = getattr(model, "default_cfg", None) or {}
    return (torch.zeros(batch, *about.get("input_size", (_CHANNELS, _SIDE, _SIDE))),)


def _integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def _images(config: object, batch: int) -> torch.Tensor:
    about = getattr(config, "vision_config", None) or config
    side = getattr(about, "image_size", None) or _SIDE
    height, width = side if isinstance(side, (tuple, list)) else (side, side)
    return torch.zeros(batch, getattr(about, "num_channels", _CHANNELS), height, width)


# --------------------------------------------------------------------------------------------------
# The model of a training script, which runs up to its ``prepare`` call with parameters that take no memory


class _Reached(BaseException):
    """The signal that a script calls ``prepare``; no ``Exception``, or the script might catch it."""

    def __init__(self, objects: Sequence[object]) -> None:
        self.objects = objects


@final
class FromScript:
    """The model, and perhaps the optimizer and batches, that a script passes to its first ``prepare`` call."""

    def __init__(self, path: str, arguments: Sequence[str] = ()) -> None:
        """Run the script up to its first ``prepare`` call.

        Raises:
            PreparationError: it ends or fails before that, or prepares no model.
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
        """The number of samples in a batch of the script; None if it prepares no loader."""
        from ...nested import ignorant_find_batch_size

        return None if self._batch is None else ignorant_find_batch_size(self._batch)

    @property
    def optimizer(self) -> OptimizerFactory | None:
        """A function that creates the script's kind of optimizer; None if it prepares none."""
        used = self._optimizer
        if used is None:
            return None
        own = {"lr": used.defaults.get("lr", 1e-3), "foreach": used.defaults.get("foreach")}
        return lambda parameters: type(used)(parameters, **own)

    def build(self) -> nn.Module:
        """Return a copy of the script's model."""
        import copy

        return copy.deepcopy(self._model)

    def inputs(self, model: nn.Module, batch: int, sequence: int) -> ModelInputs | None:
        """Return the script's own batch: as keyword arguments, or its first tensor."""
        if self._batch is None or isinstance(self._batch, Mapping):
            return self._batch
        return (self._batch[0] if isinstance(self._batch, (list, tuple)) else self._batch,)


def _objects_of(path: str, arguments: Sequence[str]) -> Sequence[object]:
    def reached(_: Accelerator, *objects: object, **__: object) -> None:
        raise _Reached(objects)

    before, argv_before, folders = Accelerator.prepare, sys.argv, list(sys.path)
    Accelerator.prepare = reached  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with init_empty_weights():
            runpy.run_path(path, run_name="__main__")
    except _Reached as found:
        return found.objects
    except (Exception, SystemExit) as error:  # any failure of the script
        raise PreparationError(
            f"{path} can't be run up to accelerator.prepare() with parameters that take no memory: "
            f"{type(error).__name__}: {error}. Give its arguments after --, or a function that builds the model: "
            f"'{Path(path).name}:function'."
        ) from error
    finally:
        Accelerator.prepare = before
        sys.argv, sys.path[:] = argv_before, folders
    raise PreparationError(
        f"{path} ended without accelerator.prepare(). Give a function that builds the model: "
        f"'{Path(path).name}:function'."
    )
