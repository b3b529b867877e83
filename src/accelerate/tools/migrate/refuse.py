"""The refusal of scripts that can't be changed, or needn't be, with the line that is the reason."""

from __future__ import annotations

import ast
from typing import Final

from ...errors import AccelerateError
from .evaluation import adds_up, collected
from .source import Script, dotted, method
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


def _refused(script: Script, node: ast.AST, reason: str) -> Refused:
    return Refused(f"{script.location(node)}: {reason}.")
