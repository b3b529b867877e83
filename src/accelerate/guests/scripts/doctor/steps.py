"""Rules for one step: backward, accumulation, clipping, precision, and the order of the calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ..migrate.source import dotted, keyword, method
from ..migrate.survey import MODEL, OPTIMIZER
from .processes import Processes
from .subject import Place, Subject, at

_CLIPS: Final = ("clip_grad_norm_", "clip_grad_value_")
_AUTOCAST: Final = ("torch.autocast", "torch.cuda.amp.autocast", "torch.amp.autocast")


def backward_by_hand(subject: Subject, _: Processes) -> Iterator[Place]:
    for call, owner in subject.script.methods("backward"):
        if call in subject.survey.backwards and dotted(owner) not in subject.accelerators and not call.args:
            yield at(call)


def clipping_by_hand(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.calls:
        if subject.script.last_name(call) in _CLIPS and subject.script.path(call.func).startswith("torch."):
            yield at(call, name=subject.script.last_name(call))


def _several(subject: Subject) -> ast.Call | None:
    """Return the call that makes an Accelerator with several micro-batches in an update."""
    for call in subject.made:
        steps = keyword(call, "gradient_accumulation_steps") or keyword(call, "gradient_accumulation_plugin")
        if steps is not None and subject.constant(steps) != 1:
            return call
    return None


def clipping_of_parts(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.calls_of(*_CLIPS) if _several(subject) is not None else ():
        tests = [each.test for each in subject.script.ancestors(call) if isinstance(each, ast.If)]
        if not tests and any(_is_window(subject, each) for each in subject.script.ancestors(call)):
            yield at(call, name=ast.unparse(call.func))


def _is_window(subject: Subject, node: ast.AST) -> bool:
    """Return whether a node is ``with accelerator.accumulate(model):``."""
    windows = set(subject.calls_of("accumulate"))
    return isinstance(node, ast.With) and any(item.context_expr in windows for item in node.items)


def accumulation_without_window(subject: Subject, _: Processes) -> Iterator[Place]:
    call = _several(subject)
    has_window = subject.uses("accumulate", "no_sync") or not subject.survey.backwards
    if call is not None and not has_window and keyword(call, "gradient_accumulation_steps") is not None:
        yield at(call)


def window_by_hand(subject: Subject, _: Processes) -> Iterator[Place]:
    if not subject.uses("no_sync", "accumulate", "trigger_sync_in_backward"):
        yield from _counted_steps(subject)


def window_counted_twice(subject: Subject, _: Processes) -> Iterator[Place]:
    for place in _counted_steps(subject):
        if any(_is_window(subject, outer) for outer in subject.script.ancestors(place.node)):
            yield place


def _counted_steps(subject: Subject) -> Iterator[Place]:
    """Yield the steps under ``if step % n == 0:``."""
    for call, owner in subject.script.methods("step"):
        if subject.role(owner) != OPTIMIZER or not subject.loops_around(call):
            continue
        for outer in subject.script.ancestors(call):
            if outer is subject.loops_around(call)[0]:
                break
            if isinstance(outer, ast.If) and _counts(outer.test) and not subject.survey.trains(outer):
                yield at(call, condition=ast.unparse(outer.test))
                break


def _counts(test: ast.expr) -> bool:
    modulo = (each for each in ast.walk(test) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod))
    return any(not isinstance(each.left, ast.Constant) for each in modulo)


def divided_twice(subject: Subject, _: Processes) -> Iterator[Place]:
    made = _several(subject)
    steps = keyword(made, "gradient_accumulation_steps") if made is not None else None
    if steps is None:
        return
    for node in subject.script.nodes((ast.BinOp, ast.AugAssign)):
        divisor = node.right if isinstance(node, ast.BinOp) else node.value
        same = ast.unparse(divisor) == ast.unparse(steps) or dotted(divisor).endswith("gradient_accumulation_steps")
        if isinstance(node.op, ast.Div) and same and _is_for_backward(subject, node):
            yield at(node, steps=ast.unparse(divisor))


def _is_for_backward(subject: Subject, node: ast.BinOp | ast.AugAssign) -> bool:
    statement = subject.script.statement(node)
    given = {dotted(name) for call in subject.survey.backwards for arg in call.args for name in ast.walk(arg)}
    named = [statement.target] if isinstance(statement, ast.AugAssign) else getattr(statement, "targets", [])
    is_loss = any(dotted(target) in given for target in named if dotted(target))
    return is_loss or any(node in ast.walk(call) for call in subject.survey.backwards)


def step_outside_window(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.calls_of("accumulate"):
        window = subject.script.parents[subject.script.parents[call]]
        if not isinstance(window, ast.With):
            continue
        for statement in subject.script.block(window):
            if statement.lineno <= (window.end_lineno or 0):
                continue
            for step, owner in subject.script.methods("step", inside=statement):
                if subject.role(owner) == OPTIMIZER:
                    yield at(step, name=ast.unparse(step.func))


# -- the order of the calls ---------------------------------------------------------------------------------


def _following(subject: Subject, *names: str) -> Iterator[tuple[ast.Call, str, set[str], set[str]]]:
    """Yield the calls of these methods that follow a backward pass in its block, before the next one.

    Each comes with the name of its object, and the optimizers that step before it and after it.
    """
    for backward in subject.survey.backwards:
        statement, found = subject.script.statement(backward), list[tuple[ast.Call, str, str]]()
        later = [each for each in subject.script.block(statement) if each.lineno > statement.lineno]
        for call in (call for each in later for call in subject.script.nodes(ast.Call, each)):
            if call in subject.survey.backwards:
                break
            name, owner = method(call) or ("", call)
            if name != "step" or subject.role(owner) == OPTIMIZER:
                found.append((call, name, ast.unparse(owner)))
        steps = [(place, owner) for place, (_, name, owner) in enumerate(found) if name == "step"]
        for at_place, (call, name, owner) in enumerate(found):
            if name in names:
                before = {each for place, each in steps if place < at_place}
                yield call, owner, before, {each for place, each in steps if place > at_place}


def gradients_dropped(subject: Subject, _: Processes) -> Iterator[Place]:
    for call, owner, earlier, later in _following(subject, "zero_grad"):
        if owner in later - earlier:
            yield at(call, name=ast.unparse(call.func))


def clipped_after_step(subject: Subject, _: Processes) -> Iterator[Place]:
    for call, _owner, earlier, later in _following(subject, *_CLIPS):
        if earlier and not later:
            yield at(call, name=ast.unparse(call.func))


def never_zeroed(subject: Subject, _: Processes) -> Iterator[Place]:
    if subject.uses("zero_grad") or not subject.survey.backwards:
        return
    for call, owner in subject.script.methods("step"):
        if subject.role(owner) == OPTIMIZER and subject.loops_around(call) and not call.args:
            yield at(call, name=ast.unparse(owner))
            return


# -- precision and modes ------------------------------------------------------------------------------------


def autocast_by_hand(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.script.calls(*_AUTOCAST):
        if subject.constant(keyword(call, "enabled")) is not False:
            yield at(call, name=ast.unparse(call.func))


def scaler_by_hand(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.calls:
        if subject.script.path(call.func).startswith("torch.") and subject.script.last_name(call) == "GradScaler":
            yield at(call)


def never_trained_again(subject: Subject, _: Processes) -> Iterator[Place]:
    for call, owner in subject.script.methods("eval"):
        if call.args or subject.role(owner) != MODEL or not subject.roots(owner) & subject.prepared:
            continue
        function = subject.script.scope(call)
        places = [call, *subject.callers.get(function, [])] if not isinstance(function, ast.Module) else [call]
        repeats = any(subject.survey.trains(loop) for place in places for loop in subject.loops_around(place))
        if repeats and not subject.uses("train"):
            yield at(call, name=ast.unparse(owner))
