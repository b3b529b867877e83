"""The differences between two launches that may be why their results differ, the likely ones first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .chain import Entry

_WHAT: Final = {
    "code": "the code",
    "inputs": "a file that the command names",
    "packages": "a package",
    "variables": "an environment variable",
    "machine": "the processor, its threads or the device",
    "switches": "a switch of torch",
    "seeds": "the seed",
    "data": "the data",
    "layout": "the number of ranks or the strategy",
}
#: Kinds of differences, the likely cause first, by what differs first.
_ORDERS: Final = {
    "start": ("seeds", "code", "inputs", "packages", "layout", "switches", "variables", "machine", "data"),
    "data": ("inputs", "data", "code", "seeds", "packages", "layout", "variables", "switches", "machine"),
    "weights": ("code", "packages", "switches", "layout", "machine", "inputs", "variables", "data", "seeds"),
}


def differences(recorded: Entry, now: Entry) -> dict[str, list[str]]:
    """Return the differences between two launches in sentences, by kind."""
    before, after = map(_compared, (recorded, now))
    found = {kind: _changes(kind, before[kind], after[kind]) for kind in _WHAT}
    if recorded["updates"] != now["updates"]:
        del found["seeds"]  # a stream's state at another update
    return {kind: lines for kind, lines in found.items() if lines}


def explain(recorded: Entry, now: Entry, update: int, facts: Sequence[str]) -> list[str]:
    """Return lines that name the likely cause of a first difference, and then the other differences."""
    is_start = update <= recorded["updates"]
    order = _ORDERS["start" if is_start else "weights" if list(facts) == ["weights"] else "data"]
    found = differences(recorded, now)
    kinds = [kind for kind in order if kind in found]
    kinds.sort(key=lambda kind: kind != "layout" or recorded["ranks"] == now["ranks"])  # another number was asked for
    if kinds:
        first, *others = kinds
        lines = [f"Likely cause: {_WHAT[first]}.", *(f"  {line}" for line in found[first])]
        lines += ["Also different:"] if others else []
        return lines + [f"  {line}" for kind in others for line in found[kind]]
    if is_start:
        return ["Likely cause: the start. The weights aren't drawn from a seed that the script sets."]
    if recorded["updates"] < now["updates"]:
        return [
            "Likely cause: state that isn't in the checkpoint, such as a counter of the script. "
            "register_for_checkpointing adds it. If the run is equal without --from_update, this is the cause."
        ]
    if list(facts) != ["weights"]:
        return ["Likely cause: the data set, or its order. Code, files and seeds are equal."]
    return [
        "Likely cause: the computation. All recorded conditions are equal. So an operation isn't deterministic, "
        "samples between two fingerprints have changed, or hardware computes wrong. "
        "torch.use_deterministic_algorithms(True) makes torch name such an operation."
    ]


def _compared(entry: Entry) -> dict[str, Any]:
    """Return what is compared of a launch; the number of threads is a fact of the machine, however it was set."""
    variables = {name: value for name, value in entry["variables"].items() if name != "OMP_NUM_THREADS"}
    parts = {"code": entry["code"]["files"], "layout": _layout(entry), "data": _data(entry), "variables": variables}
    return {**entry, **parts}


def _layout(entry: Entry) -> dict[str, Any]:
    return {name: entry[name] for name in ("ranks", "strategy", "precision", "accumulation")}


def _data(entry: Entry) -> dict[str, Any]:
    loaders = enumerate(entry["data"])
    return {f"loader {number}, {name}": value for number, one in loaders for name, value in one.items()}


def _changes(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if kind in ("code", "inputs"):
            state = "has changed" if old and new else "isn't used any more" if old else "wasn't used"
            lines.append(f"{Path(name).name} {state} ({name}).")
        else:
            lines.append(f"{name}: {_shown(new)} now, {_shown(old)} in the run.")
    return lines


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
