"""``accelerate tpu-config``: set-up commands on every machine of a TPU pod, through gcloud.

The commands are run by a shell on the pod's machines, which is what they are for; here nothing goes through a
shell.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import AccelerateError, MissingDependency, SettingError
from ..settings import file
from .parser import Parser, spellings


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """A parser of ``accelerate tpu-config``."""
    description = "Run commands on every machine of a TPU pod before a training run."
    if subparsers is not None:
        parser = subparsers.add_parser("tpu-config", description=description, allow_abbrev=False)
    else:
        parser = Parser(prog="accelerate tpu-config", description=description)
    add = parser.add_argument
    add(*spellings("--config_file"), dest="config_file", help="The configuration to take what isn't given from.")
    add(*spellings("--tpu_name"), dest="tpu_name", help="The name of the TPU.")
    add(*spellings("--tpu_zone"), dest="tpu_zone", help="The zone of the TPU.")
    add(*spellings("--use_alpha"), dest="use_alpha", action="store_true", help="Use `gcloud alpha`.")
    add(*spellings("--command_file"), dest="command_file", help="A file of commands, one a line.")
    add("--command", action="append", nargs="+", help="A command (may be given several times).")
    add(*spellings("--install_accelerate"), dest="install_accelerate", action="store_true", help="Install accelerate.")
    add(
        *spellings("--accelerate_version"),
        dest="accelerate_version",
        default="latest",
        help="The version to install: latest, or a number.",
    )
    add("--debug", action="store_true", help="Print the command instead of running it.")
    parser.set_defaults(func=tpu_command_launcher)
    return parser


def _remote_commands(args: argparse.Namespace, content: dict[str, Any]) -> list[str]:
    commands: list[str] = []
    if args.install_accelerate:
        if args.accelerate_version == "dev":
            raise SettingError("--accelerate_version dev has no public address to install from: give a number.")
        latest = args.accelerate_version == "latest"
        package = "accelerate" if latest else f"accelerate=={args.accelerate_version}"
        commands.append(f"pip install -U {shlex.quote(package)}")
    command_file = args.command_file or (content.get("command_file") if not args.command else None)
    if command_file is not None:
        path = Path(command_file).expanduser()
        if not path.is_file():
            raise SettingError(f"--command_file {command_file}: there is no such file.")
        commands += [line for line in path.read_text().splitlines() if line.strip()]
    elif args.command:
        commands += [" ".join(words) for words in args.command]
    elif content.get("commands"):
        commands += [str(command) for command in content["commands"]]
    if not commands:
        raise SettingError("There is nothing to run: give --command, --command_file or --install_accelerate.")
    return commands


def command_line(args: argparse.Namespace, content: dict[str, Any]) -> list[str]:
    """The gcloud command, as a list of arguments."""
    name, zone = args.tpu_name or content.get("tpu_name"), args.tpu_zone or content.get("tpu_zone")
    if not name or not zone:
        raise SettingError("Which TPU? Give --tpu_name and --tpu_zone, or a configuration that has them.")
    remote = "; ".join(["cd /usr/share", *_remote_commands(args, content)])
    head = ["gcloud", "alpha"] if args.use_alpha else ["gcloud"]
    return [*head, "compute", "tpus", "tpu-vm", "ssh", name, "--zone", zone, "--command", remote, "--worker", "all"]


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """The commands have been run on every machine of the pod, or printed with ``--debug``."""
    path = Path(file.default_config_file() if args.config_file is None else args.config_file).expanduser()
    if args.config_file is not None and not path.is_file():
        raise FileNotFoundError(f"There is no configuration at {path}.")
    content = file.read(path) if path.is_file() else {}
    words = command_line(args, dict(content))
    if args.debug:
        print(f"Running {' '.join(words)}")
        return
    if shutil.which("gcloud") is None:
        raise MissingDependency("tpu-config needs the `gcloud` command of Google Cloud's SDK on the PATH.")
    subprocess.run(words, check=True)
    print("Successfully setup pod.")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of ``accelerate tpu-config``."""
    from .launch import complain

    args = tpu_command_parser().parse_args(None if arguments is None else list(arguments))
    try:
        tpu_command_launcher(args)
    except (AccelerateError, FileNotFoundError) as error:
        return complain("accelerate tpu-config", error)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
