"""``accelerate plan``: choose how to distribute a training run over some GPUs, by its memory on each of them."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...commands.parser import Subparsers, command_parser, count, spellings
from ...launch.arguments import flags_of
from ...settings import file
from ...settings.option import Source
from ...settings.run import collect
from ...settings.tree import Settings
from .command import PRECISIONS

if TYPE_CHECKING:
    from .plan import Candidate
    from .trace import OptimizerFactory, Traceable

_DESCRIPTION = "Propose how to spread a training run over GPUs, and how to launch it."
#: Options of the launch that a plan can't know.
_OF_EACH_MACHINE = "--machine_rank, --main_process_ip and --main_process_port"


def plan_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate plan``."""
    parser = command_parser("plan", _DESCRIPTION, subparsers)
    parser.add_argument(
        "subject",
        metavar="SCRIPT_OR_MODEL",
        help="A training script (it runs until accelerator.prepare, without memory for weights), a name on the hub, a "
        "folder, or a function that builds the model: 'module:function'.",
    )
    parser.add_argument("--gpus", type=count, required=True, metavar="N", help="How many there are, over all hosts.")
    parser.add_argument("--memory", required=True, metavar="SIZE", help="Of each of them, like 80GB or 24GiB.")
    parser.add_argument(*spellings("--gpus_per_host"), type=count, default=8, help="How many a host has.")
    parser.add_argument(
        "--reserve", type=float, metavar="X", default=0.1, help="The share of the memory that isn't planned with."
    )
    parser.add_argument("--islands", type=count, default=1, help="Groups of GPUs that DiLoCo lets train apart.")
    parser.add_argument("--batch", type=count, default=1, help="Samples of a micro-batch on one data-parallel rank.")
    parser.add_argument("--sequence", type=count, default=512, help="Tokens of a sample.")
    parser.add_argument("--optimizer", default="adamw", help="A class of torch.optim, where the script has none.")
    parser.add_argument(
        *spellings("--mixed_precision"), choices=tuple(PRECISIONS), default="bf16", help="The precision of the step."
    )
    parser.add_argument(
        *spellings("--trust_remote_code"), action="store_true", help="Run the code that the model brings with it."
    )
    parser.add_argument("--json", action="store_true", help="Print one object for programs.")
    parser.add_argument(*spellings("--config_file"), help="Write the configuration of the chosen layout to this file.")
    parser.epilog = "What follows -- are the script's own arguments."
    parser.set_defaults(func=plan_command, script_args=[])
    return parser


def plan_command(args: argparse.Namespace) -> None:
    """Print the plan and the command that launches it; write its configuration if a file is named.

    Raises:
        AccelerateError: the model is unknown or can't be traced, or a number is invalid.
    """
    import torch

    from ...checkpointing.weights import convert_file_size_to_int
    from .plan import as_text, propose
    from .trace import TrainingTrace, repeated_blocks, trace_or_sizes

    subject, optimizer, batch = _subject(args)
    precision = PRECISIONS[args.mixed_precision]
    reasons: list[str | None] = []

    def trace(recompute: bool) -> TrainingTrace:
        traced, untraced = trace_or_sizes(
            subject,
            batch=batch,
            sequence=args.sequence,
            dtype=torch.float32,
            autocast=None if precision is None else getattr(torch, precision),
            optimizer=optimizer,
            recompute=recompute,
        )
        reasons.append(untraced)
        return traced

    plan = propose(
        subject.name,
        trace,
        gpus=args.gpus,
        memory=convert_file_size_to_int(args.memory),
        gpus_per_host=args.gpus_per_host,
        reserve=args.reserve,
        islands=args.islands,
    )
    plan = replace(plan, untraced=next(filter(None, reasons), None))
    print(json.dumps(plan.as_json(), indent=2) if args.json else as_text(plan))
    if plan.chosen is None or (args.json and not args.config_file):
        return
    blocks = sorted({type(block).__name__ for block in repeated_blocks(subject.build())})
    settings = settings_of(plan.chosen, args.gpus, args.gpus_per_host, args.mixed_precision, blocks)
    flags = flags_of(settings)
    if args.config_file:
        file.save(settings, Path(args.config_file).expanduser())
        flags = ["--config_file", args.config_file]
    if not args.json:
        program = [args.subject, *args.script_args] if args.subject.endswith(".py") else ["SCRIPT.py"]
        hosts = settings.launch.num_machines
        where = f" on each of {hosts} machines, with {_OF_EACH_MACHINE}" if hosts > 1 else ""
        print(f"\nLaunch it{where}:\n  {shlex.join(['accelerate', 'launch', *flags, *program])}")


def _subject(args: argparse.Namespace) -> tuple[Traceable, str | OptimizerFactory, int]:
    """Return (model, optimizer, samples of a batch)."""
    if args.subject.endswith(".py"):
        from .subject import FromScript

        script = FromScript(args.subject, args.script_args)
        return script, script.optimizer or args.optimizer, script.batch_size or args.batch
    from .subject import find_subject

    return find_subject(args.subject, None, args.trust_remote_code), args.optimizer, args.batch


def settings_of(
    way: Candidate, gpus: int, gpus_per_host: int, mixed_precision: str, blocks: Sequence[str] = ()
) -> Settings:
    """Return the settings of a run for the plan ``way``; ``blocks`` are the classes that FSDP wraps."""
    layout = way.layout
    hosts = max(1, gpus // gpus_per_host)
    label = "NO" if gpus == 1 else "MULTI_GPU"
    values: dict[str, object] = {
        "run.mixed_precision": mixed_precision,
        "launch.num_processes": gpus,
        "launch.num_machines": hosts,
    }
    if layout.sharding == "zero3":
        label = "DEEPSPEED"
        values |= {
            "deepspeed.zero_stage": 3,
            "deepspeed.offload_optimizer_device": "cpu",
            "deepspeed.offload_param_device": "cpu",
        }
    is_sharded = layout.sharding.startswith("fsdp")
    if is_sharded:
        label = "FSDP"
        values |= {
            "fsdp.fsdp_version": 2,
            "fsdp.reshard_after_forward": layout.sharding != "fsdp-grad",
            "fsdp.auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if blocks else "NO_WRAP",
            "fsdp.transformer_cls_names_to_wrap": list(blocks) or None,
            "fsdp.activation_checkpointing": way.recompute,
            "fsdp.cpu_offload": layout.offload_weights,
            "fsdp.state_dict_type": "SHARDED_STATE_DICT",
        }
    split = layout.tp > 1 or layout.cp > 1
    if split or (is_sharded and layout.replicas > 1):
        values |= {
            "paradigm.use_parallelism_config": True,
            "parallelism.dp_replicate_size": layout.replicas,
            "parallelism.dp_shard_size": layout.shards,
            "parallelism.tp_size": layout.tp,
            "parallelism.cp_size": layout.cp,
        }
    if layout.islands > 1 and layout.sharding == "none":
        values["diloco.islands"] = layout.islands
    source = Source("file", "accelerate plan")
    layer = {"launch.distributed_type": (label, source), **{name: (value, source) for name, value in values.items()}}
    return collect({}, {}, file=layer)
