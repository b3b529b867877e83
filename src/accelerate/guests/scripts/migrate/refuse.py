"""Refuse scripts that can't or needn't be converted, and name the line."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ....errors import AccelerateError
from .distributed import is_kept, is_trained, sampler_of
from .plan import Plan
from .source import Edit, Function, Placed, Script, chosen, dotted, is_constant, keyword, method, targets
from .steps import adds_up, collected
from .survey import LOADER, MODEL, OPTIMIZER, PREPARED, Survey

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
_FUNCTIONAL: Final = ("torch.func.grad", "torch.func.grad_and_value", "torch.func.vjp", "torch.autograd.grad")
_CHANGES: Final = ("add_", "sub_", "addcdiv_", "copy_")
#: How the data of a parameter is called, or a parameter itself.
_DATA: Final = ("data", "p", "param", "parameter")
_PROCESSES: Final = ("torch.multiprocessing.Process", "multiprocessing.Process")
_TRAINERS: Final = ("transformers.Trainer", "transformers.Seq2SeqTrainer", "trl.SFTTrainer")


class Refused(AccelerateError, ValueError):
    """The error for a script that isn't converted; its text begins with the file and line of the reason."""


def read_script(path: Path) -> str:
    """Return the text of a script, line endings included.

    Raises:
        Refused: it is a notebook, or isn't text.
    """
    if path.suffix == ".ipynb":
        raise Refused(f"{path}:1: it is a notebook; export it as a script first (jupyter nbconvert --to script).")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{path}:1: it isn't text in UTF-8 ({error.reason} at byte {error.start}).") from None


def parsed(text: str, name: str) -> Script:
    """Return the parsed script with this text.

    Raises:
        Refused: it isn't Python.
    """
    try:
        return Script(text, name)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise Refused(f"{name}:{line}: it isn't valid Python ({getattr(error, 'msg', error)}).") from None


def check(script: Script, survey: Survey) -> None:
    """Raise unless the script has its own loop that can be converted.

    Raises:
        Refused: it has none.
    """
    _check_imports(script)
    for node in script.nodes(ast.Call):
        path = script.path(node.func)
        if path in _TRAINERS:
            raise _refused(script, node, f"{path} runs the loop, and works with `accelerate launch` as it is")
        if path in _PROCESSES and not survey.training_functions.isdisjoint(map(dotted, ast.walk(node))):
            raise _refused(script, node, "it starts its training processes one by one; call the worker function "
                           "directly and let `accelerate launch` start the processes")  # fmt: skip
    if survey.backwards:
        _check_optimizers(script, survey)
    else:
        _check_evaluation(script, survey)
    _check_placing(script)


def _check_optimizers(script: Script, survey: Survey) -> None:
    """Raise unless there is an optimizer with a module's parameters, at the line of its creation."""
    if not survey.trained[OPTIMIZER]:
        for call, owner in script.methods(*_CHANGES):
            if dotted(owner).rpartition(".")[2] in _DATA:
                raise _refused(script, call, "weights are changed by hand here, and no optimizer was recognised. Use "
                               "`torch.optim.SGD(model.parameters(), lr=lr)` and `optimizer.step()`")  # fmt: skip
        roots = [root for _, owner in script.methods("zero_grad") for root in survey.roots_of(owner)]
        stepped = [statement for root in roots for statement, _, _ in survey.assignments(root)]
        raise _refused(script, (stepped or survey.backwards)[0], "no optimizer was recognised (one of torch.optim) for "
                       "the training loop. Make it with `torch.optim.NAME(model.parameters(), ...)`")  # fmt: skip
    if not survey.trained[MODEL]:
        made = [call for call in script.nodes(ast.Call) if survey.role(call) == OPTIMIZER]
        raise _refused(script, (made or survey.backwards)[0], "no model was recognised: the optimizer doesn't visibly "
                       "get a module's parameters(). Train an nn.Module, with tensors in nn.Parameter")  # fmt: skip


def _check_evaluation(script: Script, survey: Survey) -> None:
    for call in script.nodes(ast.Call):
        if script.path(call.func) in _FUNCTIONAL:
            raise _refused(script, call, "gradients come from a function here, not from `loss.backward()`, so nothing "
                           "would average them over processes. Train a module with loss.backward()")  # fmt: skip
    last = survey.loops[-1].node if survey.loops else script.tree
    if not collected(survey):
        raise _refused(script, last, "nothing is trained: there is no `loss.backward()`, and no loop over a loader "
                       "appends predictions to lists")  # fmt: skip
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
        name, owner = method(node) or ("", node)
        if dotted(node.func) == "Accelerator" or (name == "prepare" and "accelerator" in dotted(owner)):
            raise _refused(script, node, "it uses accelerate already")


def _check_placing(script: Script) -> None:
    """Raise if a model is distributed over several devices by hand."""
    seen: dict[str, ast.AST] = {}
    for node in script.nodes(ast.Constant):
        if isinstance(node.value, str) and node.value.startswith("cuda:") and node.value[5:].isdigit():
            seen.setdefault(node.value, node)
    if len(seen) > 1:
        node = list(seen.values())[1]
        raise _refused(script, node, f"the model is spread by hand over {', '.join(seen)}; start from the version for "
                       "one device, or load it with a device map")  # fmt: skip


def check_left(plan: Plan, edits: list[Edit]) -> None:
    """Raise if a remaining line would silently be wrong on several processes.

    Raises:
        Refused: there is such a line.
    """
    script = plan.script
    _check_stages(plan)
    _check_wrapped_loaders(plan)
    _check_unfreezing(plan)
    covered = [(edit.start, edit.end) for edit in chosen(edits) if edit.end > edit.start]

    def stays(node: ast.expr) -> bool:
        start = script.start(node)
        return not plan.is_removed(node) and not any(first <= start < end for first, end in covered)

    for call, owner in script.methods("parameters", "named_parameters"):
        if dotted(owner) == "self" and any(symbol.name == "self" for symbol in plan.prepared[MODEL]):
            raise _refused(script, call, "the model trains itself: its own methods would bypass the wrapper that "
                           "prepare() returns. Move the loop out of the class")  # fmt: skip
    around = _bypassing(plan)
    if around is not None:
        raise _refused(script, around, f"`{dotted(around.func)}()` runs the model without its forward(), so gradients "
                       "aren't averaged over processes. Let forward() return the loss, and call the model itself "
                       "in the loop")  # fmt: skip
    for call in script.nodes(ast.Call) if plan.survey.backwards and not plan.prepared[LOADER] else ():
        if plan.survey.role(call) == LOADER and not plan.is_removed(call):
            raise _refused(script, _training_loop(plan) or call, "the loop that calls backward() doesn't visibly go "
                           f"through the loader of line {call.lineno}, so every process would train on all of it. "
                           "Write `for batch in loader:` here, with the loader's own name or parameter")  # fmt: skip
    for call in plan.survey.backwards if len(plan.survey.backwards) > 1 else ():
        keeps = is_constant(keyword(call, "retain_graph"), True)
        if keeps and not plan.is_by_hand:
            raise _refused(script, call, "a second backward pass goes through the same forward pass, and gradients "
                           "are averaged in the first one. Add the losses and call backward() once")  # fmt: skip
    if not plan.is_by_hand:
        return
    for call in script.nodes(ast.Call):
        given = keyword(call, "sampler")
        if given is None or sampler_of(plan, given) is None or plan.survey.role(call) != LOADER:
            continue
        if not any(symbol in {*plan.prepared[LOADER], *plan.divided} for symbol in plan.survey.bound(call)):
            raise _refused(script, call, "this loader's part of the data comes from a DistributedSampler, and it isn't "
                           "understood which name the loader gets. Give it one that prepare() can take")  # fmt: skip
    for node in script.nodes(ast.Attribute):
        if not isinstance(node.ctx, ast.Load) or not dotted(node) or script.path(node).startswith("torch."):
            continue
        if node.attr == "module" and stays(node):
            raise _refused(script, node, f"`{dotted(node)}` is the model inside DistributedDataParallel, but "
                           f"`{dotted(node.value)}` isn't a model known here")  # fmt: skip
        owners = plan.survey.roots_of(node.value)
        if node.attr == "sampler" and stays(node) and not (owners and all(is_kept(plan, each) for each in owners)):
            raise _refused(script, node, f"`{dotted(node)}` is the part of one process; the sampler of a prepared "
                           "loader is the whole order. Use the loader's dataset instead")  # fmt: skip
    _check_sizes(plan, stays)


def _check_sizes(plan: Plan, stays: Callable[[ast.expr], bool]) -> None:
    """Raise if a number is computed from a world size of unknown origin."""
    script = plan.script
    for node in script.nodes(ast.BinOp):
        updated = {dotted(target) for target in targets(script.statement(node))}
        for size in ast.walk(node):
            if not isinstance(size, (ast.Name, ast.Attribute)) or not stays(size):
                continue
            name = dotted(size)
            if name.rpartition(".")[2] == "world_size" and name not in updated and not _is_set(plan, name, stays):
                raise _refused(script, node, f"a number is made with `{name}`, and it isn't understood to be the "
                               "number of processes wherever it is set")  # fmt: skip


def _training_loop(plan: Plan) -> ast.stmt | None:
    """Return the innermost loop in which a backward runs."""
    loops = [loop for loop in plan.script.nodes((ast.For, ast.While)) if plan.survey.trains(loop)]
    inner = [loop for loop in loops if not any(loop in plan.script.ancestors(other) for other in loops)]
    return inner[0] if inner else None


def _check_wrapped_loaders(plan: Plan) -> None:
    """Raise if a loader's name stands for an object of a class that wraps it."""
    for symbol in plan.prepared[LOADER]:
        for statement, value, _ in plan.survey.assignments(symbol):
            name = dotted(value.func) if isinstance(value, ast.Call) else ""
            if name in plan.survey.classes and plan.survey.role(value) is None:
                raise _refused(plan.script, statement, f"`{symbol.name}` is an object of {name} here, which prepare() "
                               f"can't divide over processes. Do what {name} does in the dataset, in a collate_fn or "
                               "in the loop, and go through the DataLoader there")  # fmt: skip


def _check_stages(plan: Plan) -> None:
    """Raise if a prepared object is created again after another one of its name was trained."""
    for symbol in dict.fromkeys(symbol for role in PREPARED for symbol in plan.prepared[role]):
        made = [
            statement
            for statement, value, _ in plan.survey.assignments(symbol)
            if not any(dotted(each) == symbol.name for each in ast.walk(value))  # model = model.to(device)
            and not plan.is_after_training(statement)
        ]
        for first, second in itertools.pairwise(sorted(made, key=lambda each: each.lineno)):
            if _trained_between(plan, first, second):
                raise _refused(plan.script, second, f"`{symbol.name}` is made again after training with the one of "
                               f"line {first.lineno}, and prepare() would get this one only. Prepare each of them by "
                               "hand, with the model as it trains then")  # fmt: skip


def _trained_between(plan: Plan, first: ast.stmt, second: ast.stmt) -> bool:
    return any(
        (first.end_lineno or 0) < statement.lineno <= second.lineno
        and (isinstance(statement, (ast.For, ast.While)) or (statement.end_lineno or 0) < second.lineno)
        for statement in plan.training_in(plan.script.scope(second))
    )


def _check_unfreezing(plan: Plan) -> None:
    """Raise if parameters are frozen when the model is prepared and trained later."""
    changes: list[tuple[Placed, ast.expr | None]] = [
        (statement, statement.value)
        for statement in plan.script.nodes(ast.Assign)
        if any(isinstance(target, ast.Attribute) and target.attr == "requires_grad" for target in statement.targets)
    ]
    changes += [(call, (*call.args, None)[0]) for call, _ in plan.script.methods("requires_grad_")]
    frozen = [node for node, value in changes if not is_constant(value, True) and value is not None]
    freed = [node for node, value in changes if not is_constant(value, False)]
    late = [place for node in freed for place, is_late in _places(plan, node) if is_late]
    if late and not all(is_late for node in frozen for _, is_late in _places(plan, node)):
        raise _refused(plan.script, late[0], "parameters that were frozen before are trained from here on; prepare() "
                       "has wrapped the model without them, so each process would train its own. Prepare the model "
                       "again by hand after this line")  # fmt: skip


def _places(plan: Plan, node: Placed) -> Iterator[tuple[Placed, bool]]:
    """Yield the places where a statement runs (in a function: its calls), and whether training has begun there."""
    scope = plan.script.scope(node)
    name = "" if isinstance(scope, ast.Module) else scope.name
    calls: list[Placed] = [c for c in plan.script.nodes(ast.Call) if name and dotted(c.func).rpartition(".")[2] == name]
    for place in calls if calls and not plan.survey.trains(scope) else [node]:
        outer, trained = set(plan.script.ancestors(place)), list(plan.training_in(plan.script.scope(place)))
        past = [each for each in trained if (each.end_lineno or 0) < place.lineno]
        around = [each for each in trained if isinstance(each, (ast.For, ast.While)) and each in outer]
        yield place, bool(past or around)


def _is_set(plan: Plan, name: str, stays: Callable[[ast.expr], bool]) -> bool:
    """Return whether a name is a function's parameter, or is always assigned a value of the Accelerator."""
    values = plan.script.values_of(name)
    if not values:
        return "." not in name
    left = [value for value in values if stays(value)]
    return len(left) < len(values) and all(is_constant(value, 1) for value in left)


def _refused(script: Script, node: ast.AST, reason: str) -> Refused:
    return Refused(f"{script.name}:{getattr(node, 'lineno', 1)}: {reason}.")


def _bypassing(plan: Plan) -> ast.Call | None:
    """Return the first call of a prepared model's own method that runs its layers in the training loop."""
    for call in plan.script.nodes(ast.Call):
        name, owner = method(call) or ("forward", call)
        is_used = isinstance(plan.script.statement(call), (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return))
        if name == "forward" or not dotted(owner) or not is_used:
            continue
        own = [each for each in plan.survey.functions.get(name, ()) if _is_of_module(plan, each)]
        if own and is_trained(plan, owner) and plan.is_in_training(call) and _runs_layers(plan, own[0]):
            return call
    return None


def _is_of_module(plan: Plan, function: Function) -> bool:
    owner = plan.script.parents.get(function)
    return isinstance(owner, ast.ClassDef) and plan.survey.is_module_class(owner.name)


def _runs_layers(plan: Plan, function: Function) -> bool:
    """Return whether a method calls the module itself or one of its layers, with gradients."""
    if any(map(plan.is_without_gradients, function.decorator_list)):
        return False
    called = [call.func for call in plan.script.nodes(ast.Call, function)]
    layers = (each for each in called if isinstance(each, ast.Attribute))
    runs_itself = any(dotted(each) in ("self", "self.forward") for each in called)
    return runs_itself or any(plan.survey.role_of(plan.survey.symbol(each)) == MODEL for each in layers)
