"""mpirun of Open MPI, two ranks on this host."""

from __future__ import annotations

from tests.engines.conftest import NASTY, Launch, needs

ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def hosts(launch: Launch) -> str:
    (launch.folder / "hosts").write_text("localhost slots=2\n")
    launch.variables |= ROOT_MAY
    return "hosts"


def test_two_ranks_meet_and_get_their_words_and_settings(launch: Launch) -> None:
    needs("mpirun")
    given = ("--cpu", "--num_processes", "2", "--mpirun_hostfile", hosts(launch), "--mixed_precision", "bf16")
    code, output = launch(*given, "who.py", "--out", ".", *NASTY)
    assert code == 0, output
    lines = launch.lines()
    assert [(line["rank"], line["size"], line["sum"]) for line in lines] == [(0, 2, 3.0), (1, 2, 3.0)]
    assert all(line["arguments"] == list(NASTY) and line["precision"] == "bf16" for line in lines)
    assert not (launch.folder / "pwned").exists()


def test_a_rank_that_dies_ends_the_run_with_a_code(launch: Launch) -> None:
    needs("mpirun")
    given = ("--cpu", "--num_processes", "2", "--mpirun_hostfile", hosts(launch))
    code, output = launch(*given, "who.py", "--fail_rank", "1")
    assert code != 0, output


def test_preflight_says_who_is_where(launch: Launch) -> None:
    needs("mpirun")
    code, output = launch("--cpu", "--num_processes", "2", "--mpirun_hostfile", hosts(launch), "--preflight")
    assert code == 0, output
    assert "rendezvous (world size 2)" in output and "GB/s" in output and "no contradictions" in output
