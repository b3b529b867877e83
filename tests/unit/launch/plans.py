"""Shared by the tests of plans: settings from flags, two hosts, arguments that a shell would change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from accelerate.launch.plan import Program
from accelerate.launch.preflight import Host
from accelerate.settings.run import Settings, collect

CPU_HOST = Host(name="box", num_cores=8, free_port=40000)
GPU_HOST = replace(CPU_HOST, kind="cuda", num_devices=4, visible_devices="CUDA_VISIBLE_DEVICES")
PROGRAM = Program("train.py", ("--lr", "1"))
NASTY = ("a b", "$(touch pwned)", "`touch pwned`", "*", "it's", 'say "x"', "x;touch pwned", "$HOME", "a\\b", "<>|&", "")
NASTY_PROGRAM = Program("train.py", NASTY)

#: Any argument that an operating system accepts: no zero byte, and nothing that UTF-8 can't say.
argument_lists = st.lists(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
    | st.sampled_from([*NASTY, "%n", "~", "!!", "{a,b}", "#", "\n", "-x", "--y=$z", "$$", "$(RANK)", "'", "''"]),
    max_size=6,
)


def settings(environment: dict[str, str] | None = None, *, file: str | Path | None = None, **flags: Any) -> Settings:
    """The settings of a launch with these flags."""
    return collect({}, environment or {}, flags=flags, file=file)


def hosts_file(folder: Path, *lines: str) -> str:
    """The path of a file with these lines."""
    path = folder / "hosts file"
    path.write_text("\n".join([*lines, ""]))
    return str(path)
