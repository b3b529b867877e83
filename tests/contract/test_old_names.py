"""Every name of the documented interface resolves to the one real object."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import warnings
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

HERE: Final = Path(__file__).parent


def read(name: str) -> list[str]:
    return [line for line in (HERE / name).read_text(encoding="utf-8").split() if line]


OLD_NAMES: Final = read("old_names.txt")


def resolve(old_name: str) -> object:
    """The object, found as `from module import name` finds it."""
    module_name, _, name = old_name.partition(":")
    module = importlib.import_module(module_name)
    try:
        return getattr(module, name)
    except AttributeError:
        return importlib.import_module(f"{module_name}.{name}")


@pytest.mark.parametrize("old_name", OLD_NAMES)
def test_an_old_name_resolves(old_name: str) -> None:
    resolve(old_name)


def test_the_frozen_list_is_whole() -> None:
    assert len(OLD_NAMES) == len(set(OLD_NAMES)) == 555


def old_address_modules() -> list[ModuleType]:
    import accelerate.utils

    return [
        importlib.import_module(f"accelerate.utils.{found.name}")
        for found in pkgutil.iter_modules(accelerate.utils.__path__)
    ]


@pytest.mark.parametrize("module", old_address_modules(), ids=lambda module: module.__name__)
def test_an_old_path_has_the_same_objects_as_the_defining_modules(module: ModuleType) -> None:
    import accelerate.utils

    for name in module.__all__:
        value = getattr(module, name)
        defined_in = accelerate.utils._DEFINED_IN.get(name)
        if defined_in is not None:
            assert value is getattr(importlib.import_module(f"accelerate.{defined_in}"), name), name
            assert value is getattr(accelerate.utils, name), name


def names_for_editors(package: ModuleType) -> dict[str, str]:
    """Name -> module, of the imports under TYPE_CHECKING, which editors and type checkers read."""
    found: dict[str, str] = {}
    for statement in ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for imported in ast.walk(statement):
                if isinstance(imported, ast.ImportFrom):
                    found.update({alias.name: str(imported.module) for alias in imported.names})
    return found


@pytest.mark.parametrize("package", ["accelerate", "accelerate.utils"])
def test_editors_see_the_names_that_are_found_lazily(package: str) -> None:
    module = importlib.import_module(package)
    assert names_for_editors(module) == module._DEFINED_IN
    assert set(module.__all__) - set(module._DEFINED_IN) <= {"__version__", "tqdm"}
    assert set(module._DEFINED_IN) <= set(module.__all__)


def test_no_old_address_warns_but_the_one_that_says_so() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in old_address_modules():
            importlib.reload(module)


def test_the_documented_constants_stand_at_their_old_address() -> None:
    from accelerate.utils import constants

    assert {"DEEPSPEED", "FSDP", "MEGATRON_LM", "TP", "MULTI_CPU"} <= set(constants.TORCH_DISTRIBUTED_OPERATION_TYPES)
    assert {"nnodes", "rdzv_id", "master_port"} <= set(constants.TORCH_LAUNCH_PARAMS)
    assert (constants.FSDP_PYTORCH_VERSION, constants.FSDP2_PYTORCH_VERSION) == ("2.1.0", "2.6.0")
