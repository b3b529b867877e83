"""The tool that other tests stand on: forked ranks form a world of their own, and failures come back."""

from __future__ import annotations

import os

import pytest

from accelerate import Accelerator
from tests.fresh import run_fresh
from tests.ranks import RankFailed, run_on_ranks


def test_ranks_do_not_inherit_the_world_of_the_test() -> None:
    assert Accelerator(cpu=True).num_processes == 1
    assert run_on_ranks(lambda: Accelerator(cpu=True).num_processes) == [2, 2]


def test_a_rank_that_raises_fails_the_test_with_its_traceback() -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("only here")

    with pytest.raises(RankFailed, match=r"rank 1:(?s:.)*only here"):
        run_on_ranks(work)


def test_a_rank_that_dies_fails_the_test_with_its_exit_code() -> None:
    with pytest.raises(RankFailed, match="exit code 3"):
        run_on_ranks(lambda: os._exit(3), 1)


def test_a_rank_that_hangs_fails_the_test_in_time() -> None:
    import time

    with pytest.raises(RankFailed, match="no answer within"):
        run_on_ranks(lambda: time.sleep(60), 1, timeout_seconds=1)


def test_an_exit_handler_of_a_fresh_program_sees_what_ended_it() -> None:
    program = "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\nraise ValueError('bad')\n"
    done = run_fresh(program)
    assert (done.returncode, done.stdout) == (1, "ValueError('bad')\n")
