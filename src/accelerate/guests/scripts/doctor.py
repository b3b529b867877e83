"""Find problems of an accelerated script: hangs, results that differ on several processes, and data loss.

The script is parsed without running it. Names are followed as in the migration (`migrate.survey`). A name whose role
is uncertain causes no finding.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, final

from .migrate.refuse import Refused, parsed
from .migrate.source import Placed, Script, dotted, method, targets
from .migrate.survey import LOADER, MODEL, OPTIMIZER, SCHEDULER, Survey, Symbol

_GUARDS: Final = (
    "is_main_process", "is_local_main_process", "is_last_process", "on_main_process", "on_local_main_process",
    "process_index", "local_process_index", "rank",
)  # fmt: skip
#: Calls of the Accelerator that all processes have to make.
_COLLECTIVE: Final = frozenset(
    {
        "gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone", "prepare", "backward",
        "prepare_model", "clip_grad_norm_", "check_trigger", "broadcast",
    }
)  # fmt: skip
_WRITES: Final = frozenset({"torch.save", "numpy.save", "numpy.savez", "safetensors.torch.save_file", "joblib.dump"})
_WRITING_METHODS: Final = frozenset({"save_pretrained", "push_to_hub", "to_csv", "to_parquet", "savefig"})
_PREPARING: Final = ("prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler")
_ROLES: Final = {MODEL: "model", OPTIMIZER: "optimizer", LOADER: "data loader", SCHEDULER: "scheduler"}


class Severity(Enum):
    """How much a finding matters."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@final
@dataclass(frozen=True, order=True)
class Finding:
    """One piece of advice, with the line it is about."""

    line: int
    severity: str
    text: str


class Advice(NamedTuple):
    """A sentence about a place in the script."""

    node: Placed
    text: str


@final
class Subject:
    """A script whose Accelerator and prepared names are known."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.survey = Survey(script)
        self.accelerators = {
            dotted(target)
            for statement in script.nodes((ast.Assign, ast.AnnAssign))
            for target in targets(statement)
            if isinstance(statement.value, ast.Call)
            and script.path(statement.value.func).rpartition(".")[2] == "Accelerator"
        } | {"accelerator", "self.accelerator"}
        self.prepared: set[Symbol] = set()
        for call in self.calls_of(*_PREPARING):
            for argument in call.args:
                given = argument.value if isinstance(argument, ast.Starred) else argument
                self.prepared |= self.roots(given)
            for target in targets(script.statement(call)):
                self.prepared |= self.roots(target)

    def roots(self, node: ast.AST) -> set[Symbol]:
        """Return the symbols whose values a name may have."""
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # loaders["train"]
            owner = self.survey.symbol(node.value)
            return set() if owner is None else {Symbol(owner.scope, f'{owner.name}["{node.slice.value}"]')}
        symbol = self.survey.symbol(node)
        return set() if symbol is None else {symbol, *self.survey.roots(symbol)}

    def role(self, node: ast.AST) -> object:
        """Return the role of a name's value: model, optimizer, loader or scheduler."""
        return next((role for symbol in self.roots(node) if (role := self.survey.role_of(symbol)) is not None), None)

    def calls_of(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of these methods of an Accelerator."""
        for call in self.script.nodes(ast.Call):
            found = method(call)
            if found is not None and found[0] in names and dotted(found[1]) in self.accelerators:
                yield call

    def is_ahead_of_prepare(self, node: Placed) -> bool:
        """Return whether the function that contains `node` calls ``prepare`` after it."""
        scope = self.script.scope(node)
        lines = [call.lineno for call in self.calls_of(*_PREPARING) if self.script.scope(call) is scope]
        return bool(lines) and node.lineno < min(lines)

    def is_guarded(self, node: ast.AST) -> bool:
        """Return whether only one process runs `node`, because of a condition or a decorator."""
        inner = node
        for outer in self.script.ancestors(node):
            if isinstance(outer, (ast.If, ast.IfExp)) and inner is not outer.test and _names_a_guard(outer.test):
                return True
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if any(_names_a_guard(decorator) for decorator in outer.decorator_list):
                    return True
                if _leaves_early(outer, node):
                    return True
            inner = outer
        return False


def examine(text: str, name: str) -> list[Finding]:
    """Return the findings about a script, in the order of its lines.

    Raises:
        Refused: it isn't Python, or doesn't use the Accelerator.
    """
    script = parsed(text, name)
    if not any(path.partition(".")[0] == "accelerate" for path in script.imported.values()):
        raise Refused(f"{name}:1: it doesn't use accelerate. `accelerate migrate {name}` shows what would change.")
    subject = Subject(script)
    found = {
        Finding(node.lineno, severity.value, advice) for severity, check in _CHECKS for node, advice in check(subject)
    }
    return sorted(found)


# -- what hangs or computes something else ----------------------------------------------------------------


def _collectives_of_one_process(subject: Subject) -> Iterator[Advice]:
    for call in subject.calls_of(*_COLLECTIVE):
        if subject.is_guarded(call):
            name = dotted(call.func)
            yield Advice(
                call, f"`{name}` is called by one process only, and waits for the others. Call it on all processes."
            )


def _backward_by_hand(subject: Subject) -> Iterator[Advice]:
    for call in subject.survey.backwards:
        found = method(call)
        if found is not None and dotted(found[1]) not in subject.accelerators and not call.args:
            yield Advice(
                call,
                "`.backward()` of the loss itself skips the scaling of mixed precision and accumulation. "
                "Call `accelerator.backward(loss)`.",
            )


def _unprepared(subject: Subject) -> Iterator[Advice]:
    if subject.survey.backwards and next(subject.calls_of(*_PREPARING), None) is None:
        yield Advice(
            subject.script.tree.body[0], "nothing is prepared, so every process trains by itself. Call `prepare`."
        )
        return
    for role, symbols in subject.survey.trained.items():
        for symbol in symbols:
            assigned = subject.survey.assignments(symbol)
            if symbol in subject.prepared or not assigned or subject.survey.role_of(symbol) != role:
                continue
            consequence = {
                MODEL: "its gradients aren't averaged: processes train apart",
                OPTIMIZER: "it advances on every micro-batch, and isn't saved in checkpoints",
                LOADER: "every process reads all of it",
                SCHEDULER: "it advances on every micro-batch, and isn't saved in checkpoints",
            }[role]
            yield Advice(assigned[0][0], f"the {_ROLES[role]} `{symbol.name}` isn't prepared: {consequence}.")


def _group_by_hand(subject: Subject) -> Iterator[Advice]:
    for call in subject.script.nodes(ast.Call):
        path = subject.script.path(call.func)
        if path.endswith(("DistributedDataParallel", "FullyShardedDataParallel")) and path.startswith("torch."):
            yield Advice(
                call, f"`{dotted(call.func)}` wraps a model that `prepare` wraps as the run needs it. Leave it out."
            )


# -- what is wrong on several processes, or on another device -----------------------------------------------


def _inner_model(subject: Subject) -> Iterator[Advice]:
    for node in subject.script.nodes(ast.Attribute):
        if node.attr == "module" and isinstance(node.ctx, ast.Load) and subject.role(node.value) == MODEL:
            yield Advice(
                node,
                f"`{dotted(node)}` is there only where DistributedDataParallel wraps the model. Use "
                f"`accelerator.unwrap_model({dotted(node.value)})`.",
            )


def _devices_by_name(subject: Subject) -> Iterator[Advice]:
    for node in subject.script.nodes(ast.Constant):
        if isinstance(node.value, str) and (node.value == "cuda" or node.value.startswith("cuda:")):
            outer = subject.script.parents.get(node)
            if isinstance(outer, (ast.Call, ast.keyword, ast.Assign, ast.IfExp)):
                yield Advice(
                    node, f"{node.value!r} is one device, the same on all processes. Use `accelerator.device`."
                )
    for call in subject.script.nodes(ast.Call):
        found = method(call)
        if found is not None and found[0] == "cuda" and dotted(found[1]) != "torch":
            yield Advice(
                call, "`.cuda()` needs a GPU, and takes the first. Use `.to(accelerator.device)`, or prepare it."
            )


def _clipping_by_hand(subject: Subject) -> Iterator[Advice]:
    for call in subject.script.nodes(ast.Call):
        name = subject.script.path(call.func).rpartition(".")[2]
        if name in ("clip_grad_norm_", "clip_grad_value_") and subject.script.path(call.func).startswith("torch."):
            yield Advice(
                call,
                f"`{name}` of torch sees scaled gradients, and a part of them where the model is sharded. Use "
                f"`accelerator.{name}`.",
            )


def _writes_of_all(subject: Subject) -> Iterator[Advice]:
    for call in subject.script.nodes(ast.Call):
        found = method(call)
        is_write = subject.script.path(call.func) in _WRITES or (found is not None and found[0] in _WRITING_METHODS)
        says_who = any(keyword.arg == "is_main_process" for keyword in call.keywords)
        if is_write and not says_who and not subject.is_guarded(call):
            yield Advice(
                call,
                f"`{dotted(call.func) or ast.unparse(call.func)}` is called by all processes, which all write the "
                "same file at once. Put it under `if accelerator.is_main_process:`, or use `accelerator.save`.",
            )


def _state_of_the_wrapper(subject: Subject) -> Iterator[Advice]:
    for call in subject.script.nodes(ast.Call):
        found = method(call)
        if found is None or found[0] not in ("state_dict", "save_pretrained"):
            continue
        if subject.is_ahead_of_prepare(call):
            continue
        if subject.role(found[1]) == MODEL and subject.roots(found[1]) & subject.prepared:
            yield Advice(
                call,
                f"`{dotted(found[1])}` is prepared: its parameter names (and, when sharded, its contents) depend "
                f"on the strategy. Use `accelerator.get_state_dict({dotted(found[1])})` on all processes, or "
                "`accelerator.unwrap_model`.",
            )


def _own_sampler(subject: Subject) -> Iterator[Advice]:
    sets_epoch = any((method(call) or ("",))[0] == "set_epoch" for call in subject.script.nodes(ast.Call))
    for call in subject.script.nodes(ast.Call):
        if subject.script.path(call.func).rpartition(".")[2] != "DistributedSampler":
            continue
        if {"num_replicas", "rank"} <= {each.arg for each in call.keywords}:  # for a loader that isn't prepared
            continue
        epoch = "" if sets_epoch else " Without `set_epoch`, it gives the same order in every epoch."
        yield Advice(
            call,
            "`DistributedSampler` divides the data by hand, and `prepare` leaves it at that. Give the loader "
            f"`shuffle=...` and let `prepare` divide it.{epoch}",
        )


def _evaluation_of_a_part(subject: Subject) -> Iterator[Advice]:
    gathers = ("gather", "gather_for_metrics", "reduce", "streaming_mean", "all_reduce")
    for loop in subject.survey.loops:
        if loop.trains or not loop.loaders & subject.prepared:
            continue
        if any(isinstance(node, ast.Yield) for node in ast.walk(loop.node)):  # a progress bar collects nothing
            continue
        scope = subject.script.scope(loop.node)
        adds_up = any(isinstance(node, ast.AugAssign) for node in ast.walk(loop.node)) or any(
            (method(node) or ("",))[0] in ("append", "extend", "add_batch", "update") for node in ast.walk(loop.node)
        )
        is_gathered = any((method(node) or ("",))[0] in gathers for node in ast.walk(scope))
        if adds_up and not is_gathered:
            yield Advice(
                loop.node,
                "this loop collects the part of the data that its process reads. Gather what it collects with "
                "`accelerator.gather_for_metrics(...)`.",
            )


def _accumulation_without_a_window(subject: Subject) -> Iterator[Advice]:
    uses = next(subject.calls_of("accumulate"), None)
    for call in subject.script.nodes(ast.Call):
        if subject.script.path(call.func).rpartition(".")[2] != "Accelerator":
            continue
        steps = next((each.value for each in call.keywords if each.arg == "gradient_accumulation_steps"), None)
        several = steps is not None and not (isinstance(steps, ast.Constant) and steps.value == 1)
        if several and uses is None and subject.survey.backwards:
            yield Advice(
                call,
                "gradient_accumulation_steps divides the loss, but nothing says where a window ends. Put the step "
                "under `with accelerator.accumulate(model):`.",
            )


# -- what is untidy, or to be known -------------------------------------------------------------------------


def _prints_of_all(subject: Subject) -> Iterator[Advice]:
    for call in subject.script.nodes(ast.Call):
        if dotted(call.func) == "print" and not subject.is_guarded(call):
            yield Advice(call, "every process prints this. Use `accelerator.print`.")
        name = subject.script.path(call.func)
        is_bar = name.split(".")[0] == "tqdm" and name.rpartition(".")[2] in ("tqdm", "trange")
        if is_bar and not any(each.arg == "disable" for each in call.keywords) and not subject.is_guarded(call):
            yield Advice(
                call,
                "every process draws this bar. Give `disable=not accelerator.is_local_main_process`, or "
                "take `tqdm` from accelerate.utils.",
            )


def _batch_size(subject: Subject) -> Iterator[Advice]:
    shares = any(each.arg == "split_batches" for each in subject.script.nodes(ast.keyword))
    for call in subject.script.nodes(ast.Call):
        if shares or subject.script.path(call.func).rpartition(".")[2] != "DataLoader":
            continue
        given = [each.value for each in call.keywords if each.arg == "batch_size"] + call.args[1:2]
        statement = subject.script.statement(call)
        roots = {root for target in targets(statement) for root in subject.roots(target)}
        if given and roots & subject.prepared & set(subject.survey.trained[LOADER]):
            yield Advice(
                call,
                f"the batch size {ast.unparse(given[0])} is that of one process: N processes take N times as many "
                "samples in a step. DataLoaderConfiguration(split_batches=True) shares them instead.",
            )


_CHECKS: Final[tuple[tuple[Severity, Callable[[Subject], Iterator[Advice]]], ...]] = (
    (Severity.ERROR, _collectives_of_one_process),
    (Severity.ERROR, _backward_by_hand),
    (Severity.ERROR, _unprepared),
    (Severity.ERROR, _group_by_hand),
    (Severity.WARNING, _inner_model),
    (Severity.WARNING, _devices_by_name),
    (Severity.WARNING, _clipping_by_hand),
    (Severity.WARNING, _writes_of_all),
    (Severity.WARNING, _state_of_the_wrapper),
    (Severity.WARNING, _own_sampler),
    (Severity.WARNING, _evaluation_of_a_part),
    (Severity.WARNING, _accumulation_without_a_window),
    (Severity.NOTE, _prints_of_all),
    (Severity.NOTE, _batch_size),
)


def _names_a_guard(node: ast.AST) -> bool:
    """Return whether an expression tests which process this is."""
    return any(
        (isinstance(each, ast.Attribute) and each.attr in _GUARDS)
        or (isinstance(each, ast.Name) and each.id in _GUARDS)
        for each in ast.walk(node)
    )


def _leaves_early(function: ast.AST, node: ast.AST) -> bool:
    """Return whether `if not accelerator.is_main_process: return` precedes `node` in its function."""
    line = getattr(node, "lineno", 0)
    for statement in getattr(function, "body", ()):
        if statement.lineno >= line:
            return False
        is_left = isinstance(statement, ast.If) and isinstance(statement.body[-1], (ast.Return, ast.Raise))
        if is_left and _names_a_guard(statement.test):
            return True
    return False
