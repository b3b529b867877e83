"""Rules for data: who reads which samples, how random numbers are seeded, lengths, and evaluations."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Final

from ..migrate.source import argument, dotted, keyword, method, targets
from ..migrate.survey import LOADER, MODEL, SCHEDULER, Loop, Symbol
from .output import is_bar
from .processes import RANK, SAMPLES, Processes
from .subject import Place, Subject, at

_SPLITS: Final = {
    "torch.utils.data.random_split": "generator",
    "torch.utils.data.dataset.random_split": "generator",
    "sklearn.model_selection.train_test_split": "random_state",
    "torch.randperm": "generator",
    "numpy.random.permutation": "",
    "numpy.random.shuffle": "",
    "random.shuffle": "",
}
_SEEDS: Final = frozenset({"set_seed", "manual_seed", "seed_everything", "manual_seed_all", "seed_all", "fix_seed"})
_SEED_PATHS: Final = frozenset({"numpy.random.seed", "random.seed"})
_NOISE: Final = frozenset(
    {"randn", "rand", "randint", "randn_like", "rand_like", "randint_like", "normal", "bernoulli", "multinomial"}
)
#: Arguments of the Accelerator with which a call of `scheduler.step` is one step.
_ONE_STEP: Final = ("scheduler_mode", "split_batches", "step_scheduler_with_optimizer", "dataloader_config")
_SHOWS: Final = frozenset({"print", "info", "debug", "warning", "log"})


def sampler_by_hand(subject: Subject, _: Processes) -> Iterator[Place]:
    yield from _samplers_of_world(subject) if subject.uses("set_epoch") else ()


def sampler_without_epoch(subject: Subject, _: Processes) -> Iterator[Place]:
    yield from () if subject.uses("set_epoch") else _samplers_of_world(subject)


def _samplers_of_world(subject: Subject) -> Iterator[Place]:
    """Yield samplers without a rank of their own, which ask the process group for it."""
    for call in subject.calls:
        has_rank = {"num_replicas", "rank"} <= {each.arg for each in call.keywords}
        if subject.script.last_name(call) == "DistributedSampler" and not has_rank:
            yield at(call)


def sharded_twice(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        data = argument(call, "dataset", 0)
        is_prepared = any(symbol in subject.prepared for symbol in subject.bound(call))
        is_read = subject.script.last_name(call) == "DataLoader" and is_prepared
        if is_read and data is not None and RANK in processes.differs(data):
            yield at(call, data=ast.unparse(data))


# -- random numbers ---------------------------------------------------------------------------------------


def _seeds(subject: Subject, before: ast.Call) -> list[ast.Call]:
    """Return the calls that set the seed before a call, as far as this can be seen."""
    script, found = subject.script, list[ast.Call]()
    for call in subject.calls:
        is_seed = script.last_name(call) in _SEEDS or script.path(call.func) in _SEED_PATHS
        is_global = dotted(call.func) and not dotted(call.func).startswith(("generator", "torch.Generator"))
        if is_seed and is_global and (call.lineno < before.lineno or script.scope(call) is not script.scope(before)):
            found.append(call)
    return found


def _is_by_rank(processes: Processes, call: ast.Call) -> bool:
    specific = argument(call, "device_specific", 1)
    if specific is not None and processes.subject.script.last_name(call) == "set_seed":
        return processes.subject.constant(specific) is not False
    return bool(call.args) and RANK in processes.differs(call.args[0])


def _splits(subject: Subject) -> Iterator[ast.Call]:
    """Yield the calls that put samples in a random order of the process."""
    for call in subject.calls:
        path = subject.script.path(call.func)
        in_step = any(subject.survey.trains(loop) for loop in subject.loops_around(call))
        own = _SPLITS.get(path)
        if own is not None and not (own and keyword(call, own) is not None) and not in_step:
            yield call
    for call, _ in subject.script.methods("train_test_split"):
        is_seeded = keyword(call, "seed") is not None or keyword(call, "random_state") is not None
        if not is_seeded and subject.script.path(call.func) not in _SPLITS:
            yield call


def split_unseeded(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in _splits(subject):
        if not _seeds(subject, call):
            yield at(call, name=ast.unparse(call.func))


def split_seeded_by_rank(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in _splits(subject):
        seeds = _seeds(subject, call)
        if seeds and _is_by_rank(processes, seeds[-1]):
            yield at(call, name=ast.unparse(call.func), seed=ast.unparse(seeds[-1]), line=str(seeds[-1].lineno))


def same_noise(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        path = subject.script.path(call.func)
        if not path.startswith("torch.") or subject.script.last_name(call) not in _NOISE or keyword(call, "generator"):
            continue
        seeds = _seeds(subject, call)
        if not seeds or any(_is_by_rank(processes, seed) for seed in seeds) or not subject.is_in_batch_loop(call):
            continue
        yield at(call, name=ast.unparse(call.func), seed=ast.unparse(seeds[-1]), line=str(seeds[-1].lineno))
        return


# -- lengths ----------------------------------------------------------------------------------------------


def _lengths(subject: Subject) -> Iterator[ast.Call]:
    """Yield the calls of ``len`` on prepared loaders, unless batches are split."""
    if any(each.arg in ("split_batches", "dispatch_batches") for each in subject.script.nodes(ast.keyword)):
        return
    for call in subject.calls:
        if dotted(call.func) == "len" and call.args and subject.is_prepared(call.args[0], LOADER):
            yield call


def length_before_prepare(*, for_bar: bool) -> Callable[[Subject, Processes], Iterator[Place]]:
    """Return the rule for a length that is used after ``prepare``: by a progress bar only, or by something else."""

    def check(subject: Subject, _: Processes) -> Iterator[Place]:
        for call in _lengths(subject):
            if not subject.is_ahead_of_prepare(call):
                continue
            uses = list(_late_uses(subject, call))
            chosen = [use for use in uses if is_bar(subject, *subject.calls_around(use)) == for_bar]
            if chosen and len(chosen) == len(uses) if for_bar else chosen:
                use = chosen[0]
                yield at(call, name=ast.unparse(call.args[0]), use=dotted(use), line=str(use.lineno))

    return check


def _late_uses(subject: Subject, call: ast.Call) -> Iterator[ast.Name | ast.Attribute]:
    """Yield the names for a length where they are used after ``prepare``, for more than schedules and messages."""
    late = max(subject.prepared_lines(call))
    for node in subject.survey.uses(_names(subject, call)):
        is_shown = any(dotted(each.func).rpartition(".")[2] in _SHOWS for each in subject.calls_around(node))
        if node.lineno > late and not is_shown and not _is_for_schedule(subject, node):
            yield node


def length_for_schedule(subject: Subject, _: Processes) -> Iterator[Place]:
    if any(each.arg in _ONE_STEP for each in subject.script.nodes(ast.keyword)):
        return
    for call in _lengths(subject):
        lines = subject.prepared_lines(call)
        if not lines or call.lineno < min(lines):
            continue
        names = _names(subject, call)
        uses = [node for node in subject.script.nodes(ast.Name) if subject.survey.symbol(node) in names]
        for node in [call, *uses]:
            scheduler = _is_for_schedule(subject, node)
            is_whole = "num_processes" in subject.script.text_of(subject.script.statement(call))
            if scheduler is not None and _is_prepared(subject, scheduler) and not is_whole:
                yield at(call, name=ast.unparse(call.args[0]))
                break


def schedule_of_epochs(subject: Subject, _: Processes) -> Iterator[Place]:
    if any(each.arg in _ONE_STEP for each in subject.script.nodes(ast.keyword)):
        return
    for call, owner in subject.script.methods("step"):
        repeats = any(subject.survey.trains(loop) for loop in subject.loops_around(call))
        if call.args or not repeats or subject.is_in_batch_loop(call):
            continue
        if subject.is_prepared(owner, SCHEDULER):
            yield at(call, name=ast.unparse(call.func))


def _is_prepared(subject: Subject, call: ast.Call) -> bool:
    statement = subject.script.statement(call)
    return any(root in subject.prepared for target in targets(statement) for root in subject.roots(target))


def _names(subject: Subject, call: ast.Call) -> set[Symbol]:
    """Return the names for a length, or for what is computed from it."""
    if _ends(subject, call):
        return set()
    symbols = [subject.survey.symbol(target) for target in targets(subject.script.statement(call))]
    mine = {each for each in symbols if each is not None and subject.survey.role_of(each) is None}
    return subject.derived(mine, lambda node: _ends(subject, node))


def _ends(subject: Subject, node: ast.AST) -> bool:
    return _is_for_schedule(subject, node) is not None or is_bar(subject, *subject.calls_around(node))


def _is_for_schedule(subject: Subject, node: ast.AST) -> ast.Call | None:
    """Return the call that makes a scheduler with this value."""
    return next((call for call in subject.calls_around(node) if subject.survey.role(call) == SCHEDULER), None)


_GATHERS: Final = ("gather", "gather_for_metrics", "reduce", "streaming_mean", "all_reduce", "all_gather")
_COLLECTS: Final = ("append", "extend", "add_batch", "update")
_SHOWS_SUMS: Final = frozenset({"print", "log", "info", "add_scalar"})
_TWO_MODES: Final = ("Dropout", "BatchNorm", "from_pretrained", "torchvision.models", "create_model")


def _evaluations(subject: Subject) -> Iterator[Loop]:
    """Yield the loops over a prepared loader that neither train nor pass its batches on."""
    for loop in subject.survey.loops:
        passes_on = any(isinstance(node, ast.Yield) for node in ast.walk(loop.node))  # as a progress bar does
        if not loop.trains and not passes_on and loop.loaders & subject.prepared:
            yield loop


def part_of_the_data(subject: Subject, processes: Processes) -> Iterator[Place]:
    for loop in _evaluations(subject):
        scope = subject.script.scope(loop.node)
        adds = any(isinstance(node, ast.AugAssign) for node in ast.walk(loop.node))
        collects = adds or any(subject.script.methods(*_COLLECTS, inside=loop.node))
        names = {(method(call) or (dotted(call.func),))[0] for call in processes.run_by(scope)}
        if collects and not names & set(_GATHERS):
            yield at(loop.node)


def padding_counted(subject: Subject, _: Processes) -> Iterator[Place]:
    for loop in _evaluations(subject):
        slices = subject.script.nodes(ast.Slice, subject.script.scope(loop.node))
        uppers = [ast.unparse(node.upper) for node in slices if node.upper is not None]
        cuts = any("len(" in upper or "num" in upper for upper in uppers)
        for call in subject.calls_of("gather") if not cuts else ():
            given = ast.unparse(call.args[0]) if call.args else "loss"
            if call in ast.walk(loop.node) and "loss" not in given:
                yield at(call, name=ast.unparse(call.func))


def never_evaluating(subject: Subject, _: Processes) -> Iterator[Place]:
    if subject.uses("eval") or not any(word in subject.script.text for word in _TWO_MODES):
        return
    for loop in _evaluations(subject):
        for call in subject.script.nodes(ast.Call, loop.node):
            if subject.role(call.func) == MODEL and subject.roots(call.func) & subject.prepared:
                yield at(loop.node, name=ast.unparse(call.func))
                break


def sum_of_one(subject: Subject, processes: Processes) -> Iterator[Place]:
    added = [node for loop in subject.batch_loops for node in subject.script.nodes(ast.AugAssign, loop)]
    symbols = [subject.survey.symbol(node.target) for node in added if SAMPLES in processes.differs(node.value)]
    sums = subject.derived({each for each in symbols if each is not None}, lambda node: _is_gathered(subject, node))
    for call in subject.calls:
        inner = [name for each in (*call.args, *call.keywords) for name in ast.walk(each)]
        shows = dotted(call.func).rpartition(".")[2] in _SHOWS_SUMS
        used = [name for name in inner if isinstance(name, ast.Name) and subject.survey.symbol(name) in sums]
        for name in used if shows else ():
            if SAMPLES in processes.differs(name) and not _is_gathered(subject, name):
                yield at(call, name=name.id)
                break


def _is_gathered(subject: Subject, node: ast.AST) -> bool:
    around = subject.calls_around(node)
    return any((method(outer) or (subject.script.last_name(outer),))[0] in _GATHERS for outer in around)
