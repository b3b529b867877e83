"""DeepSpeed's launcher, which reaches two names of this machine through pdsh and an sshd of the test's own."""

from __future__ import annotations

import getpass
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import NASTY, Launch, needs, python_of

SERVER = """\
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""
CLIENT = """\
Host node1 node2
  HostName 127.0.0.1
  Port {port}
  User {user}
  IdentityFile {folder}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
# The engine itself with a program that knows nothing of this package: words and variables of each rank, to files.
START = """\
import sys
from accelerate.guests.deepspeed.launcher import DeepSpeedLauncher
from accelerate.launch.preflight import this_host
from accelerate.launch.plan import Program
from accelerate.settings import env
from accelerate.settings.run import collect

flags = {"use_deepspeed": True, "num_machines": 2, "num_processes": 2, "deepspeed_hostfile": "hosts",
         "main_process_ip": "127.0.0.1", "main_process_port": int(sys.argv[1])}
host = this_host(env.snapshot(), cpu=True, port=None)
plan = DeepSpeedLauncher().plan(collect({}, env.snapshot(), flags=flags), Program("tell.py", tuple(sys.argv[2:])), host)
sys.exit(DeepSpeedLauncher().run(plan))
"""
TELL = """\
import json, os, sys
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "WANDB_NOTES", "HF_TOKEN", "ACCELERATE_USE_DEEPSPEED")
found = {"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def nodes(launch: Launch, children: Callable[..., Any]) -> Launch:
    """A launcher that reaches node1 and node2 by ssh."""
    needs("pdsh", "sshd", "ssh", "ssh-keygen")
    launch.python = python_of("deepspeed")
    folder, port = launch.folder / "ssh", free_port()
    folder.mkdir()
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "server").write_text(SERVER.format(port=port, folder=folder))
    (folder / "client").write_text(CLIENT.format(port=port, folder=folder, user=getpass.getuser()))
    Path("/run/sshd").mkdir(exist_ok=True)
    sshd = shutil.which("sshd")
    assert sshd is not None
    children(sshd, "-D", "-e", "-f", str(folder / "server"), stderr=subprocess.DEVNULL)
    tools = launch.folder / "tools"
    tools.mkdir()
    # pdsh and DeepSpeed call plain `ssh NAME`.
    (tools / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
    (tools / "ssh").chmod(0o755)
    path = f"{tools}:{Path(launch.python).parent}:{launch.environment()['PATH']}"
    launch.variables |= {"PATH": path, "DS_ACCELERATOR": "cpu", "HF_TOKEN": "secret", "WANDB_NOTES": "$(touch pwned)"}
    (launch.folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    deadline = time.monotonic() + 20
    while subprocess.run([tools / "ssh", "node2", "true"], capture_output=True).returncode != 0:
        assert time.monotonic() < deadline, "sshd doesn't answer"
        time.sleep(0.2)
    return launch


def test_both_hosts_get_words_and_settings_and_no_secret(nodes: Launch) -> None:
    (nodes.folder / "start.py").write_text(START)
    (nodes.folder / "tell.py").write_text(TELL)
    words = [nodes.python, "start.py", str(free_port()), *NASTY]
    done = subprocess.run(words, cwd=nodes.folder, env=nodes.environment(), text=True, capture_output=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((nodes.folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [(line["RANK"], line["WORLD_SIZE"], line["LOCAL_RANK"]) for line in found] == [
        ("0", "2", "0"),
        ("1", "2", "0"),
    ]
    assert all(line["arguments"] == list(NASTY) and line["ACCELERATE_USE_DEEPSPEED"] == "true" for line in found)
    assert all(line["WANDB_NOTES"] == "$(touch pwned)" and line["HF_TOKEN"] is None for line in found)
    assert not (nodes.folder / "pwned").exists() and not (nodes.folder / ".deepspeed_env").exists()


def test_the_check_of_the_machines_runs_through_it(nodes: Launch) -> None:
    where = ("--num_machines", "2", "--num_processes", "2", "--deepspeed_hostfile", "hosts")
    rendezvous = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()))
    code, output = nodes("--use_deepspeed", *where, *rendezvous, "--preflight", timeout=200)
    assert code == 0 and "rendezvous (world size 2)" in output, output
