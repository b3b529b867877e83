"""Replace hand-written samplers: a prepared loader divides the training data, and evaluation keeps its own division.

A prepared loader gives all processes as many full batches, and repeats samples for that. Numbers that an evaluation
adds up by itself would count those twice. So an evaluation loader keeps its DistributedSampler, with the Accelerator's
rank and size.
"""

from __future__ import annotations

import ast

from .plan import LOADER, Plan
from .source import dotted, method
from .survey import SAMPLER, Symbol

_SHARDED = "a prepared loader gives each process its part"
_DIVIDED = "the part of this process, on any number of processes"


def change(plan: Plan) -> None:
    """Replace the samplers of training loaders, and complete those of evaluation loaders."""
    loaders = [call for call in plan.script.nodes(ast.Call) if plan.survey.role(call) == LOADER and call.keywords]
    for call in loaders:
        _loader(plan, call)
    for call in plan.script.nodes(ast.Call):
        method_call = method(call)
        if method_call is not None and method_call[0] == "set_epoch" and _is_replaced(plan, method_call[1]):
            plan.remove(plan.script.statement(call), "a prepared loader shuffles anew in each epoch by itself")
        elif dotted(call.func) == "len" and call.args and (data := _divided_data(plan, call.args[0])):
            plan.replace(call, f"-(-len({data}) // {plan.accelerator}.num_processes)", "the part of one process")
    _confirm(plan)
    for symbol in list(plan.survey.assigned):
        if plan.survey.role_of(symbol) == SAMPLER and not is_kept(plan, symbol):
            for statement, value, _ in plan.survey.assignments(symbol):
                _sampler_made(plan, symbol, statement, value)


def _confirm(plan: Plan) -> None:
    """Tell prepare() that the training loaders are divided, if a sampler stays because evaluation has the same line."""
    loaders = set(plan.names(LOADER))
    if loaders and loaders <= plan.divided:
        plan.arguments["dataloader_config"] = "DataLoaderConfiguration(already_sharded=True)"
        plan.imports["accelerate"].append("DataLoaderConfiguration")


def is_kept(plan: Plan, symbol: Symbol) -> bool:
    """Return whether a name refers to a DistributedSampler that stays, or to a loader with one."""
    for _, value, position in plan.survey.assignments(symbol):
        made = sampler_of(plan, plan.survey.result_of(value, position))
        if made is not None and id(made) in plan.kept_samplers:
            return True
    return symbol in plan.divided


def _is_replaced(plan: Plan, node: ast.expr) -> bool:
    """Return whether an expression is a sampler that doesn't stay: `sampler` or `loader.sampler`."""
    owner = node.value if isinstance(node, ast.Attribute) and node.attr == "sampler" else node
    roots = plan.survey.roots(plan.survey.symbol(owner))
    return _is_sampler(plan, node) and not any(is_kept(plan, root) for root in roots)


def _divided_data(plan: Plan, node: ast.expr) -> str:
    """Return the data of `loader.sampler`, if prepare() divides this loader."""
    if not isinstance(node, ast.Attribute) or node.attr != "sampler":
        return ""
    roots = plan.survey.roots(plan.survey.symbol(node.value))
    is_divided = bool(roots) and roots <= set(plan.prepared[LOADER]) and not roots & plan.divided
    return f"{plan.script.text_of(node.value)}.dataset" if is_divided else ""


def _is_sampler(plan: Plan, node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute) and node.attr == "sampler":
        return True
    return plan.survey.may_be(node, SAMPLER) or "sampler" in dotted(node).lower()


def sampler_of(plan: Plan, node: ast.expr | None) -> ast.Call | None:
    """Return the DistributedSampler that an expression creates, or its name refers to."""
    if node is None:
        return None
    if isinstance(node, ast.IfExp):
        return sampler_of(plan, node.body) or sampler_of(plan, node.orelse)
    if isinstance(node, ast.Call):
        return node if plan.survey.role(node) == SAMPLER else None
    for root in plan.survey.roots(plan.survey.symbol(node)):
        for _, value, position in plan.survey.assignments(root):
            made = plan.survey.result_of(value, position)
            is_copy = made is value and isinstance(value, (ast.Name, ast.Attribute))
            found = None if is_copy else sampler_of(plan, made)
            if found is not None:
                return found
    return None


def _loader(plan: Plan, call: ast.Call) -> None:
    """Replace a loader's distributed sampler by ``shuffle``, and prepare the loader."""
    keywords = {keyword.arg: keyword for keyword in call.keywords}
    keyword = keywords.get("sampler")
    made = None if keyword is None else sampler_of(plan, keyword.value)
    if keyword is None or made is None:
        return
    bound = set(plan.survey.bound(call))
    if bound & _evaluated(plan):
        _complete(plan, made)
        plan.divided |= bound
        return
    given = next((each.value for each in made.keywords if each.arg == "shuffle"), None)
    shuffle = "True" if given is None else plan.script.text_of(given)
    own = keywords.get("shuffle")
    if own is not None:
        plan.replace(own.value, shuffle, "the order that the sampler gave", uses=False)
        _drop(plan, call, keyword, _SHARDED)
    else:
        plan.replace(keyword, f"shuffle={shuffle}", _SHARDED, uses=False)
    for symbol in plan.survey.bound(call):
        if symbol not in plan.prepared[LOADER]:
            plan.prepared[LOADER].append(symbol)


def _evaluated(plan: Plan) -> set[Symbol]:
    """Return the loaders that only evaluation loops go through."""
    loaders = {symbol for loop in plan.survey.loops if not loop.trains for symbol in loop.loaders}
    return loaders - set(plan.survey.trained[LOADER])


def _complete(plan: Plan, made: ast.Call) -> None:
    """Give a sampler its size and rank, for runs without a process group."""
    if id(made) in plan.kept_samplers:
        return
    plan.kept_samplers.add(id(made))
    given = {keyword.arg for keyword in made.keywords}
    missing = {"num_replicas": "num_processes", "rank": "process_index"}
    text = "".join(f", {name}={plan.accelerator}.{value}" for name, value in missing.items() if name not in given)
    if made.args and len(made.args) == 1 and text:
        end = max(plan.script.end(each) for each in (*made.args, *(keyword.value for keyword in made.keywords)))
        plan.cut(end, end, text, _DIVIDED, made)
        plan.users.append(made)


def _drop(plan: Plan, call: ast.Call, keyword: ast.keyword, why: str) -> None:
    """Remove an argument and the comma before it (or after it, for the first argument)."""
    arguments = sorted([*call.args, *call.keywords], key=plan.script.start)
    at = arguments.index(keyword)
    if at:
        plan.cut(plan.script.end(arguments[at - 1]), plan.script.end(keyword), "", why, keyword)
    elif len(arguments) > 1:
        plan.cut(plan.script.start(keyword), plan.script.start(arguments[1]), "", why, keyword)


def _is_handed_on(plan: Plan, node: ast.Name, symbol: Symbol) -> bool:
    """Return whether a sampler is returned or passed to one of the script's functions, beside the replaced uses."""
    if not isinstance(node.ctx, ast.Load) or plan.survey.symbol(node) != symbol:
        return False
    outer = plan.script.parents[node]
    if isinstance(outer, ast.Call):
        return dotted(outer.func).rpartition(".")[2] in plan.survey.functions
    return isinstance(plan.script.statement(node), ast.Return) and isinstance(outer, (ast.Return, ast.Tuple))


def _sampler_made(plan: Plan, symbol: Symbol, statement: ast.stmt, value: ast.expr) -> None:
    if isinstance(statement, ast.Assign) and statement.value is value and dotted(statement.targets[0]):
        if any(_is_handed_on(plan, node, symbol) for node in plan.script.nodes(ast.Name)):
            plan.replace(value, "None", _SHARDED, uses=False)
        else:
            plan.remove(statement, _SHARDED)
    made = sampler_of(plan, value)
    for node in plan.script.nodes(ast.Call):
        if dotted(node.func) == "len" and node.args and plan.survey.symbol(node.args[0]) == symbol and made is not None:
            data = plan.script.text_of(made.args[0]) if made.args else "dataset"
            plan.replace(node, f"(len({data}) // {plan.accelerator}.num_processes)", "the part of one process")
