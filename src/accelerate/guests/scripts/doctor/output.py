"""Rules for output, trackers, downloads, devices and files: what each process does, and one is to do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ..migrate.source import argument, dotted, keyword, method, method_name
from ..migrate.survey import MODEL
from .processes import RANK, Processes
from .subject import Place, Subject, at

_TRACKERS: Final = frozenset({"wandb.init", "mlflow.start_run", "SummaryWriter", "neptune.init_run", "Task.init"})


def is_bar(subject: Subject, *calls: ast.Call) -> bool:
    """Return whether one of these calls draws a progress bar of tqdm."""
    names = [subject.script.path(call.func).split(".") for call in calls]
    return any(name[0] == "tqdm" and name[-1] in ("tqdm", "trange") for name in names)


def printed_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        is_of_all = dotted(call.func) == "print" and not processes.is_of_one(call)
        if is_of_all and not any(RANK in processes.differs(each) for each in call.args):
            yield at(call)


def drawn_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        if is_bar(subject, call) and keyword(call, "disable") is None and not processes.is_of_one(call):
            yield at(call)


def tracked_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        names = {subject.script.path(call.func), subject.script.last_name(call)}
        if names & _TRACKERS and not processes.is_of_one(call):
            yield at(call, name=ast.unparse(call.func))


def logged_nowhere(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.calls_of("log") if not subject.uses("init_trackers") else ():
        yield at(call)
        return


def downloaded_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        if subject.constant(keyword(call, "download")) is not True or processes.is_of_one(call):
            continue
        around = [each for each in subject.script.ancestors(call) if isinstance(each, ast.With)]
        if not any("process_first" in ast.unparse(item.context_expr) for each in around for item in each.items):
            yield at(call, name=ast.unparse(call.func))


def device_by_name(subject: Subject, _: Processes) -> Iterator[Place]:
    for node in subject.script.nodes(ast.Constant):
        if isinstance(node.value, str) and (node.value == "cuda" or node.value.startswith("cuda:")):
            outer = subject.script.parents.get(node)
            is_type = isinstance(outer, ast.Call) and subject.script.last_name(outer) in ("autocast", "GradScaler")
            if isinstance(outer, (ast.Call, ast.keyword, ast.Assign, ast.IfExp)) and not is_type:
                yield at(node, device=repr(node.value))


def cuda_by_hand(subject: Subject, _: Processes) -> Iterator[Place]:
    yield from (at(call) for call, owner in subject.script.methods("cuda") if dotted(owner) != "torch")


_WRITES: Final = frozenset(
    {
        "torch.save", "numpy.save", "numpy.savez", "safetensors.torch.save_file", "joblib.dump",
        "torch.save_file", "logging.FileHandler",
    }
)  # fmt: skip
_WRITING_METHODS: Final = frozenset(
    {"save_pretrained", "push_to_hub", "to_csv", "to_parquet", "savefig", "write_text", "write_bytes"}
)
_REMOVES: Final = frozenset({"shutil.rmtree", "os.remove", "os.unlink", "os.rename", "os.replace", "shutil.move"})
_READS: Final = frozenset({"torch.load", "numpy.load", "safetensors.torch.load_file", "joblib.load", "json.load"})
_WAITS: Final = ("wait_for_everyone", "barrier")


def _is_of_all(subject: Subject, processes: Processes, call: ast.Call) -> bool:
    """Return whether all processes make a call with the same path."""
    says_who = any(each.arg == "is_main_process" for each in call.keywords)
    owner = method(call) or ("", call.func)
    given = [*call.args, *(each.value for each in call.keywords), owner[1]]
    return not says_who and not processes.is_of_one(call) and not any(RANK in processes.differs(each) for each in given)


def _mode(subject: Subject, call: ast.Call) -> str:
    """Return the mode of a call of ``open``; '' for other calls."""
    if dotted(call.func) != "open":
        return ""
    mode = argument(call, "mode", 1)
    return str(subject.constant(mode)) if mode is not None else "r"


def _is_write(subject: Subject, call: ast.Call) -> bool:
    found = method(call)
    is_method = found is not None and found[0] in _WRITING_METHODS and not dotted(found[1]).endswith("trainer")
    return is_method or subject.script.path(call.func) in _WRITES or "w" in _mode(subject, call)


def written_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        if _is_write(subject, call) and _is_of_all(subject, processes, call):
            yield at(call, name=ast.unparse(call.func))


def appended_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        if "a" in _mode(subject, call) and _is_of_all(subject, processes, call):
            yield at(call, path=ast.unparse(call.args[0]) if call.args else "the file")


def removed_by_all(subject: Subject, processes: Processes) -> Iterator[Place]:
    for call in subject.calls:
        is_removal = subject.script.path(call.func) in _REMOVES or method_name(call) == "unlink"
        if is_removal and _is_of_all(subject, processes, call):
            yield at(call, name=ast.unparse(call.func))


def state_of_the_wrapper(subject: Subject, _: Processes) -> Iterator[Place]:
    for call, owner in subject.script.methods("state_dict", "save_pretrained"):
        if not subject.is_ahead_of_prepare(call) and subject.is_prepared(owner, MODEL):
            yield at(call, name=ast.unparse(owner))
    for call in subject.script.calls("torch.save"):
        if call.args and not subject.is_ahead_of_prepare(call) and subject.is_prepared(call.args[0], MODEL):
            yield at(call, name=ast.unparse(call.args[0]))


def inner_model(subject: Subject, _: Processes) -> Iterator[Place]:
    for node in subject.script.reads:
        if isinstance(node, ast.Attribute) and node.attr == "module" and subject.role(node.value) == MODEL:
            yield at(node, name=ast.unparse(node), model=ast.unparse(node.value))


def loaded_before_prepare(subject: Subject, _: Processes) -> Iterator[Place]:
    for call in subject.calls_of("load_state"):
        if subject.is_ahead_of_prepare(call):
            yield at(call, line=str(min(subject.prepared_lines(call))))


def loaded_into_the_wrapper(subject: Subject, _: Processes) -> Iterator[Place]:
    for call, owner in subject.script.methods("load_state_dict"):
        if subject.is_prepared(owner, MODEL) and subject.is_behind_prepare(call):
            yield at(call, name=ast.unparse(owner))


def read_without_waiting(subject: Subject, processes: Processes) -> Iterator[Place]:
    waits = [call.lineno for call, _ in subject.script.methods(*_WAITS)]
    for write in subject.calls:
        path = _path(write)
        if not path or not _is_write(subject, write) or processes.guard(write) is None:
            continue
        for read in subject.calls:
            is_read = subject.script.path(read.func) in _READS or _mode(subject, read) == "r"
            is_read |= method_name(read) == "from_pretrained"
            is_after = read.lineno > write.lineno and subject.script.scope(read) is subject.script.scope(write)
            if not is_read or not is_after or processes.guard(read) is not None:
                continue
            if path in map(ast.unparse, read.args) and not any(write.lineno < line <= read.lineno for line in waits):
                yield at(read, path=path, line=str(write.lineno))
                break


def _path(call: ast.Call) -> str:
    """Return the path that a call writes, as it is written in the script."""
    names = [each for each in call.args if isinstance(each, (ast.Constant, ast.Name, ast.Attribute, ast.JoinedStr))]
    return ast.unparse(names[-1 if dotted(call.func) != "open" else 0]) if names else ""
