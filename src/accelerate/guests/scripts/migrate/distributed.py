"""Replace hand-written distributed training by the launcher and ``prepare``.

A prepared loader divides the training data. It gives all processes as many full batches, and repeats samples for that.
Numbers that an evaluation adds up by itself would count those twice. So an evaluation loader keeps its
DistributedSampler, with the Accelerator's rank and size.
"""

from __future__ import annotations

import ast
from typing import Final

from .plan import LOADER, MODEL, Plan
from .source import argument, dotted, keyword, method, parameters, targets
from .survey import SAMPLER, Symbol

_NUMBERS: Final = {
    "RANK": "process_index", "LOCAL_RANK": "local_process_index", "WORLD_SIZE": "num_processes",
    "torch.distributed.get_rank": "process_index", "torch.distributed.get_world_size": "num_processes",
    "torch.distributed.get_node_local_rank": "local_process_index",
}  # fmt: skip
_ADDRESS: Final = ("MASTER_ADDR", "MASTER_PORT")
_QUESTIONS: Final = (
    "is_initialized", "is_available", "is_nccl_available", "is_gloo_available", "is_torchelastic_launched",
)  # fmt: skip
_REDUCTIONS: Final = {"SUM": "sum", "AVG": "mean", "MAX": "max"}
_WRAPPERS: Final = ("DistributedDataParallel", "DataParallel")
_DDP_OPTIONS: Final = (
    "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb", "broadcast_buffers",
)  # fmt: skip
_SETS_UP: Final = ("init_process_group", "DistributedDataParallel", "DistributedSampler", "all_reduce")
_LAUNCHED = "accelerate launch starts the processes, and Accelerator() joins them"


def change(plan: Plan) -> None:
    """Replace process groups, samplers, wrappers and collectives by the Accelerator's."""
    for call in plan.script.nodes(ast.Call):
        path = plan.script.path(call.func)
        last = path.rpartition(".")[2]
        if path in ("torch.distributed.init_process_group", "torch.distributed.destroy_process_group"):
            plan.remove(plan.script.statement(call), _LAUNCHED)
        elif last in _WRAPPERS and path.startswith(("torch.", last)):
            _wrapper(plan, call, last)
        elif path == "torch.multiprocessing.spawn":
            _spawned(plan, call)
        elif path.startswith("torch.distributed."):
            _collective(plan, call, last)
    _switches(plan)
    _numbers(plan)
    _samplers(plan)
    _inner_models(plan)


# ---------------------------------------------------------------------------------------- wrappers


def _wrapper(plan: Plan, call: ast.Call, last: str) -> None:
    if not call.args:
        return
    inner, statement = call.args[0], plan.script.statement(call)
    why = f"prepare() wraps the model in what the run needs, {last} included"
    options = [each for each in call.keywords if each.arg in _DDP_OPTIONS]
    if options and last == "DistributedDataParallel":
        plan.handlers["DistributedDataParallelKwargs"] = [
            f"{each.arg}={plan.script.text_of(each.value)}" for each in options
        ]
    bound, name = targets(statement), dotted(inner)
    same = len(bound) == 1 and name and dotted(bound[0]) == name
    if same and isinstance(statement, ast.Assign) and _only_places(statement.value, call):
        plan.remove(statement, why)
        return
    plan.strip_around(call, inner, why)
    if len(bound) == 1 and name:  # wrapped = DDP(model): the wrapped name is the one to prepare
        outer, root = plan.survey.symbol(bound[0]), plan.survey.symbol(inner)
        models = plan.prepared[MODEL]
        if outer is not None and root in models:
            plan.prepared[MODEL] = list(dict.fromkeys(outer if each == root else each for each in models))
            plan.aliases[outer] = root


def _only_places(value: ast.expr, call: ast.Call) -> bool:
    """Return whether a value is the call, or the call moved to a device."""
    while value is not call:
        name, value = method(value) or ("", value)
        if name not in ("to", "cuda"):
            return False
    return True


def _switches(plan: Plan) -> None:
    """Set the variables of ``if args.distributed:`` around distributed set-up to ``use_distributed``."""
    found: dict[str, ast.If] = {}
    for node in plan.script.nodes(ast.If):
        name = dotted(node.test)
        calls = (call for statement in node.body for call in plan.script.nodes(ast.Call, statement))
        if name and any(plan.script.last_name(call) in _SETS_UP for call in calls):
            found.setdefault(name, node)
    for name, node in found.items():
        made = plan.script.values_of(name)
        for value in made:
            plan.replace(value, f"{plan.accelerator}.use_distributed", "whether there are several processes")
        if not made and name not in parameters(plan.script.scope(node)):
            plan.note(node, f"`{name}` switches what only several processes need, and isn't set in this script. Make "
                      f"it `{plan.accelerator}.use_distributed`.")  # fmt: skip


def _inner_models(plan: Plan) -> None:
    """Replace ``model.module`` and ``model.no_sync()`` of a wrapped model."""
    for call, owner in plan.script.methods("no_sync"):
        if is_trained(plan, owner):
            text = f"{plan.accelerator}.no_sync({plan.script.text_of(owner)})"
            plan.replace(call, text, "gradients stay here, whatever the model is wrapped in")
    for node in plan.script.reads:
        if isinstance(node, ast.Attribute) and node.attr == "module" and is_trained(plan, node.value):
            text = f"{plan.accelerator}.unwrap_model({plan.script.text_of(node.value)})"
            plan.replace(node, text, "the model without what prepare() put around it")


def is_trained(plan: Plan, node: ast.expr) -> bool:
    """Return whether a name is a prepared model, before or after it was moved or wrapped."""
    known = {*plan.prepared[MODEL], *plan.aliases, *plan.aliases.values()}
    waiting, seen = [plan.survey.symbol(node)], set[Symbol]()
    is_found = False
    while waiting:
        for root in plan.survey.roots(waiting.pop()) or {None}:
            if root in known:
                is_found = True
            elif root is None:
                return False
            elif root not in seen:
                seen.add(root)
                inner = [_inside(plan, value) for _, value, _ in plan.survey.assignments(root)]
                if not inner or None in inner:
                    return False
                waiting += [plan.survey.symbol(value) for value in inner if value is not None]
    return is_found


def _inside(plan: Plan, value: ast.expr) -> ast.expr | None:
    """Return the name inside of ``name.to(...)``, ``name.cuda()`` or ``DistributedDataParallel(name, ...)``."""
    while not dotted(value):
        name, owner = method(value) or ("", value)
        if name in ("to", "cuda", "train", "eval"):
            value = owner
        elif isinstance(value, ast.Call) and value.args and plan.script.last_name(value) in _WRAPPERS:
            value = value.args[0]
        else:
            return None
    return value


# --------------------------------------------------------------------------------- ranks and sizes


def _variable(plan: Plan, node: ast.expr) -> str | None:
    """Return ``RANK`` for ``os.environ["RANK"]``, ``os.environ.get("RANK", 0)`` and ``os.getenv("RANK")``."""
    name: ast.expr | None = None
    if isinstance(node, ast.Subscript) and plan.script.path(node.value) == "os.environ":
        name = node.slice
    elif isinstance(node, ast.Call) and plan.script.path(node.func) in ("os.environ.get", "os.getenv") and node.args:
        name = node.args[0]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None


def _numbers(plan: Plan) -> None:
    """Replace ranks and world sizes by the Accelerator's, and remove assignments to the launcher's variables."""
    for node in plan.script.nodes((ast.Subscript, ast.Call)):
        variable = _variable(plan, node)
        if variable in _ADDRESS and isinstance(getattr(node, "ctx", None), ast.Store):
            plan.remove(plan.script.statement(node), _LAUNCHED)
        elif variable in _NUMBERS and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            outer = plan.script.parents[node]
            whole = outer if isinstance(outer, ast.Call) and dotted(outer.func) == "int" else node
            if plan.script.statement(node) not in plan.removed and not _is_test(plan, whole):
                plan.replace(whole, f"{plan.accelerator}.{_NUMBERS[variable]}", "the number of this process")
        elif variable in _NUMBERS:
            plan.remove(plan.script.statement(node), _LAUNCHED)


def _is_test(plan: Plan, node: ast.AST) -> bool:
    """Return whether an expression only tests if the variable is set."""
    outer = plan.script.parents[node]
    is_in = isinstance(outer, ast.Compare) and isinstance(outer.ops[0], ast.In)
    return is_in or isinstance(outer, (ast.If, ast.BoolOp))


def _collective(plan: Plan, call: ast.Call, last: str) -> None:
    number = _NUMBERS.get(f"torch.distributed.{last}")
    is_whole = plan.script.is_statement(call)
    if number is not None:
        plan.replace(call, f"{plan.accelerator}.{number}", "the number of this process")
    elif last == "barrier":
        plan.replace(call, f"{plan.accelerator}.wait_for_everyone()", "every process has arrived")
    elif last in ("all_reduce", "reduce") and is_whole and call.args:
        operation = argument(call, "op", 1 if last == "all_reduce" else 2)
        name = "SUM" if operation is None else plan.script.path(operation).rpartition(".")[2]
        if name in _REDUCTIONS and isinstance(call.args[0], (ast.Name, ast.Attribute, ast.Subscript)):
            what = plan.script.text_of(call.args[0])
            text = f'{what} = {plan.accelerator}.reduce({what}, reduction="{_REDUCTIONS[name]}")'
            plan.replace(call, text, "a reduction that is valid on one process, too")
            return
        plan.note(call, f"`{plan.script.text_of(call)}` is left as it is; it needs several processes.")
    elif last in ("all_gather", "all_gather_object") and is_whole and len(call.args) == 2:
        into, what = (plan.script.text_of(each) for each in call.args)
        if last == "all_gather":
            text = f"{into}[:] = {plan.accelerator}.gather(({what})[None]).unbind()"
        else:
            text = f"{into}[:] = gather_object([{what}])"
            plan.imports["accelerate.utils"].append("gather_object")
        plan.replace(call, text, "of all processes, in the order of their ranks")
    elif last not in _QUESTIONS:
        plan.note(call, f"torch.distributed.{last} is left as it is; it needs several processes.")


def _spawned(plan: Plan, call: ast.Call) -> None:
    """Replace ``mp.spawn(worker, args=(a, b), nprocs=n)`` by ``worker(rank, a, b)`` in each process."""
    if not call.args:
        return
    given, count = argument(call, "args", 1), argument(call, "nprocs", 2)
    size = f"{plan.accelerator}.num_processes"
    arguments = [f"{plan.accelerator}.process_index"]
    if isinstance(given, (ast.Tuple, ast.List)):
        same = None if count is None else plan.script.text_of(count)
        arguments += [size if plan.script.text_of(each) == same else plan.script.text_of(each) for each in given.elts]
    elif given is not None:
        arguments.append(f"*{plan.script.text_of(given)}")
    plan.replace(call, f"{plan.script.text_of(call.args[0])}({', '.join(arguments)})", _LAUNCHED)
    plan.everywhere = True
    is_by_node = _counted_by_node(plan)
    if is_by_node and count is not None:
        plan.note(
            call,
            f"`{plan.script.text_of(count)}` was the processes of one machine and is now those of all machines: what "
            "the worker divides by it, such as a batch size, is divided by all of them.",
        )
    symbol = None if count is None else plan.survey.symbol(count)
    if symbol is None:
        return
    for statement, value, _ in plan.survey.assignments(symbol):
        if isinstance(value, (ast.Call, ast.Constant)):
            plan.replace(value, size, "as many processes as were launched")
        else:
            plan.note(statement, f"`{symbol.name}` was the number of processes; the launcher decides that now.")


def _counted_by_node(plan: Plan) -> bool:
    """Replace ``rank = node * devices + device`` and ``world_size = devices * nodes``; return whether there are any."""
    found = False
    for statement in plan.script.nodes(ast.Assign):
        value, name = statement.value, dotted(statement.targets[0]).rpartition(".")[2]
        if not isinstance(value, ast.BinOp) or name not in ("rank", "global_rank", "world_size"):
            continue
        multiplies = any(isinstance(each, ast.Mult) for each in ast.walk(value))
        if multiplies and isinstance(value.op, ast.Mult if name == "world_size" else ast.Add):
            number = "num_processes" if name == "world_size" else "process_index"
            plan.replace(value, f"{plan.accelerator}.{number}", "counted by the launcher, over all nodes")
            found = True
    return found


_SHARDED = "a prepared loader gives each process its part"
_DIVIDED = "the part of this process, on any number of processes"


# ---------------------------------------------------------------------------------------- samplers


def _samplers(plan: Plan) -> None:
    """Replace the samplers of training loaders, and complete those of evaluation loaders."""
    loaders = [call for call in plan.script.nodes(ast.Call) if plan.survey.role(call) == LOADER and call.keywords]
    for call in loaders:
        _loader(plan, call)
    for call, owner in plan.script.methods("set_epoch"):
        if _is_replaced(plan, owner):
            plan.remove(plan.script.statement(call), "a prepared loader shuffles anew in each epoch by itself")
    for call in plan.script.calls("len"):
        if call.args and (data := _divided_data(plan, call.args[0])):
            plan.replace(call, f"-(-len({data}) // {plan.accelerator}.num_processes)", "the part of one process")
    _confirm(plan)
    for symbol in list(plan.survey.assigned):
        if plan.survey.role_of(symbol) == SAMPLER and not is_kept(plan, symbol):
            for statement, value, _ in plan.survey.assignments(symbol):
                _sampler_made(plan, symbol, statement, value)


def _confirm(plan: Plan) -> None:
    """Tell prepare() that the training loaders are divided, if a sampler stays because evaluation has the same line."""
    loaders = set(plan.prepared[LOADER])
    if loaders and loaders <= plan.divided:
        plan.arguments["dataloader_config"] = "DataLoaderConfiguration(already_sharded=True)"
        plan.imports["accelerate"].append("DataLoaderConfiguration")


def is_kept(plan: Plan, symbol: Symbol) -> bool:
    """Return whether a name refers to a DistributedSampler that stays, or to a loader with one."""
    for _, value, position in plan.survey.assignments(symbol):
        made = sampler_of(plan, plan.survey.result_of(value, position))
        if made in plan.kept_samplers:
            return True
    return symbol in plan.divided


def _is_replaced(plan: Plan, node: ast.expr) -> bool:
    """Return whether an expression is a sampler that doesn't stay: `sampler` or `loader.sampler`."""
    owner = node.value if isinstance(node, ast.Attribute) and node.attr == "sampler" else node
    roots = plan.survey.roots_of(owner)
    return _is_sampler(plan, node) and not any(is_kept(plan, root) for root in roots)


def _divided_data(plan: Plan, node: ast.expr) -> str:
    """Return the data of `loader.sampler`, if prepare() divides this loader."""
    if not isinstance(node, ast.Attribute) or node.attr != "sampler":
        return ""
    roots = plan.survey.roots_of(node.value)
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
    for root in plan.survey.roots_of(node):
        for _, value, position in plan.survey.assignments(root):
            made = plan.survey.result_of(value, position)
            is_copy = made is value and isinstance(value, (ast.Name, ast.Attribute))
            found = None if is_copy else sampler_of(plan, made)
            if found is not None:
                return found
    return None


def _loader(plan: Plan, call: ast.Call) -> None:
    """Replace a loader's distributed sampler by ``shuffle``, and prepare the loader."""
    keywords = {each.arg: each for each in call.keywords}
    own, sampler = keywords.get("shuffle"), keywords.get("sampler")
    made = None if sampler is None else sampler_of(plan, sampler.value)
    if sampler is None or made is None:
        return
    bound = set(plan.survey.bound(call))
    if bound & _evaluated(plan):
        _complete(plan, made)
        plan.divided |= bound
        return
    given = keyword(made, "shuffle")
    shuffle = "True" if given is None else plan.script.text_of(given)
    if own is not None:
        plan.replace(own.value, shuffle, "the order that the sampler gave", uses=False)
        _drop(plan, call, sampler, _SHARDED)
    else:
        plan.replace(sampler, f"shuffle={shuffle}", _SHARDED, uses=False)
    plan.prepare(LOADER, plan.survey.bound(call))


def _evaluated(plan: Plan) -> set[Symbol]:
    """Return the loaders that only evaluation loops go through."""
    loaders = {symbol for loop in plan.survey.loops if not loop.trains for symbol in loop.loaders}
    return loaders - set(plan.survey.trained[LOADER])


def _complete(plan: Plan, made: ast.Call) -> None:
    """Give a sampler its size and rank, for runs without a process group."""
    if made in plan.kept_samplers:
        return
    plan.kept_samplers.add(made)
    given = {each.arg for each in made.keywords}
    missing = {"num_replicas": "num_processes", "rank": "process_index"}
    text = "".join(f", {name}={plan.accelerator}.{value}" for name, value in missing.items() if name not in given)
    if made.args and len(made.args) == 1 and text:
        end = max(map(plan.script.end, (*made.args, *made.keywords)))
        plan.cut(end, end, text, _DIVIDED, made)
        plan.users.append(made)


def _drop(plan: Plan, call: ast.Call, given: ast.keyword, why: str) -> None:
    """Remove an argument and the comma before it (or after it, for the first argument)."""
    arguments = sorted([*call.args, *call.keywords], key=plan.script.start)
    at = arguments.index(given)
    if at:
        plan.cut(plan.script.end(arguments[at - 1]), plan.script.end(given), "", why, given)
    elif len(arguments) > 1:
        plan.cut(plan.script.start(given), plan.script.start(arguments[1]), "", why, given)


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
    for node in plan.script.calls("len"):
        if made is not None and node.args and plan.survey.symbol(node.args[0]) == symbol:
            data = plan.script.text_of(made.args[0]) if made.args else "dataset"
            plan.replace(node, f"(len({data}) // {plan.accelerator}.num_processes)", "the part of one process")
