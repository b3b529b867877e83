"""The table of all rules: code, severity, text, cure, how it is found, and how it is fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final, NamedTuple

from ..migrate.survey import LOADER, MODEL, OPTIMIZER, SCHEDULER
from . import data, fixes, output, preparing, processes, steps
from .processes import Processes
from .subject import Place, Subject


class Severity(Enum):
    """How much a finding matters."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Rule(NamedTuple):
    """One kind of mistake.

    Attributes:
        text: what is wrong, with the words of a place in braces.
        cure: what to do.
        fix: what `--fix` writes; None if the author has to decide.
    """

    code: str
    severity: Severity
    check: Callable[[Subject, Processes], Iterator[Place]]
    text: str
    cure: str
    fix: fixes.Fix | None = None


_E, _W, _N = Severity

RULES: Final = (
    # D1: some processes wait for others that don't come
    Rule("D101", _E, processes.collective_of_one,
         "`{name}` is called by one process only, and waits for the others.", "Call it on all processes."),
    Rule("D102", _E, processes.helper_of_one,
         "`{name}` is called by one process only. It calls `{collective}`, which waits for the others.",
         "Call it on all processes."),
    Rule("D103", _E, processes.collective_by_own_value,
         "`{name}` waits for all processes. `{condition}` depends on {why}, so some of them may not reach it.",
         "Reduce the value first, so that all processes decide alike."),
    Rule("D104", _E, processes.loop_left_by_one,
         "`{word}` depends on {why} (`{condition}`). The other processes stay in the loop and wait for this one.",
         "Decide together: reduce the value first, or use `accelerator.set_trigger()` and `check_trigger()`."),
    Rule("D105", _E, processes.step_of_one,
         "`{name}` is called by one process only, so the processes' weights diverge.", "Call it on all processes."),
    Rule("D106", _W, processes.prepared_loader_of_one,
         "one process reads the prepared loader `{name}`, which gives it its own part of the data only.",
         "Evaluate on all processes, and gather what the loop collects."),
    Rule("D107", _W, processes.sharded_state_of_one,
         "`{name}` is called by one process only. With a sharded model, it waits for the others.",
         "Call it on all processes. It writes each file once."),
    # D2: preparing
    Rule("D201", _E, preparing.nothing_prepared,
         "nothing is prepared, so every process trains by itself.", "Call `prepare`."),
    Rule("D202", _E, preparing.unprepared(MODEL),
         "the model `{name}` isn't prepared: its gradients aren't averaged: processes train apart.",
         "Pass it to `prepare`.", fixes.prepare_too),
    Rule("D203", _E, preparing.unprepared(OPTIMIZER),
         "the optimizer `{name}` isn't prepared: it advances on every micro-batch, and isn't saved in checkpoints.",
         "Pass it to `prepare`.", fixes.prepare_too),
    Rule("D204", _E, preparing.unprepared(LOADER),
         "the data loader `{name}` isn't prepared: every process reads all of it.",
         "Pass it to `prepare`.", fixes.prepare_too),
    Rule("D205", _E, preparing.unprepared(SCHEDULER),
         "the scheduler `{name}` isn't prepared: it advances on every micro-batch, and isn't saved in checkpoints.",
         "Pass it to `prepare`.", fixes.prepare_too),
    Rule("D206", _E, preparing.made_after_prepare,
         "the {role} `{name}` is made after `prepare`, which never gets it.",
         "Make it before, and prepare it together with the model."),
    Rule("D207", _E, preparing.results_in_another_order,
         "`prepare` returns `{given}`, in this order. The names on the left are `{taken}`.",
         "Write both in the same order."),
    Rule("D208", _E, preparing.results_dropped,
         "`{name}` returns the prepared objects, and they are dropped here.", "Assign them to the names in use."),
    Rule("D209", _E, preparing.unprepared_name_used,
         "`{name}` is used after it was prepared as `{prepared}`. It is still the unprepared object.",
         "Use `{prepared}`."),
    Rule("D210", _E, preparing.prepared_twice,
         "`{name}` is prepared again in each round of a training loop.", "Prepare it once, before the loop."),
    Rule("D211", _E, preparing.group_by_hand,
         "`{name}` wraps a model that `prepare` wraps as the run needs it.", "Leave it out."),
    Rule("D212", _W, preparing.batch_norm_of_few,
         "`{name}` normalises over the {size} samples of one process.",
         "Use `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` before `prepare`, or GroupNorm."),
    Rule("D213", _N, preparing.batch_of_each,
         "the batch size {size} is that of one process: N processes take N times as many samples in a step.",
         "DataLoaderConfiguration(split_batches=True) shares them instead."),
    # D3: one step
    Rule("D301", _E, steps.backward_by_hand,
         "`.backward()` of the loss itself skips the scaling of mixed precision and accumulation.",
         "Call `accelerator.backward(loss)`.", fixes.backward),
    Rule("D302", _W, steps.clipping_by_hand,
         "`{name}` of torch sees scaled gradients, and a part of them where the model is sharded.",
         "Use `accelerator.{name}`.", fixes.of_accelerator(takes=fixes.CLIP_ARGUMENTS)),
    Rule("D303", _W, steps.clipping_of_parts,
         "`{name}` clips in every micro-batch, when the gradients are a part of the window's.",
         "Put it under `if accelerator.sync_gradients:`.", fixes.only_where_synchronised),
    Rule("D304", _W, steps.accumulation_without_window,
         "gradient_accumulation_steps divides the loss, but nothing says where a window ends.",
         "Put the step under `with accelerator.accumulate(model):`."),
    Rule("D305", _N, steps.window_by_hand,
         "the step waits for `{condition}`. The Accelerator doesn't know it, and exchanges gradients in every "
         "micro-batch.",
         "Give `gradient_accumulation_steps`, and step each time under `with accelerator.accumulate(model):`."),
    Rule("D306", _E, steps.divided_twice,
         "the loss is divided by `{steps}` here, and `accelerator.backward` divides it again.",
         "Leave the division out."),
    Rule("D307", _E, steps.step_outside_window,
         "`{name}` is called outside of `accumulate`, where it isn't skipped.",
         "Call it inside, also `zero_grad`."),
    Rule("D308", _E, steps.gradients_dropped,
         "`{name}` drops the gradients between `backward` and the step.", "Call it after the step."),
    Rule("D309", _E, steps.clipped_after_step,
         "`{name}` comes after the step, and has no effect on it.", "Call it between `backward` and the step."),
    Rule("D310", _E, steps.never_zeroed,
         "nothing calls `zero_grad`: the gradients of all batches add up.",
         "Call `{name}.zero_grad()` after the step."),
    Rule("D311", _W, steps.autocast_by_hand,
         "`{name}` sets a dtype by hand. It wins over `mixed_precision`, which others set by their launch.",
         "Leave it out: a prepared model computes in the Accelerator's precision. Around other code, use "
         "`accelerator.autocast()`."),
    Rule("D312", _E, steps.scaler_by_hand,
         "a GradScaler scales the loss besides the one of the Accelerator.",
         "Leave it out, and call `accelerator.backward(loss)`."),
    Rule("D313", _W, steps.never_trained_again,
         "`{name}.eval()` runs between epochs, and nothing calls `train()`: dropout and BatchNorm stay off.",
         "Call `{name}.train()` at the start of each epoch."),
    Rule("D314", _E, steps.window_counted_twice,
         "the step waits for `{condition}`, and `accumulate` counts micro-batches too. Some windows have no step.",
         "Call the step each time. `accumulate` skips it inside of a window."),
    # D4: data
    Rule("D401", _W, data.sampler_by_hand,
         "`DistributedSampler` divides the data by hand, and `prepare` leaves it at that.",
         "Give the loader `shuffle=...` and let `prepare` divide it."),
    Rule("D402", _W, data.sampler_without_epoch,
         "`DistributedSampler` divides the data by hand. Without `set_epoch`, it gives the same order in every epoch.",
         "Give the loader `shuffle=...` and let `prepare` divide it."),
    Rule("D403", _E, data.sharded_twice,
         "`{data}` is a part of the data already, and `prepare` divides it again.", "Give the loader the whole data."),
    Rule("D404", _E, data.split_unseeded,
         "`{name}` has no seed, so each process splits or orders the data differently.",
         "Seed it, or call `set_seed` before.", fixes.generator),
    Rule("D405", _E, data.split_seeded_by_rank,
         "`{name}` follows `{seed}` of line {line}, which gives each process another seed and another split.",
         "Use the same seed on all processes here.", fixes.generator),
    Rule("D406", _W, data.same_noise,
         "`{name}` draws the same numbers on all processes, after `{seed}` of line {line}.",
         "Call `set_seed(seed, device_specific=True)` after `prepare`, or give a generator per rank."),
    Rule("D407", _W, data.length_before_prepare(for_bar=False),
         "`len({name})` is taken before `prepare`, and `{use}` is used in line {line}. N processes have N times fewer "
         "batches.", "Take the length after `prepare`."),
    Rule("D408", _W, data.length_for_schedule,
         "`len({name})` is that of one process. A prepared scheduler advances N times per step, and ends N times too "
         "early.", "Take the length before `prepare`, or multiply it by `accelerator.num_processes`."),
    Rule("D409", _N, data.length_before_prepare(for_bar=True),
         "`len({name})` is taken before `prepare`, and the bar of line {line} has the length `{use}`. On N processes, "
         "the bar stops at one part in N.", "Take the length after `prepare`."),
    Rule("D410", _W, data.schedule_of_epochs,
         "`{name}` is called once per epoch, and a prepared scheduler advances N times in a call on N processes.",
         'Use `Accelerator(scheduler_mode="updates")`, or leave the scheduler out of `prepare`.'),
    # D5: evaluation
    Rule("D501", _W, data.part_of_the_data,
         "this loop collects the part of the data that its process reads.",
         "Gather what it collects with `accelerator.gather_for_metrics(...)`."),
    Rule("D502", _W, data.padding_counted,
         "`{name}` keeps the samples that fill the last batch, so they count twice.",
         "Use `accelerator.gather_for_metrics`.", fixes.of_accelerator("gather_for_metrics", takes=())),
    Rule("D503", _W, data.never_evaluating,
         "this loop calls `{name}` with dropout and BatchNorm in training mode.", "Call `{name}.eval()` before."),
    Rule("D504", _N, data.sum_of_one,
         "`{name}` adds up the samples of one process.", "Show `accelerator.reduce(...)` or the mean of a gather."),
    # D6: files
    Rule("D601", _W, output.written_by_all,
         "`{name}` is called by all processes, which all write the same file at once.",
         "Put it under `if accelerator.is_main_process:`, or use `accelerator.save`.", fixes.save),
    Rule("D602", _W, output.appended_by_all,
         "all processes append to {path}, so each line is there N times, in any order.",
         "Write under `if accelerator.is_main_process:`, or give each process a file of its own."),
    Rule("D603", _W, output.removed_by_all,
         "`{name}` is called by all processes. The slower ones don't find the file, or remove a new one.",
         "Put it under `if accelerator.is_main_process:`, and wait with `accelerator.wait_for_everyone()`."),
    Rule("D604", _W, output.state_of_the_wrapper,
         "`{name}` is prepared: its parameter names (and, when sharded, its contents) depend on the strategy.",
         "Use `accelerator.get_state_dict({name})` on all processes, or `accelerator.unwrap_model`.",
         fixes.full_state),
    Rule("D605", _W, output.inner_model,
         "`{name}` is there only where DistributedDataParallel wraps the model.",
         "Use `accelerator.unwrap_model({model})`.", fixes.unwrap),
    Rule("D606", _E, output.loaded_before_prepare,
         "`load_state` restores prepared objects, and `prepare` is called in line {line} only.",
         "Call it after `prepare`."),
    Rule("D607", _W, output.loaded_into_the_wrapper,
         "`{name}` is prepared: the names of its parameters depend on the strategy.",
         "Load before `prepare`, or into `accelerator.unwrap_model({name})`."),
    Rule("D608", _W, output.read_without_waiting,
         "{path} is read here while the main process may still write it (line {line}).",
         "Call `accelerator.wait_for_everyone()` between them."),
    # D7: output and devices
    Rule("D701", _N, output.printed_by_all,
         "every process prints this.", "Use `accelerator.print`.", fixes.of_accelerator("print")),
    Rule("D702", _N, output.drawn_by_all,
         "every process draws this bar.",
         "Give `disable=not accelerator.is_local_main_process`, or take `tqdm` from accelerate.utils.",
         fixes.quiet_bar),
    Rule("D703", _W, output.tracked_by_all,
         "`{name}` starts a run of the tracker on every process.",
         "Put it under `if accelerator.is_main_process:`, or use `accelerator.init_trackers`."),
    Rule("D704", _W, output.logged_nowhere,
         "`accelerator.log` has no tracker: nothing calls `init_trackers`.",
         "Give `Accelerator(log_with=...)`, and call `accelerator.init_trackers(name)`."),
    Rule("D705", _W, output.downloaded_by_all,
         "`{name}` downloads on all processes at once, into the same files.",
         "Put it under `with accelerator.main_process_first():`."),
    Rule("D706", _W, output.device_by_name,
         "{device} is one device, the same on all processes.", "Use `accelerator.device`.", fixes.device),
    Rule("D707", _W, output.cuda_by_hand,
         "`.cuda()` needs a GPU, and takes the first.", "Use `.to(accelerator.device)`, or prepare it.", fixes.device),
)  # fmt: skip
