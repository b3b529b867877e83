"""The refusal of scripts that can't be changed, or needn't be, with the line that is the reason."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Final

from ...errors import AccelerateError
from .distributed import is_by_hand
from .evaluation import adds_up, collected
from .plan import Plan
from .source import Edit, Script, chosen, dotted, method, pairs, targets
from .survey import MODEL, OPTIMIZER, Survey

_OTHERS: Final = {
    "accelerate": "it uses accelerate already",
    "lightning": "it trains with Lightning, which has processes and devices of its own",
    "pytorch_lightning": "it trains with Lightning, which has processes and devices of its own",
    "deepspeed": "it drives DeepSpeed by hand; start from a plain loop and Accelerator(deepspeed_plugin=...)",
    "horovod": "it is distributed by Horovod; start from the version for one device",
    "torch_xla": "it drives TPUs by hand; start from the version for one device",
    "colossalai": "it drives Colossal-AI by hand; start from a plain loop",
    "fairscale": "it shards with fairscale by hand; start from the version for one device",
    "torch.distributed.fsdp": "it shards with FSDP by hand; start from the version for one device",
    "torch.distributed._composable.fsdp": "it shards with FSDP by hand; start from the version for one device",
    "torch.distributed.tensor": "it cuts tensors over devices by hand; start from the version for one device",
    "torch.distributed.pipelining": "it cuts the model into stages by hand; start from the version for one device",
    "torch.distributed.rpc": "it calls other processes by hand; start from the version for one device",
    "tensorflow": "it is a TensorFlow program",
    "jax": "it is a JAX program",
}
_TRAINERS: Final = ("transformers.Trainer", "transformers.Seq2SeqTrainer", "trl.SFTTrainer")


class Refused(AccelerateError, ValueError):
    """The script isn't migrated; the text begins with the file and line of the reason."""


def parsed(text: str, name: str) -> Script:
    """Return the script with this text.

    Raises:
        Refused: it isn't Python.
    """
    try:
        return Script(text, name)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise Refused(f"{name}:{line}: it isn't valid Python ({getattr(error, 'msg', error)}).") from None


def check(script: Script, survey: Survey) -> None:
    """Raise unless the script has a loop of its own that can be changed.

    Raises:
        Refused: it hasn't.
    """
    _check_imports(script)
    for node in script.nodes(ast.Call):
        path = script.path(node.func)
        if path in _TRAINERS:
            raise _refused(script, node, f"{path} runs the loop, and works with `accelerate launch` as it is")
        if path in ("torch.multiprocessing.Process", "multiprocessing.Process") and _trains(survey, node):
            raise _refused(script, node, "it starts its training processes one by one; call the worker function "
                           "directly and let `accelerate launch` start the processes")  # fmt: skip
    if not survey.backwards:
        _check_evaluation(script, survey)
        _check_placing(script)
        return
    first = survey.backwards[0]
    for role, hint in ((OPTIMIZER, "one of torch.optim"), (MODEL, "whose parameters() an optimizer gets")):
        if not survey.trained[role]:
            raise _refused(script, first, f"loss.backward() is here, but no {role} was recognised ({hint})")
    _check_placing(script)


def _check_evaluation(script: Script, survey: Survey) -> None:
    last = survey.loops[-1].node if survey.loops else script.tree
    if not collected(survey):
        raise _refused(script, last, "nothing is trained: there is no `loss.backward()`, and no loop over a loader "
                       "that appends what it predicts to lists")  # fmt: skip
    node = adds_up(survey)
    if node is not None:
        raise _refused(script, node, "the loop adds up numbers by itself, which would be those of one process; append "
                       "predictions and labels to lists, or use accelerator.streaming_mean()")  # fmt: skip


def _check_imports(script: Script) -> None:
    for node in script.nodes((ast.Import, ast.ImportFrom)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            for other, reason in _OTHERS.items():
                if name == other or name.startswith(f"{other}."):
                    raise _refused(script, node, reason)
    for node in script.nodes(ast.Call):
        method_call = method(node)
        if dotted(node.func) == "Accelerator" or (
            method_call and method_call[0] == "prepare" and "accelerator" in dotted(method_call[1])
        ):
            raise _refused(script, node, "it uses accelerate already")


def _trains(survey: Survey, call: ast.Call) -> bool:
    names = {dotted(each) for each in ast.walk(call) if dotted(each)}
    return bool(names & survey.training_functions)


def _check_placing(script: Script) -> None:
    """Raise for a model that is spread over several devices by hand."""
    seen: dict[str, ast.AST] = {}
    for node in script.nodes(ast.Constant):
        if isinstance(node.value, str) and node.value.startswith("cuda:") and node.value[5:].isdigit():
            seen.setdefault(node.value, node)
    if len(seen) > 1:
        node = list(seen.values())[1]
        raise _refused(script, node, f"the model is spread by hand over {', '.join(seen)}; start from the version for "
                       "one device, or load it with a device map")  # fmt: skip


def check_left(plan: Plan, edits: list[Edit]) -> None:
    """Raise where something stays that several processes would do wrong, without a word.

    Raises:
        Refused: there is such a line.
    """
    script = plan.script
    covered = [(edit.start, edit.end) for edit in chosen(edits) if edit.end > edit.start]

    def stays(node: ast.expr) -> bool:
        start = script.start(node)
        return not plan.is_removed(node) and not any(first <= start < end for first, end in covered)

    for call in script.nodes(ast.Call):
        found = method(call)
        if (
            found is not None
            and found[0] in ("parameters", "named_parameters")
            and dotted(found[1]) == "self"
            and any(symbol.name == "self" for symbol in plan.names(MODEL))
        ):
            raise _refused(script, call, "the model trains itself: prepare() returns another object, which the model's "
                           "own methods wouldn't use. Move the loop out of the class")  # fmt: skip
    if not is_by_hand(plan):
        return
    for node in script.nodes(ast.Attribute):
        if not isinstance(node.ctx, ast.Load) or not dotted(node) or script.path(node).startswith("torch."):
            continue
        if node.attr == "module" and stays(node):
            raise _refused(script, node, f"`{dotted(node)}` is what DistributedDataParallel keeps the model in, and "
                           f"it isn't understood which model `{dotted(node.value)}` is")  # fmt: skip
        if node.attr == "sampler" and stays(node):
            raise _refused(script, node, f"`{dotted(node)}` is the part of one process; the sampler of a prepared "
                           "loader is the whole order. Count with the dataset instead")  # fmt: skip
    for node in script.nodes(ast.BinOp):
        updated = {dotted(target) for target in targets(script.statement(node))}
        for size in ast.walk(node):
            if not isinstance(size, (ast.Name, ast.Attribute)) or not stays(size):
                continue
            name = dotted(size)
            if name.rpartition(".")[2] == "world_size" and name not in updated and not _is_set(plan, name, stays):
                raise _refused(script, node, f"a number is made with `{name}`, and it isn't understood to be the "
                               "number of processes wherever it is set")  # fmt: skip


def _is_set(plan: Plan, name: str, stays: Callable[[ast.expr], bool]) -> bool:
    """Return whether a name is a function's parameter, or gets what the Accelerator knows wherever it is assigned."""
    values = [
        value
        for statement in plan.script.nodes((ast.Assign, ast.AnnAssign))
        for target, value in pairs(statement)
        if dotted(target) == name
    ]
    if not values:
        return "." not in name
    return not any(stays(value) for value in values)


def _refused(script: Script, node: ast.AST, reason: str) -> Refused:
    return Refused(f"{script.location(node)}: {reason}.")
