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
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import AccelerateError, MissingDependency, SettingError
from ..settings import file
from .parser import Parser, spellings
from .wheel import build_wheel, version, wheel_name

#: Where the package is copied to on the pod's machines.
_REMOTE_FOLDER: Final = "/tmp"


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
    add(
        *spellings("--install_accelerate"),
        dest="install_accelerate",
        action="store_true",
        help="Install this very package.",
    )
    add(
        *spellings("--accelerate_version"),
        dest="accelerate_version",
        default="latest",
        help="Kept for old scripts: the version that runs here is installed.",
    )
    add("--debug", action="store_true", help="Print the command instead of running it.")
    parser.set_defaults(func=tpu_command_launcher)
    return parser


def _remote_commands(args: argparse.Namespace, content: dict[str, Any]) -> list[str]:
    commands: list[str] = []
    if args.install_accelerate:
        commands.append(
            shlex.join(["python3", "-m", "pip", "install", "--upgrade", f"{_REMOTE_FOLDER}/{wheel_name()}"])
        )
    command_file = args.command_file or (content.get("command_file") if not args.command else None)
    if command_file is not None:
        path = Path(command_file).expanduser()
        if not path.is_file():
            raise SettingError(f"--command_file {command_file}: there is no such file.")
        commands += [line for line in path.read_text().splitlines() if line.strip()]
    elif args.command:
        commands += [words[0] if len(words) == 1 else shlex.join(words) for words in args.command]
    elif content.get("commands"):
        commands += [str(command) for command in content["commands"]]
    if not commands:
        raise SettingError("There is nothing to run: give --command, --command_file or --install_accelerate.")
    return commands


def command_lines(args: argparse.Namespace, content: dict[str, Any], folder: Path) -> list[list[str]]:
    """Return the gcloud commands, each as a list of arguments.

    The first one copies this package from ``folder``, if it shall be installed.
    """
    name, zone = args.tpu_name or content.get("tpu_name"), args.tpu_zone or content.get("tpu_zone")
    if not name or not zone:
        raise SettingError("Which TPU? Give --tpu_name and --tpu_zone, or a configuration that has them.")
    remote = "; ".join(["cd /usr/share", *_remote_commands(args, content)])
    head = [*(["gcloud", "alpha"] if args.use_alpha else ["gcloud"]), "compute", "tpus", "tpu-vm"]
    copy = [*head, "scp", str(folder / wheel_name()), f"{name}:{_REMOTE_FOLDER}/", "--zone", zone, "--worker", "all"]
    run = [*head, "ssh", name, "--zone", zone, "--command", remote, "--worker", "all"]
    return [copy, run] if args.install_accelerate else [run]


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """The commands have been run on every machine of the pod, or printed with ``--debug``."""
    path = Path(file.default_config_file() if args.config_file is None else args.config_file).expanduser()
    if args.config_file is not None and not path.is_file():
        raise FileNotFoundError(f"There is no configuration at {path}.")
    content = file.read(path) if path.is_file() else {}
    asked = args.accelerate_version
    if args.install_accelerate and asked not in ("latest", "dev", version()):
        print(
            f"--accelerate_version {asked} is no release of this package: {version()}, which runs here, is installed.",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory() as folder:
        lines = command_lines(args, dict(content), Path(folder))
        if args.debug:
            for words in lines:
                print(f"Running {shlex.join(words)}")
            return
        if shutil.which("gcloud") is None:
            raise MissingDependency("tpu-config needs the `gcloud` command of Google Cloud's SDK on the PATH.")
        if args.install_accelerate:
            build_wheel(Path(folder))
        for words in lines:
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
