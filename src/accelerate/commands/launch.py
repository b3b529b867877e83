"""``accelerate launch``: settings from flags, file and environment, a plan made of them, and its run."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..errors import AccelerateError
from ..launch.arguments import complete, config_path, program_of, settings_of
from ..launch.choose import choose, engine_named
from ..launch.engine import is_cpu_run, without_effect
from ..launch.local import LocalProcesses, OneProcess, ProcessFailed
from ..launch.plan import LaunchPlan, Program
from ..launch.preflight import Host, check_cheap, this_host
from ..launch.prepared import prepared_for_sagemaker
from ..launch.streams import open_standard_descriptors
from ..ports import claim_port, release_ports
from ..seams import launch_flags, load
from ..settings import env
from ..settings.tree import Settings, launch_options_of
from .parser import Subparsers, add_launch_options, build_launch_parser, complain

if TYPE_CHECKING:
    from ..launch.engine import LaunchEngine
    from .config.config_args import ClusterConfig, SageMakerConfig

__all__ = [
    "deepspeed_launcher",
    "launch_command",
    "launch_command_parser",
    "main",
    "multi_gpu_launcher",
    "sagemaker_launcher",
    "simple_launcher",
    "tpu_launcher",
    "tpu_pod_launcher",
]

#: Options that scripts get from training libraries, without naming them.
_OF_TRAINERS: Final = {"--debug", "--fp16", "--gradient_accumulation_steps", "--help", "--log_dir", "--quiet"}


def launch_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of the launcher's command line, which leaves the script's own arguments unparsed."""
    if subparsers is not None:
        parser = subparsers.add_parser("launch", add_help=False, allow_abbrev=False)
        parser.set_defaults(func=launch_command)
        add_launch_options(parser, launch_options_of())
        parser.add_argument("training_script")
        parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
        return parser
    return build_launch_parser(launch_options_of())


def _run(
    args: argparse.Namespace, engine: LaunchEngine | None = None, *, replace_process: bool = False
) -> tuple[int, Settings, LaunchPlan]:
    """Run the program through ``engine``, or through the one that suits; return (exit code, settings, plan)."""
    with contextlib.ExitStack() as after:
        after.callback(release_ports)
        begun = [load(row.begin)(args) for row in launch_flags() if getattr(args, row.dest, None) not in (None, False)]
        settings, engine, plan = plan_launch(args, engine)
        contexts = [around(plan) for around in begun]
        if _shown_instead(args, settings, engine, plan):
            return 0, settings, plan
        check_cheap(settings, env.snapshot())
        if not settings.launch.quiet:
            for note in plan.notes:
                print(f"accelerate launch: {note}", file=sys.stderr)
        for context in contexts:
            plan = after.enter_context(context)
        code = engine.replace_process(plan) if replace_process and isinstance(engine, OneProcess) else engine.run(plan)
        return code, settings, plan


def _start(args: argparse.Namespace, engine: LaunchEngine | None = None) -> None:
    """Run the program through ``engine``, or through the one that suits.

    Raises:
        ProcessFailed: it ended with another exit code than 0 (also a ``subprocess.CalledProcessError``).
        SystemExit: the same, under ``--quiet``.
    """
    code, settings, plan = _run(args, engine)
    if code != 0:
        if settings.launch.quiet:
            sys.exit(code)
        raise ProcessFailed(code, plan.argv)


def simple_launcher(args: argparse.Namespace) -> None:
    """Run the program once, or once for each host of a hostfile through mpirun."""
    _start(args, OneProcess() if getattr(args, "mpirun_hostfile", None) is None else None)


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Run the program on several processes, one for each device."""
    _start(args, None if (args.num_processes or 0) > 1 or (args.num_machines or 1) > 1 else LocalProcesses())


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Run the program on DeepSpeed's ranks, of this host or of all hosts of a hostfile."""
    args.use_deepspeed = True
    _start(args)


def tpu_launcher(args: argparse.Namespace) -> None:
    """Call the script's function on each TPU device of this host."""
    args.tpu_use_cluster, args.tpu = False, True
    _start(args, engine_named("tpu"))


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Start the program on all machines of a TPU pod."""
    args.tpu_use_cluster, args.tpu = True, True
    _start(args, engine_named("tpu"))


def sagemaker_launcher(sagemaker_config: SageMakerConfig, args: argparse.Namespace) -> None:
    """Run the program as the SageMaker job that ``sagemaker_config`` describes."""
    settings, host = prepared_for_sagemaker(sagemaker_config, args)
    engine = engine_named("sagemaker")
    plan = engine.plan(settings, program_of(args, settings), host)
    if not _shown_instead(args, settings, engine, plan):
        engine.run(plan)


def plan_launch(
    args: argparse.Namespace, engine: LaunchEngine | None = None
) -> tuple[Settings, LaunchEngine, LaunchPlan]:
    """Return (settings, engine, plan) of a launch, through ``engine`` if given; nothing is started."""
    settings = settings_of(args)
    program = program_of(args, settings)
    host: Host = this_host(env.snapshot(), cpu=is_cpu_run(settings), port=settings.launch.main_process_port)
    engine = engine or choose(settings, host)
    plan = engine.plan(settings, program, host)
    port = int(plan.environment.get("MASTER_PORT", 0))
    # Another launch may have chosen it, whose ranks don't listen there yet. Only machine 0 listens.
    if plan.ranks and plan.environment.get("GROUP_RANK", "0") == "0" and not claim_port(port):
        host = dataclasses.replace(host, busy_ports=host.busy_ports | {port})
        plan = engine.plan(settings, program, host)
    notes = (*plan.notes, *without_effect(engine, settings, program, host, plan), *_passed_to_script(program))
    return settings, engine, dataclasses.replace(plan, notes=notes)


def _passed_to_script(program: Program) -> Iterator[str]:
    """Yield a note if the script gets options of the launcher that its source doesn't name."""
    words = takewhile("--".__ne__, program.arguments)
    given = {word.partition("=")[0] for word in words if word.startswith("--")} - _OF_TRAINERS
    source = Path(program.target)
    if given and program.kind == "script" and source.is_file():
        code = source.read_text(encoding="utf-8", errors="replace").replace("-", "_")
        known = launch_command_parser()._option_string_actions
        ours = [name for name in sorted(given) if name in known and not _names(code, name[2:].replace("-", "_"))]
        if ours:
            named = " and ".join(ours)
            yield f"{source} gets {named} as its own: options of `accelerate launch` come before the script"


def _names(code: str, option: str) -> bool:
    """Return whether a script declares an option: as ``--option``, or as an annotated field or parameter."""
    return re.search(rf"__{option}\b|(?<![.\w]){option}\s*:", code) is not None


def launch_command(args: argparse.Namespace) -> None:
    """Run the program until it ends.

    Raises:
        ProcessFailed: it ended with another exit code than 0 (also a ``subprocess.CalledProcessError``).
        SystemExit: the same, under ``--quiet``.
    """
    _start(args)


def _shown_instead(args: argparse.Namespace, settings: Settings, engine: LaunchEngine, plan: LaunchPlan) -> bool:
    """Print the settings or the plan for ``--explain`` and ``--dry-run``, and return whether one was asked for."""
    if getattr(args, "explain", False):
        print(settings.explain())
        return True
    if getattr(args, "dry_run", False):
        engine.dry_run(plan)
        return True
    return False


def run_launch(args: argparse.Namespace, *, replace_process: bool = False) -> int:
    """Run the program and return its exit code; with ``replace_process``, a single process replaces this one."""
    open_standard_descriptors()
    return _run(args, replace_process=replace_process)[0]


def _show_in_one_line(message: Warning | str, category: type[Warning], *_: object) -> None:
    """Print the warning without its source location and source line, which don't help a user."""
    print(f"accelerate launch: {category.__name__}: {message}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None, *, replace: bool = False) -> int:
    """Run ``accelerate launch`` and return the program's own exit code, or 2 when the launch was refused.

    Called as a command (without ``arguments``), a single process replaces this one (``replace``).
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = launch_command_parser()
    if not argv:
        parser.print_help()
        print("\naccelerate launch: no script was given.", file=sys.stderr)
        return 1
    is_command = replace or arguments is None
    if is_command:  # no other code runs in this process
        warnings.showwarning = _show_in_one_line
    try:
        return run_launch(parser.parse_args(argv), replace_process=is_command)
    except (AccelerateError, FileNotFoundError) as error:
        return complain("accelerate launch", error)


def _validate_launch_command(
    args: argparse.Namespace,
) -> tuple[argparse.Namespace, ClusterConfig | SageMakerConfig | None, bool]:
    """Return (args completed from the file and the defaults, the file's configuration, whether it gave the precision).

    Takes the Namespace of the launcher's parser, and one made by hand.
    """
    from .config.config_args import load_config_from_file  # with the questionnaire, which a launch doesn't ask

    settings = settings_of(args)
    path = config_path(args)
    configuration = None if path is None else load_config_from_file(path)
    complete(args, settings)
    return args, configuration, settings.source_of("run.mixed_precision").kind == "file"


if __name__ == "__main__":
    sys.exit(main())
