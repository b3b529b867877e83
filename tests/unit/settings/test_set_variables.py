"""What this package writes into the environment, and when each of it is taken back."""

from __future__ import annotations

import ast
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import accelerate
from accelerate import Accelerator
from accelerate.parallel.fsdp import files as fsdp_files
from accelerate.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.plugins.parallelism import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend

PACKAGE: Final = Path(accelerate.__file__).parent

BLOCK: Final = "at the end of the block that sets it"
OWNER: Final = "when the object that published it is gone"
CHILD: Final = "never: it is the environment of a process that was started to be a rank, and ends with it"
CALLER: Final = "by the caller, whose documented function it is"
CORE: Final = "the function through which the others of this table write"
#: Every place that changes the environment -> when what it changed is taken back.
WRITERS: Final[dict[str, str]] = {
    "guests/estimate/command.py create_empty_model patched": BLOCK,
    "construction.py complete_plugins set_variables_for": OWNER,
    "launch/fork.py _become_rank set_variables": CHILD,
    "launch/functions.py _call_here patched": BLOCK,
    "launch/prepared.py PrepareForLaunch.__call__ set_variables": CHILD,
    "launch/torchrun.py elastic_call patched": BLOCK,
    "launch/torchrun.py run_agent patched": BLOCK,
    "plugins/fsdp.py FullyShardedDataParallelPlugin._resolve set_variables_for": OWNER,
    "settings/env.py _purged update": BLOCK,
    "settings/env.py _purged del": BLOCK,
    "settings/env.py _restore set_variables": CORE,
    "settings/env.py clear_environment clear": BLOCK,
    "settings/env.py clear_environment update": BLOCK,
    "settings/env.py patch_environment patched": BLOCK,
    "settings/env.py patched set_variables": BLOCK,
    "settings/env.py set_variables =": CORE,
    "settings/env.py set_variables pop": CORE,
    "settings/env.py set_variables_for =": CORE,
    "settings/env.py restore_variables set_variables": CORE,
    "guests/reproduce/again.py run_again patched": BLOCK,
    "guests/deepspeed/strategy.py DeepSpeed.place patched": BLOCK,
    "guests/deepspeed/strategy.py DeepSpeed.__init__ set_variables_for": OWNER,
    "parallel/fsdp/files.py disable_fsdp_ram_efficient_loading set_variables": CALLER,
    "parallel/fsdp/files.py enable_fsdp_ram_efficient_loading set_variables": CALLER,
    "guests/xla/strategy.py cast_everything set_variables_for": OWNER,
    "tracking/mlflow.py MLflowTracker._end_at_exit patched": BLOCK,
}
_OF_ENV: Final = frozenset({"set_variables", "set_variables_for", "patched", "patch_environment"})
_OF_ENVIRON: Final = frozenset({"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"})


def _change(node: ast.AST) -> str | None:
    """How ``node`` changes the environment; None where it doesn't."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(value=ast.Name(id="env"), attr=name)):
            return name if name in _OF_ENV or name in ("putenv", "unsetenv") else None
        case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="putenv" | "unsetenv" as name)):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="os"), attr="environ"), attr=name)):
            return name if name in _OF_ENVIRON else None
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id="os"), attr="environ"), ctx=context):
            return {ast.Store: "=", ast.Del: "del"}.get(type(context))
        case ast.AugAssign(target=ast.Attribute(value=ast.Name(id="os"), attr="environ")):
            return "|="
        case _:
            return None


def _changes(node: ast.AST, name: str = "") -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}".lstrip(".")
        change = _change(child)
        if change is not None:
            yield f"{inner} {change}"
        yield from _changes(child, inner)


def test_every_place_that_changes_the_environment_says_when_it_is_taken_back() -> None:
    found = {
        f"{path.relative_to(PACKAGE).as_posix()} {change}"
        for path in PACKAGE.rglob("*.py")
        for text in [path.read_text(encoding="utf-8")]
        if any(word in text for word in ("environ", "set_variables", "patched", "putenv", "unsetenv"))
        for change in _changes(ast.parse(text))
    }
    assert found == WRITERS.keys()


ACCELERATORS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "plain": dict,
    "bf16, compiled": lambda: {"mixed_precision": "bf16", "dynamo_backend": DynamoBackend.INDUCTOR},
    "accumulating": lambda: {"gradient_accumulation_steps": 4, "log_with": None, "rng_types": ["torch"]},
    "FSDP1": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1, cpu_ram_efficient_loading=True)},
    "FSDP2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)},
    "FSDP2 in bf16": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2), "mixed_precision": "bf16"},
    "parallel in one": lambda: {"parallelism_config": ParallelismConfig()},
}


def _environment() -> dict[str, str]:
    """The environment, but for what torch sets when its compiler is imported."""
    return {name: text for name, text in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_nothing_that_an_accelerator_publishes_outlives_it(kind: str) -> None:
    before = _environment()
    accelerator = Accelerator(cpu=True, **ACCELERATORS[kind]())
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert ("ACCELERATE_USE_FSDP" in os.environ) == kind.startswith("FSDP")
    AcceleratorState._reset_state(reset_partial_state=True)
    del accelerator, model
    gc.collect()
    assert _environment() == before


def test_an_accelerator_that_could_not_be_made_leaves_nothing() -> None:
    before = _environment()
    with pytest.raises(ValueError, match="no such tracker"):
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), log_with="no such tracker")
    gc.collect()
    assert _environment() == before


def test_loading_on_one_rank_only_is_switched_off_by_who_switched_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    fsdp_files.enable_fsdp_ram_efficient_loading()
    assert os.environ["ACCELERATE_USE_FSDP"] == os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    fsdp_files.disable_fsdp_ram_efficient_loading()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
