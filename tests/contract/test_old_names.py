"""Every name of the documented interface resolves to the one real object."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import warnings
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

import accelerate

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
        value, home = getattr(module, name), homes_of(accelerate.utils).get(name)
        if home is not None:
            assert value is getattr(importlib.import_module(home), name), name
            assert value is getattr(accelerate.utils, name), name


def homes_of(package: ModuleType) -> dict[str, str]:
    """Name -> module, of the stub, which editors and type checkers read."""
    found: dict[str, str] = {}
    stub = Path(str(package.__file__)).with_suffix(".pyi")
    for statement in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            assert statement.lineno == statement.end_lineno, "names_of_stub reads lines"
            home = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package.__package__)
            for alias in statement.names:
                if alias.name == "*":
                    passed_on = homes_of(importlib.import_module(home))
                    found.update({each: where for each, where in passed_on.items() if not each.startswith("_")})
                elif alias.asname is None:
                    assert found.pop(alias.name, ""), f"no `import *` above passes on {alias.name}"
                else:
                    assert alias.asname == alias.name, "else no type checker passes it on"
                    found[alias.name] = home
    return found


STUBS: Final = sorted(
    ".".join(path.relative_to(Path(accelerate.__file__).parents[1]).with_suffix("").parts).removesuffix(".__init__")
    for path in Path(accelerate.__file__).parent.rglob("*.pyi")
)


@pytest.mark.parametrize("name", STUBS)
def test_the_names_of_a_stub_are_those_that_are_found(name: str) -> None:
    module = importlib.import_module(name)
    homes = homes_of(module)
    assert homes and set(homes) <= set(dir(module))
    assert set(module.__all__) == {each for each, home in homes.items() if home != name}
    for each, home in homes.items():
        value = getattr(module, each)
        if home == name:
            assert value is importlib.import_module(f"{home}.{each}")
        else:
            assert value is getattr(importlib.import_module(home), each), each
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018


def test_stubs_are_installed() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    kept = project["tool"]["setuptools"]["package-data"]["accelerate"]
    package = Path(accelerate.__file__).parent
    for path in package.rglob("*.pyi"):
        assert any(path.relative_to(package).match(pattern) for pattern in kept), path


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
