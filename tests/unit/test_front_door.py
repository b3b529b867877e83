from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib import metadata

import pytest

import accelerate
from accelerate.lazy import function_in_use
from tests.fresh import run_fresh
from tests.python_path import python_path
from tests.torch_needed import needs_torch

BUILT_MODULES = (
    "accelerator", "checkpointing", "data_loader", "launchers", "local_sgd", "logging", "optimizer",
    "parallelism_config", "scheduler", "state", "test_utils", "tracking", "utils",
)  # fmt: skip


def run(program: str) -> str:
    """What the program prints in an interpreter of its own."""
    finished = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def run_beside_torch(program: str) -> str:
    """What the program prints, which imports torch anyhow."""
    finished = run_fresh(program, environment={**os.environ, "PYTHONPATH": python_path()})
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_importing_the_package_imports_no_torch() -> None:
    assert run("import accelerate, sys; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_an_import(enabled: bool) -> None:
    """A collection would look at everything that torch has allocated; it takes longer than the import."""
    program = f"""
import gc, torch, accelerate
gc.{"enable" if enabled else "disable"}()
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]) if phase == "start" else None)
gc.collect(1)
accelerate.Accelerator
print(collections[0], len(collections) <= 2, gc.isenabled())
"""
    assert run(program) == f"1 True {enabled}"


@pytest.mark.parametrize(
    "module", ["accelerate.utils.imports", "accelerate.utils.versions", "accelerate.utils.environment"]
)
def test_questions_about_packages_and_the_environment_import_no_torch(module: str) -> None:
    assert run(f"import {module}, sys; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("module", BUILT_MODULES)
def test_modules_are_attributes_after_a_bare_import(module: str) -> None:
    assert run_beside_torch(f"import accelerate; print(accelerate.{module}.__name__)") == f"accelerate.{module}"


def test_modules_of_utils_are_attributes_after_a_bare_import() -> None:
    assert (
        run_beside_torch("import accelerate; print(accelerate.utils.operations.gather.__module__)")
        == "accelerate.distributed.collectives"
    )


def test_the_version_is_that_of_the_metadata() -> None:
    try:
        installed = metadata.version("accelerate")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is on the path, not installed")
    assert accelerate.__version__ == installed


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="'accelerate' has no attribute 'Acelerator'"):
        getattr(accelerate, "Acelerator")  # noqa: B009
    with pytest.raises(ImportError):
        from accelerate import nothing_of_this_name  # noqa: F401
    with pytest.raises(AttributeError, match=r"'accelerate\.utils' has no attribute"):
        getattr(accelerate.utils, "nothing_of_this_name")  # noqa: B009


def test_the_progress_bar_stays_a_function_after_its_module_is_imported() -> None:
    program = "import accelerate.utils.tqdm; from accelerate.utils import tqdm; print(tqdm.__module__)"
    assert run_beside_torch(program) == "accelerate.progress"


def test_the_old_address_of_memory_warns_on_import() -> None:
    sys.modules.pop("accelerate.memory_utils", None)
    with pytest.warns(FutureWarning, match=r"accelerate\.memory_utils"):
        old = importlib.import_module("accelerate.memory_utils")
    assert old.find_executable_batch_size is accelerate.find_executable_batch_size


@needs_torch("2.13.0", "torch.utils.checkpoint itself imports sympy")
def test_no_name_of_the_front_door_brings_torchs_sharding_along() -> None:
    """That takes half a second and imports sympy; who shards pays for it when they choose to."""
    program = """
import importlib, pkgutil, sys
import torch
import accelerate, accelerate.utils
light = [name for name in accelerate.__all__ if name != "prepare_pippy"]  # cuts models into stages
heavy = ("sympy", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")
already = [name for name in heavy if name in sys.modules]
assert not already, already
def check(what):
    found = [name for name in heavy if name in sys.modules]
    if found:
        print(what, "imports", *found)
        sys.exit()
for name in light:
    getattr(accelerate, name)
    check(name)
for name in accelerate.utils.__all__:
    getattr(accelerate.utils, name)
    check(f"utils.{name}")
for module in pkgutil.iter_modules(accelerate.utils.__path__):
    importlib.import_module(f"accelerate.utils.{module.name}")
    check(f"utils.{module.name}")
accelerate.Accelerator(cpu=True)
check("Accelerator(cpu=True)")
"""
    assert run(program) == ""


@pytest.mark.parametrize(
    "name", ["DeepSpeedPlugin", "prepare_data_loader", "convert_model_to_fp8_ao", "get_state_dict_offloaded_model"]
)
def test_names_that_libraries_replace_at_the_accelerator_are_looked_up_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("accelerate.accelerator")
    original = getattr(module, name)
    assert original.__name__ == name
    replacement = object()
    monkeypatch.setattr(module, name, replacement, raising=False)
    assert function_in_use(name) is replacement
    monkeypatch.undo()
    assert function_in_use(name) is original
