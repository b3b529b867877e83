from __future__ import annotations

import csv
import http.client
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from accelerate.commands.main import main
from accelerate.errors import MissingDependency, SettingError
from accelerate.guests.monitor import export
from accelerate.guests.monitor.export import page
from accelerate.guests.monitor.reading import Curve, RunFiles, note_of, write_note
from accelerate.guests.monitor.records import arguments_of
from accelerate.guests.monitor.runs import Runs
from accelerate.guests.monitor.serve import Server
from accelerate.guests.monitor.snapshot import MAX_POINTS, as_shown, snapshot, state_of
from accelerate.guests.monitor.terminal import colored, loss_line, screen

NOW = 1000.0


def write(folder: Path, rank: int, *lines: dict[str, Any], end: str = "\n") -> None:
    path = folder / "monitor" / f"rank_{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("\n".join(json.dumps({"time": NOW, **line}) for line in lines) + end)


def report(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, "step_seconds": 0.1, "memory_bytes": 10**9, **values}


START = {"event": "start", "device": "cpu", "ranks": 2}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks, ten reports each; rank 1 is slower, and a few things have happened."""
    folder = tmp_path / "night"
    for rank in (0, 1):
        write(folder, rank, START)
        write(
            folder,
            rank,
            *(report(step, step_seconds=0.1 + 0.02 * rank, wait_seconds=0.01) for step in range(1, 11)),
        )
        write(folder, rank, {"event": "save", "folder": "checkpoints/checkpoint_0", "step": 10, "seconds": 0.5})
    write(folder, 1, {"event": "warning", "text": "slow"})
    (folder / "night.jsonl").write_text('{"time": 1, "step": 5, "accuracy": 0.5, "loss": 9}\n{"config": {"a": 1}}\n')
    return folder


def seen(folder: Path) -> Any:
    files = RunFiles(folder)
    files.refresh()
    return snapshot(files, now=NOW)


def test_a_run_is_what_its_ranks_wrote(run: Path) -> None:
    found = seen(run)
    assert found["state"] == "running" and found["name"] == "night"
    assert found["curves"]["loss"]["steps"] == list(range(1, 11))
    assert [rank["step"] for rank in found["ranks"]] == [10, 10]
    assert found["skew"] == {"rank": 1, "share": pytest.approx(0.2)}
    assert found["own"] == {"accuracy": {"steps": [5], "values": [0.5], "bad": []}}
    assert list(found["per_rank"]["step_seconds"]["lines"]) == ["rank 0", "rank 1"]
    kinds = [(event["event"], event["ranks"]) for event in found["events"]]
    assert kinds == [("start", [0, 1]), ("save", [0, 1]), ("warning", [1])]
    json.dumps(found, allow_nan=False)


def test_a_folder_is_named_from_where_one_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: run.parent.parent)
    assert as_shown(run) == f"~/{run.parent.name}/night"
    monkeypatch.chdir(run.parent)
    assert as_shown(run) == "night" and as_shown(Path("/elsewhere")) == "/elsewhere"


def test_files_are_read_as_they_grow(run: Path) -> None:
    files = RunFiles(run)
    assert files.refresh() and not files.refresh()
    write(run, 0, report(11), end="")  # half a line: the newline is still to come
    assert not files.refresh()
    with (run / "monitor" / "rank_0.jsonl").open("a") as file:
        file.write("\n{torn\n[1]\n")
    assert files.refresh()
    assert files.ranks[0].curves["loss"].steps[-1] == 11


def test_a_run_that_goes_back_writes_over_what_it_did(run: Path) -> None:
    for rank in (0, 1):
        write(run, rank, START, {"event": "load", "folder": "c/checkpoint_0", "step": 6}, report(7, loss=5.0))
    found = seen(run)
    assert found["curves"]["loss"]["steps"] == [1, 2, 3, 4, 5, 6, 7]
    assert found["curves"]["loss"]["values"][-1] == 5.0
    restart = next(event for event in found["events"] if event["event"] == "restart")
    assert restart["attempt"] == 2 and restart["ranks"] == [0, 1]


@pytest.mark.parametrize(
    ("endings", "state"),
    [
        (("end", "end"), "finished"),
        (("end", None), "running"),
        (("error", None), "failed"),
        (("stop", "stop"), "stopped"),
    ],
)
def test_how_a_run_ended(run: Path, endings: tuple[str | None, ...], state: str) -> None:
    for rank, ending in enumerate(endings):
        if ending is not None:
            write(run, rank, {"event": ending, "text": "because"})
    assert seen(run)["state"] == state


def test_a_run_that_says_nothing_any_more_is_silent(run: Path) -> None:
    files = RunFiles(run)
    files.refresh()
    assert state_of(files, NOW + 59) == "running" and state_of(files, NOW + 61) == "silent"


def test_losses_that_are_no_numbers_are_marked(run: Path) -> None:
    write(run, 0, report(11, loss="nan"), report(12, loss="inf"), report(13))
    loss = seen(run)["curves"]["loss"]
    assert loss["bad"] == [11, 12] and loss["values"][10:12] == [None, None]


def test_a_long_curve_is_thinned_and_keeps_its_peaks(tmp_path: Path) -> None:
    write(tmp_path, 0, START, *(report(step, loss=9.0 if step == 777 else 1.0) for step in range(1, 5001)))
    loss = seen(tmp_path)["curves"]["loss"]
    assert len(loss["steps"]) <= MAX_POINTS and loss["steps"][-1] == 5000
    assert max(loss["high"]) == 9.0 and min(loss["low"]) == 1.0
    assert sum(loss["values"]) / len(loss["values"]) == pytest.approx(1.0, abs=0.01)


def test_many_ranks_are_summed_up(tmp_path: Path) -> None:
    for rank in range(20):
        write(tmp_path, rank, START, report(1, step_seconds=1.0 + rank))
    found = seen(tmp_path)["per_rank"]["step_seconds"]["lines"]
    assert {name: line["values"] for name, line in found.items()} == {
        "slowest or largest": [20.0],
        "middle": [10.5],
        "fastest or smallest": [1.0],
    }


def test_a_curve_knows_nothing_after_a_cut() -> None:
    curve = Curve([1, 2, 3], [1.0, 2.0, 3.0])
    curve.add(2, 5.0)
    assert (curve.steps, curve.values) == ([1, 2], [1.0, 5.0])


def test_logs_may_lie_in_a_folder_of_their_own(run: Path) -> None:
    run.rename(run.parent / "logs")
    assert len(seen(run.parent)["ranks"]) == 2
    assert len(seen(run.parent / "logs" / "monitor")["ranks"]) == 2


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    server = Server(Runs(run), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_server_gives_the_page_and_what_is_new(server: Server, run: Path) -> None:
    with urllib.request.urlopen(server.url) as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        text = answer.read().decode()
    assert text == page() and "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
    with urllib.request.urlopen(server.url + "data") as answer:
        found = json.load(answer)
    assert found["newest"]["step"] == 10
    with urllib.request.urlopen(f"{server.url}data?known={found['tag']}") as answer:
        assert answer.status == 204
    write(run, 0, report(11))
    with urllib.request.urlopen(f"{server.url}data?known={found['tag']}") as answer:
        assert json.load(answer)["newest"]["step"] == 11


def test_the_server_has_nothing_else_and_answers_nobody_else(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(server.url + "../../etc/passwd")
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
    connection.request("GET", "/data", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 403
    connection.close()


def test_an_exported_page_holds_its_numbers(run: Path, tmp_path: Path) -> None:
    write(run, 0, {"event": "note", "text": "</script><script>alert(1)</script>"})
    target = tmp_path / "out" / "run.html"
    assert main(["monitor", str(run), "--export", str(target)]) == 0
    text = target.read_text()
    assert "alert(1)" in text and "<script>alert" not in text and text.count("</script>") == page().count("</script>")
    assert main(["monitor", str(run), "--export", str(tmp_path / "run.json")]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["name"] == "night"


def test_what_cant_be_shown_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["monitor", str(tmp_path / "nowhere"), "--once"]) != 0
    assert "is not there" in capsys.readouterr().err
    with pytest.raises(SettingError, match=r"ends with \.html"):
        export.export(RunFiles(run), tmp_path / "run.pdf")
    monkeypatch.setattr(export, "find_browser", lambda: None)
    with pytest.raises(MissingDependency, match="press PNG"):
        export.export(RunFiles(run), tmp_path / "run.png")


def test_the_terminal_shows_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(run), "--once"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "night  SILENT  step 10",
        "loss 0.1",
        "100 ms a step, 10% waiting",
        "saved checkpoint_0",
        "▲",
        "rank 1",
    ):
        assert text in printed
    assert max(map(len, printed.splitlines())) <= 120
    assert [len(line) <= 40 for line in screen(seen(run), 40, 20)] == [True] * len(screen(seen(run), 40, 20))


def test_a_terminal_follows_the_run_to_its_end(run: Path) -> None:
    program = pexpect.spawn(
        sys.executable,
        ["-m", "accelerate.commands.main", "monitor", str(run), "--terminal"],
        encoding="utf-8",
        timeout=30,
        dimensions=(40, 100),
    )
    program.expect(r"\x1b\[33mSILENT\x1b\[0m  step 10\b")  # in color
    write(run, 0, report(11))
    program.expect(r"SILENT\S*  step 11\b")
    for rank in (0, 1):
        write(run, rank, {"event": "end"})
    program.expect("FINISHED")
    program.expect(pexpect.EOF)
    program.close()
    assert program.exitstatus == 0


def test_a_terminal_leaves_out_numbers_that_are_none(run: Path) -> None:
    write(run, 0, report(11, learning_rate="nan", eta_seconds="inf", step_seconds="inf", wait_seconds=0.01))
    shown = "\n".join(screen(seen(run), 120))
    assert "step 11" in shown and "lr" not in shown and "left" not in shown and "nan" not in shown


def test_a_narrow_terminal_cuts_no_number_and_reads_a_failure_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "a-run-whose-name-is-longer-than-the-terminal-is-wide"
    folder.mkdir()
    write(folder, 0, {"event": "start", "ranks": 1, "device": "cuda:0"})
    write(folder, 0, report(10))
    write(folder, 0, {"event": "error", "text": "RuntimeError: " + "out of memory " * 6 + "and nothing else"})
    lines = screen(seen(folder), 50)
    assert max(map(len, lines)) <= 50
    assert lines[0].endswith("…  FAILED")
    text = " ".join(line.strip() for line in lines)
    for words in ("step 10", "loss 0.1", "100 ms a step", "and nothing else"):
        assert words in text


def test_colors_are_left_out_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["night  RUNNING  step 1", "✗ 10:00:00  failed: it was RUNNING"]
    assert colored(lines) == [
        "night  \x1b[32mRUNNING\x1b[0m  step 1", "\x1b[31m✗\x1b[0m 10:00:00  failed: it was RUNNING"
    ]  # fmt: skip
    monkeypatch.setenv("NO_COLOR", "1")
    assert colored(lines) == lines


def test_an_empty_folder_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(tmp_path), "--once"]) == 0
    assert "accelerate launch --monitor" in capsys.readouterr().out


def test_a_page_may_be_opened_before_its_folder_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with pytest.raises(SettingError, match="not there"):
        Runs(folder)
    runs = Runs(folder, may_come=True)
    assert runs.is_one and seen_of(runs.find(""))["state"] == "empty"
    write(folder, 0, START, report(1))
    assert seen_of(runs.find(""))["state"] == "running"
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="not a folder"):
        Runs(tmp_path / "file", may_come=True)


def test_the_loss_is_shown_by_numbers_and_bars() -> None:
    text = loss_line([0, 50, 60, 100], [3.0, None, 1.0, 2.0], 100)
    assert text == "loss 3 at step 0, lowest 1 at step 60, 2 at step 100  █▁▅"
    assert len(loss_line([*range(1000)], [*map(float, range(1000))], 80)) == 80
    assert loss_line([1, 2], [0.5, 0.5], 80).endswith("▁▁")
    assert loss_line([1], [None], 40) == "loss: no finite number yet"


def test_a_folder_of_several_runs_lists_them_with_how_they_ended(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Runs(tmp_path).is_one and seen_of(Runs(tmp_path).find(""))["name"] == tmp_path.name
    write(tmp_path / "deep" / "er", 0, START, report(3), {"event": "error", "text": "ValueError: no"})
    listed = Runs(tmp_path).listed(now=NOW)
    assert not listed["is_one"] and listed["num_found"] == 2
    assert {(each["run"], each["state"], each["why"]) for each in listed["runs"]} == {
        ("night", "running", ""),
        ("deep/er", "failed", "failed: ValueError: no"),
    }
    runs = Runs(tmp_path)
    assert runs.find("") is None and runs.find("../night") is None
    assert seen_of(runs.find("deep/er"))["why"] == "failed: ValueError: no"
    assert main(["monitor", str(tmp_path), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "deep/er" in printed and "FAILED" in printed and "ValueError: no" in printed
    assert main(["monitor", str(tmp_path), "--export", str(tmp_path / "x.html")]) != 0
    assert "holds 2 runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("train.py", {}),
        ("train.py --lr 1e-3 --epochs=3 --amp", {"lr": 1e-3, "epochs": 3, "amp": True}),
        ("train.py data --weight-decay -0.5 -v", {"argument 1": "data", "weight_decay": -0.5, "v": True}),
        ("train.py model.width=64 a=b=c 7", {"model.width": 64, "a": "b=c", "argument 1": 7}),
        ("train.py --hf_token *** --url '://user:***@host'", {"hf_token": "***", "url": "://user:***@host"}),
        ("train.py 'torn by a mask", {}),
    ],
)
def test_the_arguments_of_a_command_are_settings(command: str, arguments: dict[str, object]) -> None:
    assert arguments_of(command) == arguments


def test_a_list_has_the_settings_that_differ_and_the_last_numbers(tmp_path: Path) -> None:
    for name, rate in (("a", 1), ("b", 2)):
        command = f"train.py --lr {rate} --epochs 3 --api_key ***"
        write(tmp_path / name, 0, {**START, "command": command}, report(1), report(2, loss="nan", accuracy=0.5))
        config = {"model": {"width": 8 * rate}, "depth": 4, "run_name": f"the {name}", "tags": ["t"], "notes": "n"}
        logged = [{"config": config}, {"step": 1, "eval_loss": 3.0}, {"step": 2, "eval_loss": 2.0}]
        (tmp_path / name / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
    write(tmp_path / "c", 0, START)
    runs = {run["run"]: run for run in Runs(tmp_path).listed(now=NOW)["runs"]}
    assert runs["b"]["settings"] == {"lr": 2, "epochs": 3, "api_key": "***", "model.width": 16, "depth": 4}
    assert runs["b"]["numbers"] == {
        "loss": "nan", "accuracy": 0.5, "step_seconds": 0.1, "memory_bytes": 10**9, "eval_loss": 2.0
    }  # fmt: skip
    assert (runs["a"]["name"], runs["a"]["tags"], runs["a"]["note"]) == ("the a", ["t"], "n")
    assert (runs["c"]["name"], runs["c"]["step"], runs["c"]["settings"], runs["c"]["numbers"]) == ("c", None, {}, {})
    json.dumps(runs, allow_nan=False)
    (tmp_path / "c" / "monitor" / "rank_0.jsonl").unlink()  # without it, the other settings are equal
    assert Runs(tmp_path).listed(now=NOW)["runs"][0]["settings"].keys() == {"lr", "model.width"}


@pytest.mark.parametrize("shape", ["run", "run/logs"])
def test_logs_and_notes_lie_beside_the_files_of_the_ranks(tmp_path: Path, shape: str) -> None:
    write(tmp_path / shape, 0, START, report(3))
    (tmp_path / shape / "log.jsonl").write_text('{"config": {"run_name": "given"}}\n{"step": 3, "accuracy": 0.5}\n')
    for seen_from in (shape, "run", f"{shape}/monitor"):
        found = seen(tmp_path / seen_from)
        assert found["name"] == "given" and found["own"]["accuracy"]["values"] == [0.5]
    files = RunFiles(tmp_path / "run")
    files.refresh()
    write_note(files, {"name": "", "tags": ["a", 1], "note": " why "})
    assert files.refresh()
    assert note_of(files) == {"name": "", "tags": ["a", "1"], "note": "why"}
    assert seen(tmp_path / "run")["name"] == "run"


def test_one_run_deep_below_the_folder_is_that_run(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    assert runs.is_one and seen_of(runs.find(""))["state"] == "empty"  # it waits
    write(tmp_path / "a" / "b", 0, START, report(3))
    assert seen_of(Runs(tmp_path).find(""))["newest"]["step"] == 3


def seen_of(run: RunFiles | None) -> Any:
    assert run is not None
    run.refresh()
    return snapshot(run, now=NOW)


def test_the_server_shows_several_runs(run: Path) -> None:
    write(run.parent / "other", 0, START, report(3))
    server = Server(Runs(run.parent), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with urllib.request.urlopen(server.url + "runs") as answer:
            assert {each["run"] for each in json.load(answer)["runs"]} == {"night", "other"}
        with urllib.request.urlopen(server.url + "data?run=other") as answer:
            assert json.load(answer)["newest"]["step"] == 3
        with urllib.request.urlopen(server.url + "csv?run=other") as answer:
            assert answer.read().decode().splitlines()[0].startswith("step,time,")
        for asked in ("data", "data?run=..%2Fother"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(server.url + asked)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/note?run=", '{"name": "best", "tags": ["a"]}', JSON, 204),
        ("/note?run=", '["best"]', JSON, 400),
        ("/note?run=", '{"name": ', JSON, 400),
        ("/note?run=other", "{}", JSON, 404),
        ("/note?run=", "{}", {"Content-Type": "text/plain"}, 403),  # what a foreign page can send unasked
        ("/note?run=", "{}", {**JSON, "Host": "evil.example"}, 403),
        ("/note?run=", "", {**JSON, "Content-Length": "70000"}, 403),
        ("/data?run=", "{}", JSON, 403),
    ],
)
def test_only_a_page_of_this_machine_writes_a_note(
    server: Server, run: Path, path: str, body: str, headers: dict[str, str], status: int
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request("POST", path, body, headers)
    assert connection.getresponse().status == status
    connection.close()
    with urllib.request.urlopen(server.url + "data") as answer:
        found = json.load(answer)
    assert (found["name"], found["tags"]) == (("best", ["a"]) if status == 204 else ("night", []))
    assert (run / "notes.jsonl").exists() == (status == 204)


def test_a_server_of_the_network_writes_no_notes(run: Path) -> None:
    server = Server(Runs(run), "0.0.0.0", 0)
    assert not server.is_private
    server.server_close()


def test_a_run_is_a_table_with_every_number(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "run.csv"
    assert main(["monitor", str(run), "--export", str(target)]) == 0
    rows = list(csv.DictReader(target.read_text().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, 11))
    assert [float(row["loss"]) for row in rows] == [1 / step for step in range(1, 11)]
    assert [row["accuracy"] for row in rows] == [""] * 4 + ["0.5"] + [""] * 5


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ({"event": "end"}, "finished"),
        ({"event": "error", "text": "OutOfMemoryError: 2 GiB"}, "failed: OutOfMemoryError: 2 GiB (rank 0)"),
        ({"event": "killed", "text": "killed by signal 9"}, "ended: killed by signal 9 (rank 0)"),
        ({"event": "preempted", "text": "SIGTERM", "folder": "c/checkpoint_1"}, "preempted by SIGTERM, after"),
        ({"event": "stop", "text": "the loss is lost"}, "stopped: the loss is lost"),
    ],
)
def test_why_a_run_ended_is_said(run: Path, ending: dict[str, Any], why: str) -> None:
    assert seen(run)["why"] == ""
    write(run, 0, ending)
    write(run, 1, {"event": "end"})
    assert seen(run)["why"].startswith(why)
    for rank in (0, 1):
        write(run, rank, START)  # a second attempt goes on
    assert seen(run)["why"] == ""


def test_repeated_notes_are_one(run: Path) -> None:
    for step in (3, 4, 5):
        write(run, 0, {"event": "note", "text": "again", "step": step})
    write(run, 1, {"event": "note", "text": "again", "step": 5})
    notes = [event for event in seen(run)["events"] if event["event"] == "note"]
    assert [(event["rank"], event["step"], event["times"]) for event in notes] == [(0, 5, 3), (1, 5, 1)]
    assert "again (3 times)  step 5  rank 0" in "\n".join(screen(seen(run), 120))


def test_the_settings_and_the_end_of_the_output_are_shown(run: Path) -> None:
    write(run, 0, {**START, "command": "train.py --lr 1"})
    (run / "night.jsonl").write_text('{"time": 1, "config": {"lr": 1.0, "model": {"width": 8}, "bad": NaN}}\n')
    log = run / "logs" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("first\n10%\r20%\nlast\n")
    found = seen(run)
    assert found["settings"] == {"device": "cpu", "ranks": 2, "command": "train.py --lr 1", "lr": 1.0,
                                 "model.width": 8, "bad": "nan"}  # fmt: skip
    assert found["output"] == {"file": "logs/0/stderr.log", "lines": ["first", "20%", "last"]}
    json.dumps(found, allow_nan=False)


def test_steps_have_their_times_and_epochs(run: Path) -> None:
    for step in (11, 12):
        write(run, 0, report(step, time=NOW + step, epoch=2))
    clock = seen(run)["clock"]
    assert clock["steps"] == list(range(1, 13)) and clock["times"][-2:] == [NOW + 11, NOW + 12]
    assert clock["epochs"][-3:] == [None, 2.0, 2.0]
    write(run, 0, {"event": "load", "step": 11})
    assert seen(run)["clock"]["steps"][-1] == 11


def test_the_hours_of_a_run_stand_in_its_document_and_its_text(run: Path) -> None:
    assert seen(run)["hours"] is None and "goodput" not in "\n".join(screen(seen(run), 120))
    ledger = run / "monitor" / "ledger"
    ledger.mkdir()
    line = {"began": NOW, "pid": 1, "updates": 10, "first_update": 0, "loads": 0, "phase": "step", "ended": None}
    (ledger / "1000.000_1.jsonl").write_text(
        json.dumps({**line, "elapsed": 20, "seconds": {"start_up": 5, "step": 15}}) + "\n"
    )
    found = seen(run)
    assert found["hours"]["goodput"] == 0.75 and found["hours"]["seconds"]["start_up"] == 5
    assert "goodput 75.0%" in "\n".join(screen(found, 120))
