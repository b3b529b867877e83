"""The migration of a script: all changes to its text, each with its reason."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass, field
from typing import final

from . import devices, distributed, hints, setup, steps
from .plan import LOADER, Note, Plan
from .refuse import Refused, check, check_left, parsed, read_script
from .source import Edit, apply, chosen
from .survey import Survey


@final
@dataclass(frozen=True)
class Migration:
    """The result of a migration: the script before and after, the changes and the notes.

    Attributes:
        changes: (line of the original, reason) of each change, in the order of the text.
        notes: code left unchanged, and points to review.
        is_by_hand: the original sets up processes itself.
        is_spawning: it also starts them.
        differs: why several processes that share a batch differ from one by design.
    """

    name: str
    before: str
    after: str
    changes: list[tuple[int, str]]
    notes: list[Note]
    is_by_hand: bool = False
    is_spawning: bool = False
    differs: list[str] = field(default_factory=list[str])

    def diff(self) -> str:
        """Return the changes as a unified diff."""
        return "".join(
            difflib.unified_diff(
                self.before.splitlines(keepends=True),
                [line if line.endswith("\n") else f"{line}\n" for line in self.after.splitlines(keepends=True)],
                self.name,
                f"{self.name} (accelerated)",
            )
        )


def migrate(text: str, name: str, *, keep_batch: bool = False) -> Migration:
    """Convert a script to use the Accelerator.

    Args:
        keep_batch: share the script's batches over the processes, so that the global batch doesn't grow with them.

    Raises:
        Refused: the script is malformed, already accelerated, or has no loop that can be converted.
    """
    if not text.strip():
        raise Refused(f"{name}:1: the file is empty.")
    script = parsed(text, name)
    survey = Survey(script)
    check(script, survey)
    plan = Plan(script, survey)
    distributed.change(plan)
    if not survey.backwards:
        steps.gather(plan)
    devices.change(plan)
    steps.change(plan)
    steps.schedule(plan, keeps_batch=keep_batch and not plan.is_by_hand)
    plan.empty_blocks()
    devices.assigned(plan)
    plan.empty_blocks()
    prepared_at = setup.prepare(plan)
    steps.save(plan, prepared_at)
    if not plan.is_by_hand:
        steps.wait_before_loading(plan)
        hints.global_batch(plan, keeps=keep_batch)
        hints.note_draws(plan)
    elif keep_batch:
        plan.note(
            plan.script.tree, "--keep_batch has no effect here: this script divides its batches over processes itself."
        )
    visible, made_at = setup.create(plan)
    if not plan.is_by_hand:
        steps.prints(plan, visible, made_at)
        hints.bars(plan, visible, made_at, prepared_at)
    setup.drop_imports(plan)
    _add_final_notes(plan)
    return _finished(plan)


def _finished(plan: Plan) -> Migration:
    edits: list[Edit] = [*plan.edits, *plan.removals()]
    check_left(plan, edits)
    text, differs = apply(plan.script, edits), hints.note_losses(plan)
    try:
        ast.parse(text)
    except SyntaxError as error:  # never to be written, and worth a report
        raise Refused(
            f"{plan.script.name}:1: the changes don't fit together (line {error.lineno} of the result: {error.msg}). "
            "Please report this with the script; nothing was written."
        ) from None
    changes = [(edit.line, edit.why) for edit in chosen(edits) if edit.why]
    notes = sorted(plan.notes, key=lambda note: note.line)
    is_spawning = bool(plan.script.calls("torch.multiprocessing.spawn"))
    before, by_hand = plan.script.text, plan.is_by_hand
    return Migration(plan.script.name, before, text, changes, notes, by_hand, is_spawning, differs)


def _add_final_notes(plan: Plan) -> None:
    """Note loops that every process runs in full, and options without effect after the migration."""
    trained = set(plan.prepared[LOADER])
    for loop in plan.survey.loops:
        if not loop.trains and not loop.loaders <= trained and not plan.is_by_hand:
            plan.note(
                loop.node,
                "this loop's loader isn't prepared: every process goes through all of it, so its numbers are those of "
                "one process. To divide it, prepare the loader too and gather what the loop collects with "
                "accelerator.gather_for_metrics(...).",
            )
    for call in plan.script.nodes(ast.Call):
        name = plan.script.text_of(call.func)
        if plan.script.path(call.func).endswith((".SummaryWriter", "wandb.init")):
            plan.note(call, "every process writes these. Make it on the main process only, or use accelerator.log.")
        if name.endswith(".add_argument") and call.args and isinstance(call.args[0], ast.Constant):
            option = str(call.args[0].value)
            if option.lstrip("-").replace("-", "_") in ("local_rank", "device", "gpu", "gpus", "world_size", "no_cuda"):
                plan.note(
                    call, f"the option {option} no longer has any effect; `accelerate launch` has options for that."
                )


__all__ = ["Migration", "Refused", "migrate", "read_script"]
