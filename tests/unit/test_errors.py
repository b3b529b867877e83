"""The exceptions of this package are one tree, drawn in errors.py; what else is raised is raised on purpose."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import accelerate
from accelerate import errors
from accelerate.errors import AccelerateError

PACKAGE: Final = Path(accelerate.__file__).parent

#: Exceptions that hang elsewhere, and why.
OUTSIDE_OF_THE_TREE: Final = {
    "CannotTrace": "never leaves parallel/: a model that can't be traced is split another way",
    "StepBack": "never leaves commands/config/: the question before is asked again",
    "StoreTimeout": "never leaves distributed/ and checkpointing/agreement.py, which say which rank didn't answer",
    "SubprocessCallException": "documented name and base of the test helpers",
    "_PassAborted": "never leaves training/oom_retry.py: aborts a pass on all ranks",
    "_Reached": "never leaves guests/estimate/: ends a script where its model is known, so nothing may catch it",
    "Reached": "no error: it ends a replay at its last update, so nothing may catch it",
    "_Ended": "no error: it ends a script that is run as one rank of a world that isn't there",
}

#: Built-in exceptions that are raised as such: reason -> (file, function, exception).
DELIBERATE: Final[dict[str, tuple[str, ...]]] = {
    "Python's own protocol of attributes and keys": (
        "*.__getattr__ AttributeError",
        "lazy.py names_from.get AttributeError",
        "lazy.py names_of_stub.get AttributeError",
        "settings/option.py option_of KeyError",
        "settings/tree.py Settings.address_of KeyError",
        "state.py _View.debug AttributeError",
        "parallel/fsdp/files.py _switched KeyError",
    ),
    "an argument of another type than is documented, as Python says it": (
        "construction.py _of_class TypeError",
        "guests/deepspeed/plugin.py complete TypeError",
        "construction.py parallelism TypeError",
        "construction.py project_configuration TypeError",
        "construction.py sort_handlers TypeError",
        "devices/memory.py _refuse_own_batch_size TypeError",
        "guests/preemption/loop.py attach TypeError",
        "nested.py concatenate TypeError",
        "nested.py find_batch_size TypeError",
        "nested.py recursively_apply TypeError",
        "precision/base.py ConvertOutputsToFp32.__getstate__ TypeError",
        "precision/choose.py ShardedScaler.__reduce__ TypeError",
        "settings/option.py OptionGroup.__init__ TypeError",
        "settings/run.py _objects TypeError",
    ),
    "the documented exception of the interface, which callers match on": (
        "accelerator.py Accelerator._axis_rank RuntimeError",
        "big_modeling.py _guard_moves.guarded.wrapper RuntimeError",
        "checkpointing/loading.py LoadOptions.of TypeError",
        "guests/deepspeed/plugin.py complete NotImplementedError",
        "construction.py sort_handlers AssertionError",
        "devices/memory.py find_executable_batch_size.sized RuntimeError",
        "nested.py find_batch_size ValueError",
        "training/optimizer.py AcceleratedOptimizer.zero_grad ValueError",
        "guests/deepspeed/plugin.py DeepSpeedPlugin.selected NotImplementedError",
        "devices/hardware.py is_torch_xla_available ValueError",
        "tracking/base.py GeneralTracker.__init__ NotImplementedError",
    ),
    "torch's own exception for the same thing, which torch or its callers match on": (
        "checkpointing/fit.py require_fit RuntimeError",
        "precision/choose.py ShardedScaler._unscale_grads_ ValueError",
        "guests/deepspeed/strategy.py DeepSpeed.clip_grad_norm RuntimeError",
        "parallel/gradient_norm.py scale_to RuntimeError",
        "torch_private/distributed.py second_connection NotImplementedError",
    ),
    "the end of a run that was preempted and has saved, with its exit code; `finally` blocks run": (
        "guests/preemption/loop.py Preemption._save_and_exit SystemExit",
        "guests/fault_tolerance/loop.py _KeptRun._save_and_end SystemExit",
    ),
    "a file of a command line that isn't there, which main() shows as one line": (
        "commands/parser.py configuration_path FileNotFoundError",
    ),
    "a file of a command line that is there already, which main() shows as one line": (
        "commands/to_fsdp2.py to_fsdp2_command FileExistsError",
    ),
    "caught in the same file, which says what was read and where": (
        "checkpointing/codec.py _Decoder.decode ValueError",
        "checkpointing/codec.py _dtype ValueError",
        "checkpointing/codec.py _numpy_dtype ValueError",
        "checkpointing/codec.py _read_enum ValueError",
        "checkpointing/codec.py _read_namedtuple ValueError",
        "checkpointing/manifest.py Manifest._from_content ValueError",
        "checkpointing/storage.py LocalStorage.read FileNotFoundError",
        "checkpointing/storage.py RemoteStorage.upload.put OSError",
        "commands/config/ask.py Asker.ask.read_required ValueError",
        "commands/config/ask.py Asker.choose.read ValueError",
        "commands/config/ask.py Asker.whole_number.read ValueError",
        "commands/config/ask.py Asker.yes.read ValueError",
        "commands/config/questions.py Questionnaire._machines.read_rank ValueError",
        "settings/option.py _read_float ValueError",
        "settings/option.py _read_int ValueError",
        "settings/option.py _read_list TypeError",
        "settings/option.py _read_mapping TypeError",
        "settings/option.py _read_switches ValueError",
        "settings/option.py _read_text TypeError",
        "settings/option.py parse_bool ValueError",
    ),
    "the documented way in which an answer of a questionnaire's caller is refused, and asked for again": (
        "commands/config/interview.py _nth ValueError",
    ),
    "a mistake of this package's own, not of its user": (
        "data_loader/sampling.py Permutation.__init__ ValueError",
        "devices/table.py kind_of ValueError",
        "distributed/mesh.py DataParallelRank.__post_init__ ValueError",
        "guests/deepspeed/strategy.py DeepSpeed.check AssertionError",
    ),
    "the end of an iterator, by its protocol": (
        "guests/scripts/verify/evaluation_recorder.py EvaluationRecorder._reading StopIteration",
    ),
    "a request that the monitor's server refuses, as its page never sends it": (
        "guests/monitor/reading.py write_note ValueError",
    ),
    "the operating system's own exception: no port of the host is free": ("ports.py get_free_port OSError",),
    "the operating system's own exception for the same thing: the target of a save is a file, or holds another's": (
        "checkpointing/store.py CheckpointStore._check_manifest_is_ours FileExistsError",
        "checkpointing/store.py CheckpointStore._make_staging NotADirectoryError",
    ),
    "never leaves guests/fault_tolerance: the connection of two launchers ends, and the reason is told": (
        "guests/fault_tolerance/connections.py HostLink._create ValueError",
        "guests/fault_tolerance/other_hosts.py _ask ConnectionError",
        "guests/fault_tolerance/other_hosts.py _ask ValueError",
    ),
    "an interruption that is passed on": ("launch/functions.py run_ranks KeyboardInterrupt",),
}


@cache
def _modules() -> tuple[tuple[str, ast.Module], ...]:
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    return tuple(
        (name, ast.parse(path.read_text(encoding="utf-8")))
        for name, path in paths.items()
        if not name.startswith("test_utils/scripts/")
    )


def _exception_classes() -> dict[str, type[BaseException]]:
    """Every class of the package that is an exception and no warning, by its name.

    Found by the names of bases: built-in exceptions, those of other libraries by how they end, and what is found so.
    """
    bases: dict[str, tuple[str, list[str]]] = {}
    for name, tree in _modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = (name, [ast.unparse(base).rpartition(".")[2] for base in node.bases])
    kinds = {name for name, value in vars(builtins).items() if _is_exception(value)}
    found: set[str] = set()
    while new := {
        name
        for name, (_, parents) in bases.items()
        if name not in found
        and any(base in kinds | found or re.search(r"(Error|Exception)$", base) for base in parents)
    }:
        found |= new
    classes = {}
    for name in found:
        module = ".".join(["accelerate", *bases[name][0].removesuffix(".py").removesuffix("/__init__").split("/")])
        classes[name] = getattr(importlib.import_module(module), name)
    return {name: kind for name, kind in classes.items() if not issubclass(kind, Warning)}


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def test_no_exception_is_hidden_in_a_function_or_a_class() -> None:
    names = {name for name, value in vars(builtins).items() if _is_exception(value)} | _exception_classes().keys()
    hidden = [
        f"{name} {node.name}"
        for name, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and node not in tree.body
        and any(ast.unparse(base).rpartition(".")[2] in names for base in node.bases)
    ]
    assert hidden == []


def test_every_exception_hangs_in_the_tree_or_is_listed_with_its_reason() -> None:
    outside = {name for name, kind in _exception_classes().items() if not issubclass(kind, AccelerateError)}
    assert outside == OUTSIDE_OF_THE_TREE.keys()


def test_the_drawing_shows_every_exception_under_its_parent_with_its_built_in_bases() -> None:
    drawn: dict[str, tuple[str | None, tuple[str, ...]]] = {}
    parents: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ((?:[│ ]   )*(?:[├└]── )?)(\w+) *(?:\(([\w, ]+)\))?", line)
        if match is None or not match[2][0].isupper() or (not match[1] and match[2] != "AccelerateError"):
            continue
        depth = len(match[1]) // 4
        parents[depth] = match[2]
        built_in = tuple((match[3] or "").split(", ")) if match[3] else ()
        drawn[match[2]] = (parents.get(depth - 1), built_in)
    actual = {
        name: (
            next((base.__name__ for base in kind.__bases__ if issubclass(base, AccelerateError)), None),
            tuple(base.__name__ for base in kind.__bases__ if not issubclass(base, AccelerateError)),
        )
        for name, kind in _exception_classes().items()
        if issubclass(kind, AccelerateError)
    }
    actual["AccelerateError"] = (None, ())
    assert drawn == actual


def _raised(tree: ast.AST, name: str = "") -> Iterator[str]:
    """`Class.method ValueError` for each built-in exception that is raised as such."""
    for child in ast.iter_child_nodes(tree):
        inner = name
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}".lstrip(".")
        if isinstance(child, ast.Raise) and child.exc is not None:
            raised = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            kind = getattr(builtins, raised.id, None) if isinstance(raised, ast.Name) else None
            if isinstance(kind, type) and issubclass(kind, BaseException):
                yield f"{inner} {kind.__name__}"
        yield from _raised(child, inner)


def test_every_built_in_exception_that_is_raised_is_listed_with_its_reason() -> None:
    listed = {place for places in DELIBERATE.values() for place in places}
    found = {
        "*.__getattr__ AttributeError" if raised.endswith("__getattr__ AttributeError") else f"{name} {raised}"
        for name, tree in _modules()
        if not name.startswith("test_utils/")
        for raised in _raised(tree)
    }
    assert found == listed


#: What is raised neither by the name of a class of ours nor of a built-in one -> why.
OTHERWISE: Final[dict[str, str]] = {
    "checkpointing/agreement.py Ranks.fail_together error": "what this rank met itself, as it was",
    "checkpointing/agreement.py Ranks.fail_together problem": "a parameter: a class of CheckpointError",
    "checkpointing/agreement.py write_on_main error": "what this rank met itself, as it was",
    "checkpointing/codec.py _member pickle.UnpicklingError": "pickle's own protocol; caught in the same file",
    "checkpointing/codec.py _DescribedReader.find_class pickle.UnpicklingError": (
        "pickle's own protocol; caught in the same file"
    ),
    "checkpointing/remote.py _all_at_once errors[0]": "what a transfer in a thread met, as it was",
    "commands/parser.py count argparse.ArgumentTypeError": "argparse's own protocol for a bad value",
    "commands/parser.py _processes_per_machine argparse.ArgumentTypeError": "argparse prints it",
    "commands/parser.py reader_of.read argparse.ArgumentTypeError": "argparse's own protocol for a bad value",
    "guests/scripts/verify/prove.py _Prover._first_run error": "the first attempt's, because the second failed too",
    "guests/rewind/replay_command.py _indices argparse.ArgumentTypeError": "argparse's own protocol for a bad value",
    "guests/rewind/replay_command.py _change argparse.ArgumentTypeError": "argparse's own protocol for a bad value",
    "guests/rewind/position.py _run_until.stop child.Reached": "the end of a replay, which its own reader catches",
    "data_loader/dispatch.py DataLoaderDispatcher._scatter announcement.failure": "what rank 0 met, elsewhere as text",
    "distributed/store_requests.py PendingRequest.response self._error": "what a request in a thread met, as it was",
}


def _raised_otherwise(tree: ast.AST, classes: frozenset[str], makers: frozenset[str], name: str = "") -> Iterator[str]:
    for child in ast.iter_child_nodes(tree):
        inner = name
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = f"{name}.{child.name}".lstrip(".")
        if isinstance(child, ast.Raise) and child.exc is not None:
            raised = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            spelled = ast.unparse(raised)
            is_made = isinstance(child.exc, ast.Call) and spelled.removeprefix("self.") in makers
            if spelled not in classes and not is_made:
                yield f"{inner} {spelled}"
        yield from _raised_otherwise(child, classes, makers, inner)


def test_everything_that_is_raised_is_of_a_known_class() -> None:
    """A class of ours, a built-in one (all listed above), what a function makes that says so, or listed here."""
    ours = _exception_classes()
    classes = frozenset({*ours, *(name for name, value in vars(builtins).items() if _is_exception(value))})
    makers = frozenset(
        node.name
        for _, tree in _modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) in ours
    )
    found = {
        f"{name} {raised}"
        for name, tree in _modules()
        if not name.startswith("test_utils/")
        for raised in _raised_otherwise(tree, classes, makers)
    }
    assert found == OTHERWISE.keys()


def test_the_reference_shows_the_tree() -> None:
    page = PACKAGE.parents[1] / "docs" / "reference" / "checkpoints.md"
    assert "::: accelerate.errors" in page.read_text(encoding="utf-8")
