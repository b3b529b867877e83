"""Launch on TPUs: one host with torch_xla, or all hosts of a pod with gcloud, which runs this launcher on each.

``python -m accelerate.guests.xla.launcher --function NAME --num_processes N script.py ...`` calls a script's function
on each device.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from ...errors import LaunchError, MissingDependency, SettingError
from ...launch.engine import LaunchEngine, base_environment
from ...launch.plan import LaunchPlan, Program
from ...launch.remote import run_command
from ...optional import is_installed

if TYPE_CHECKING:
    from ...launch.preflight import Host
    from ...settings.tree import Settings

_LAUNCHER: Final = "accelerate.commands.launch"


@final
class Tpu(LaunchEngine):
    """The TPU devices of this host, or of a pod."""

    name = "tpu"

    def suits(self, settings: Settings, host: Host) -> bool:
        """Return whether TPUs were selected."""
        return settings.launch.use_tpu or settings.launch.distributed_type in ("TPU", "XLA")

    def plan(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan the command that starts this host's processes, or gcloud's for all hosts of a pod."""
        if program.kind == "command":
            raise SettingError("TPU processes call a function of the script, so that --no_python can't be honoured.")
        if settings.tpu.tpu_use_cluster and not settings.tpu.in_tpu_pod:
            return self._for_pod(settings, program, host)
        environment = base_environment(settings, host, max(1, settings.launch.num_processes or 1))
        how_many = settings.launch.num_processes
        flags = ["--function", settings.launch.main_training_function]
        flags += ["--num_processes", str(how_many)] if how_many is not None else []
        flags += ["--module"] if program.kind == "module" else []
        return LaunchPlan(
            engine=f"{self.name}: {how_many or 'all'} device(s) of this host, a process each",
            argv=(sys.executable, "-m", "accelerate.guests.xla.launcher", *flags, program.target, *program.arguments),
            environment=environment,
            rendezvous="torch_xla",
        )

    def run(self, plan: LaunchPlan) -> int:
        """Run the command and return its exit code.

        Raises:
            MissingDependency: torch_xla isn't installed on this host, so no process was started.
        """
        if plan.rendezvous == "torch_xla" and not is_installed("torch_xla"):
            raise MissingDependency(
                "A run on TPUs (--tpu, or distributed_type: XLA in the configuration file) needs 'torch_xla', but it "
                'isn\'t installed. Install it with: pip install "torch_xla"'
            )
        return run_command(plan, "it is part of Google Cloud's SDK")

    def _for_pod(self, settings: Settings, program: Program, host: Host) -> LaunchPlan:
        """Plan gcloud's command line, with each argument quoted for the remote shell."""
        tpu, launch = settings.tpu, settings.launch
        if tpu.tpu_name is None or tpu.tpu_zone is None:
            raise SettingError(
                f"{settings.quote('tpu.tpu_use_cluster')} needs `tpu_name` and `tpu_zone`: set them in the "
                "configuration file."
            )
        environment = {**base_environment(settings, host, 1), "ACCELERATE_IN_TPU_POD": "1"}
        environment.pop("OMP_NUM_THREADS", None)  # this machine's
        environment.update((name, value) for name, _, value in (pair.partition("=") for pair in tpu.tpu_env or ()))
        remote = ["sudo"] if tpu.tpu_use_sudo else []
        remote += ["env", *(f"{name}={value}" for name, value in sorted(environment.items()))]
        remote += ["python3", "-m", _LAUNCHER, "--tpu", "--no_tpu_cluster"]
        remote += ["--main_training_function", launch.main_training_function]
        remote += ["--mixed_precision", settings.run.mixed_precision]
        remote += ["--num_processes", str(launch.num_processes)] if launch.num_processes is not None else []
        remote += ["--module"] if program.kind == "module" else []
        remote += [program.target, *program.arguments]
        machines = ",".join(tpu.tpu_vm) if tpu.tpu_vm else "all"
        where = ("--zone", tpu.tpu_zone, "--worker", machines)
        return LaunchPlan(
            engine=f"{self.name}: machines {machines} of the pod {tpu.tpu_name}",
            argv=("gcloud", "compute", "tpus", "tpu-vm", "ssh", tpu.tpu_name, *where, "--command", shlex.join(remote)),
            environment=environment,
            rendezvous="torch_xla",
        )


def call(index: int, target: str, is_module: bool, function: str, arguments: Sequence[str]) -> None:
    """Import the script and call its function, in a process started by torch_xla."""
    sys.argv = [target, *arguments]
    loaded = _load(target, is_module)
    found = getattr(loaded, function, None)
    if not callable(found):
        raise LaunchError(
            f"{target} has no function {function}(), which each TPU process calls. Define it, or name another with "
            "--main_training_function."
        )
    found()


def _load(target: str, is_module: bool) -> Any:
    import importlib.util

    if is_module:
        return importlib.import_module(target)
    path = Path(target)
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise LaunchError(f"{target} can't be imported; a TPU run needs a .py file with a function to call.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that fits this torch; only in a Colab notebook.

    Args:
        upgrade: also install it if another torch_xla is installed.

    Raises:
        LaunchError: this isn't Colab, or pip failed.
    """
    import importlib.metadata
    import importlib.util
    import subprocess

    if "google.colab" not in sys.modules:
        raise LaunchError(
            "`install_xla` works in Google Colab only. Elsewhere: pip install 'torch_xla[tpu]', as new as torch."
        )
    if importlib.util.find_spec("torch_xla") is not None and not upgrade:
        return
    release = ".".join(importlib.metadata.version("torch").split("+")[0].split(".")[:2])
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--upgrade", f"torch_xla[tpu]=={release}.*"], check=False
    )
    if done.returncode != 0:
        raise LaunchError(f"pip could not install torch_xla {release}; its output says why.")


def main(argv: Sequence[str] | None = None) -> None:
    """Call the script's function in one process per device of this host."""
    import argparse

    from ...optional import require

    parser = argparse.ArgumentParser(prog="python -m accelerate.guests.xla.launcher", allow_abbrev=False)
    parser.add_argument("--function", default="main")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("target")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    spawn = require("torch_xla.distributed.xla_multiprocessing", purpose="A run on TPUs").spawn
    # PJRT, which all supported versions use, starts either one process or one for each device.
    nprocs = 1 if args.num_processes == 1 else None
    spawn(call, args=(args.target, args.module, args.function, args.arguments), nprocs=nprocs)


if __name__ == "__main__":
    main()
