"""``accelerate tpu-config``: run set-up commands on every machine of a TPU pod, with gcloud.

A shell on the pod's machines runs the commands, as intended. On this machine no shell is used.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from ...commands.parser import Subparsers, command_parser, configuration_path, run_command, spellings
from ...errors import MissingDependency, SettingError
from ...settings import file

#: Where the package is copied to on the pod's machines.
_REMOTE_FOLDER: Final = "/tmp"


def tpu_command_parser(subparsers: Subparsers | None = None) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate tpu-config``."""
    parser = command_parser(
        "tpu-config", "Run commands on every machine of a TPU pod before a training run.", subparsers
    )
    add = parser.add_argument
    add(*spellings("--config_file"), help="The configuration to take what isn't given from.")
    add(*spellings("--tpu_name"), help="The name of the TPU.")
    add(*spellings("--tpu_zone"), help="The zone of the TPU.")
    add(*spellings("--use_alpha"), action="store_true", help="Use `gcloud alpha`.")
    add(*spellings("--command_file"), help="A file of commands, one a line.")
    add("--command", action="append", nargs="+", help="A command (may be given several times).")
    add(*spellings("--install_accelerate"), action="store_true", help="Install this very package.")
    add(
        *spellings("--accelerate_version"),
        default="latest",
        help="Kept for old scripts: the version that runs here is installed.",
    )
    add("--debug", action="store_true", help="Print the command instead of running it.")
    parser.set_defaults(func=_set_up_pod)
    return parser


def _remote_commands(args: argparse.Namespace, content: Mapping[str, Any]) -> list[str]:
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
        commands += [parts[0] if len(parts) == 1 else shlex.join(parts) for parts in args.command]
    elif content.get("commands"):
        commands += [str(command) for command in content["commands"]]
    if not commands:
        raise SettingError("There is nothing to run: give --command, --command_file or --install_accelerate.")
    return commands


def command_lines(args: argparse.Namespace, content: Mapping[str, Any], folder: Path) -> list[list[str]]:
    """Return the gcloud commands, each as a list of arguments.

    The first one copies this package from ``folder``, if it has to be installed.
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
    """Run the commands on all machines of the pod, or print them with ``--debug``."""
    path = configuration_path(args.config_file, must_exist=args.config_file is not None)
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
            for argv in lines:
                print(f"Running {shlex.join(argv)}")
            return
        if shutil.which("gcloud") is None:
            raise MissingDependency("tpu-config needs the `gcloud` command of Google Cloud's SDK on the PATH.")
        if args.install_accelerate:
            build_wheel(Path(folder))
        for argv in lines:
            subprocess.run(argv, check=True)
    print("Successfully setup pod.")


def _set_up_pod(args: argparse.Namespace) -> int:
    """Run the commands on all machines, and return the exit code of gcloud if one fails."""
    try:
        tpu_command_launcher(args)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


# ------------------------------------------------------------------------ the wheel of this package

# Copied to the pod's machines, as pip would install another package of this name there.

_PACKAGE: Final = Path(__file__).resolve().parents[2]
_NEEDS: Final = ("torch>=2.6", "numpy", "packaging", "pyyaml", "safetensors")
_SCRIPTS: Final = (("accelerate", "main"), ("accelerate-launch", "launch"), ("accelerate-config", "config"))


def version() -> str:
    """Return the version of the running package."""
    return str(sys.modules[_PACKAGE.name].__version__)


def wheel_name() -> str:
    """Return the file name of the wheel."""
    return f"{_PACKAGE.name}-{version()}-py3-none-any.whl"


def build_wheel(folder: Path) -> Path:
    """Write the wheel into ``folder``, and return its path."""
    path = folder / wheel_name()
    records: list[str] = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:

        def add(name: str, content: bytes) -> None:
            wheel.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            records.append(f"{name},sha256={digest},{len(content)}")

        for file in sorted(_PACKAGE.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                add(file.relative_to(_PACKAGE.parent).as_posix(), file.read_bytes())
        information = "-".join(path.name.split("-")[:2]) + ".dist-info"
        add(f"{information}/METADATA", _metadata().encode())
        add(f"{information}/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        scripts = "".join(f"{name} = {_PACKAGE.name}.commands.{module}:main\n" for name, module in _SCRIPTS)
        add(f"{information}/entry_points.txt", f"[console_scripts]\n{scripts}".encode())
        wheel.writestr(f"{information}/RECORD", "\n".join([*records, f"{information}/RECORD,,", ""]))
    return path


def _metadata() -> str:
    """Return the metadata of the installed package, or minimal metadata if this package isn't the installed one."""
    try:
        found = metadata.distribution(_PACKAGE.name)
    except metadata.PackageNotFoundError:
        found = None
    text = found.read_text("METADATA") if found is not None and found.version == version() else None
    needs = "".join(f"Requires-Dist: {name}\n" for name in _NEEDS)
    head = f"Metadata-Version: 2.1\nName: {_PACKAGE.name}\nVersion: {version()}\nRequires-Python: >=3.10\n"
    return text or head + needs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``accelerate tpu-config`` and return its exit code."""
    return run_command(tpu_command_parser(), arguments)
