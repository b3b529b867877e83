"""The command ``accelerate``: finds the subcommand by name and imports only that one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final

#: name -> (module, one line of help), in the order of the help.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "config": ("config", "Answer a few questions about this machine and write the configuration file."),
    "launch": ("launch", "Start a program on one process or many, here or on a cluster."),
    "test": ("test", "Check that the configuration works, with a small training run."),
    "env": ("env", "Print versions, devices and the configuration, to be pasted into a report."),
    "estimate-memory": ("estimate", "Say how much memory a model needs."),
    "plan": ("plan", "Propose how to spread a training run over GPUs, by the memory it needs."),
    "checkpoints": ("checkpoints", "List the checkpoints in a folder, and say which of them load."),
    "migrate": ("migrate", "Turn a raw PyTorch script into one for any number of processes."),
    "doctor": ("doctor", "Say what an accelerated script does otherwise on several processes."),
    "monitor": ("monitor", "Show a run while it goes on: a live page, or the terminal."),
    "report": ("report", "Say where the hours of a run went, over all its restarts."),
    "merge-weights": ("merge", "Merge the sharded weights of a checkpoint into one file."),
    "to-fsdp2": ("to_fsdp2", "Convert a configuration file from FSDP version 1 to version 2."),
    "tpu-config": ("tpu", "Run set-up commands on every machine of a TPU pod."),
    "completion": ("completion", "Print a script that lets bash, zsh or fish complete this command."),
}


def usage() -> str:
    """Return the help of the command ``accelerate`` itself."""
    lines = ["Usage: accelerate COMMAND [options]", ""]
    lines += [f"  {name:<18}{help}" for name, (_, help) in COMMANDS.items()]
    lines += ["", "accelerate COMMAND --help shows the options of one command; accelerate --version the version."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand and return its exit code; without one, print the help and return 1."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `accelerate ... | head`: the reader has closed the pipe
        sys.stdout = None  # pyright: ignore[reportAttributeAccessIssue]  (nothing is left to flush at exit)
        return 141


def _run(arguments: Sequence[str] | None) -> int:
    """Run the subcommand, or print what was asked of the command itself; return the exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if not argv:
        print(usage())
        return 1
    name, *rest = argv
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        package = sys.modules["accelerate"]  # this very package, which is imported already
        print(f"accelerate {package.__version__}")
        return 0
    if name not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(COMMANDS)}."
        print(f"accelerate: there is no command {name!r}.{hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"accelerate.commands.{COMMANDS[name][0]}")
    if name == "launch" and arguments is None:  # no other code runs in this process
        return module.main(rest, replace=True)
    return module.main(rest)


if __name__ == "__main__":
    sys.exit(main())
