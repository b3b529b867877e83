"""The page of ``accelerate monitor`` in a headless browser, of a run of two ranks while it goes on."""

from __future__ import annotations

import json
import math
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.browser import Page
from tests.monitor.many_ranks import write_large_run
from tests.monitor.programs import accelerate, end, monitor

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

BEGAN = 1.79e9  # of the runs that are made up for the list
HERE = Path(__file__).resolve().parent


def number_of(text: str) -> int:
    """`step 465 of 1,200` -> 465"""
    return int(text.split("step ")[1].split()[0].replace(",", ""))


def is_pointed_at(page: Page) -> bool:
    """Move the mouse over the first chart, and return whether its values are shown."""
    for right in (0.5, 0.6):
        page.point_at(".chart svg", right=right)
    return page.ask("document.querySelector('#tip').style.display === 'block'")


def width_and_height(picture: Path) -> tuple[int, int]:
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_a_live_run_of_two_ranks(page: Page, images: Path, tmp_path: Path) -> None:
    with monitor(tmp_path / "spirals") as (server, address):
        follow_a_live_run(page, address, images, tmp_path)
        end(server)
        page.wait("document.querySelector('#state').textContent === 'not connected'")
        assert "doesn't answer" in page.ask("document.querySelector('#banner').textContent")


def follow_a_live_run(page: Page, address: str, images: Path, tmp_path: Path) -> None:
    page.open(address)
    page.wait("!document.querySelector('#empty').hidden")
    assert "Nothing has been reported yet" in page.ask("document.body.innerText")
    assert page.ask("document.querySelector('#where').textContent") == "spirals"  # seen from where it was started

    shutil.copy(HERE / "live_run.py", tmp_path / "train.py")
    words = ("--cpu", "--num_processes", 2, "--main_process_port", 0, "--log_dir", "spirals/logs")
    training = accelerate("launch", *words, "train.py", "spirals", 150, cwd=tmp_path)
    try:
        # It appears by itself, and goes on by itself.
        facts = "document.querySelector('#facts').textContent"
        page.wait(f"{facts}.includes('step ')", 60)
        first = number_of(page.ask(facts))
        page.until(lambda: number_of(page.ask(facts)) > first + 50, "the page follows the run")
        assert page.ask("document.querySelector('#state').textContent") == "running"
        assert page.ask("document.querySelectorAll('tbody tr').length") == 2
        page.until(lambda: number_of(page.ask(facts)) > 400, "step 400", 120)

        titles = page.ask("[...document.querySelectorAll('.chart h2')].map(e => e.firstChild.textContent)")
        assert titles[:10] == [
            "Loss", "Step time", "accuracy", "Throughput", "Memory", "Learning rate", "Gradient norm", "Device busy",
            "Step time of each rank", "Waiting for data, each rank",
        ]  # fmt: skip
        accuracy = page.ask("document.querySelectorAll('#charts .chart')[2].querySelector('h2').textContent")
        assert " at step " in accuracy  # the last one that the script logged
        events = page.ask("document.querySelector('#events').innerText")
        for text in ("Started on 2 ranks", "Saved checkpoint_0", "Epoch 0 done", "more workers would hide it"):
            assert text in events
        assert page.ask("document.querySelectorAll('.chart svg path[d^=M]').length") >= 10
        assert "train.py spirals 150" in page.ask("document.querySelector('#settings').innerText")
        page.wait("document.querySelector('#output').innerText.includes(': accuracy ')")

        page.resize(1360, page.ask("document.documentElement.scrollHeight"))
        page.ask("document.documentElement.dataset.theme === 'light' || document.querySelector('#theme').click()")
        page.until(lambda: is_pointed_at(page), "the chart shows its values")
        assert "step" in page.ask("document.querySelector('#tip').innerText")
        page.picture(images / "monitor_light.png")
        page.point_at("h1")
        page.ask("document.querySelector('#theme').click()")
        assert page.ask("document.documentElement.dataset.theme") == "dark"
        page.resize(1360, 760)
        page.picture(images / "monitor_dark.png")
        page.resize(420, 900)
        time.sleep(0.5)
        page.wait("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out on a telephone
        page.picture(images / "monitor_narrow.png")
        page.resize(1360, 1000)
        page.wait("document.querySelector('#state').textContent === 'finished'", 150)
        assert training.wait(150) == 0
    finally:
        end(training)

    page.ask("document.querySelector('#theme').click()")
    saved_by_button(page, tmp_path)
    assert page.problems == []
    hosts = {request.split("/")[2] for request in page.requests if request.startswith("http")}
    assert hosts == {address.split("/")[2]}  # nothing is fetched from anywhere else


def ended_run(folder: Path, rate: float, ending: dict[str, Any], *, last: int = 600) -> None:
    """Write the files of a run on one rank, with three epochs, whose loss falls by its learning rate."""
    (folder / "monitor").mkdir(parents=True)
    start = {
        "time": BEGAN,
        "event": "start",
        "rank": 0,
        "ranks": 1,
        "device": "cpu",
        "command": f"train.py --lr {rate}",
    }
    lines: list[dict[str, Any]] = [start]
    for step in range(5, last + 1, 5):
        loss = 2.3 * math.exp(-rate * step) + 0.05 * math.sin(step) ** 2
        numbers = {"loss": loss, "learning_rate": rate * (1 - step / 700), "step_seconds": 0.1, "wait_seconds": 0.01}
        rates = {"samples_per_second": 320 + 9 * math.cos(step), "memory_bytes": 4 * 10**8, "accuracy": 1 - loss / 2.5}
        lines.append({"time": BEGAN + 0.11 * step, "step": step, "epoch": step // 201, **numbers, **rates})
        if step % 200 == 0:
            lines.append({"time": BEGAN + 0.11 * step, "event": "epoch", "epoch": step // 200 - 1, "step": step})
    lines += [{"time": BEGAN + 20, "event": "note", "text": "the loss is noisy", "step": 180}] * 3
    lines.append({"time": BEGAN + 0.11 * last + 1, "step": last, **ending})
    (folder / "monitor" / "rank_0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_runs_of_a_folder_are_listed_and_compared(page: Page, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    ended_run(runs / "slow", 2e-3, {"event": "end"})
    ended_run(runs / "fast", 8e-3, {"event": "preempted", "text": "SIGTERM", "folder": "checkpoint_3"}, last=500)
    ended_run(runs / "lost", 4e-2, {"event": "error", "text": "RuntimeError: CUDA error: device-side assert"}, last=200)
    with monitor(runs) as (_, address):
        page.open(f"{address}?theme=light")
        page.wait("document.querySelectorAll('#runs tbody tr').length === 3")
        listed = page.ask("document.querySelector('#runs').innerText")
        for text in ("slow", "finished", "preempted", "checkpoint_3", "failed", "device-side assert"):
            assert text in listed
        page.resize(1360, 420)
        page.picture(tmp_path / "images" / "list.png")
        page.resize(420, 700)
        page.wait("document.documentElement.scrollWidth <= innerWidth")
        page.picture(tmp_path / "images" / "list_narrow.png")
        page.resize(1360, 1000)
        page.ask("document.querySelectorAll('#runs input').forEach(box => box.click())")
        page.ask("document.querySelector('#compare').click()")
        page.wait("document.querySelectorAll('#differences th').length === 4")
        assert page.ask("document.querySelectorAll('#compared .chart').length") >= 5
        differences = page.ask("document.querySelector('#differences').innerText")
        assert "How it ended" in differences and "SIGTERM" in differences
        assert ["lr", "0.002", "0.008", "0.04"] in [line.split() for line in differences.splitlines()]
        page.picture(tmp_path / "images" / "compared.png", whole=True)

        page.open(f"{address}?theme=dark#run=slow")
        page.wait("document.querySelector('#banner') && document.querySelectorAll('#charts .chart').length > 4")
        assert page.ask("document.querySelector('#state').textContent") == "finished"
        assert page.ask("document.querySelector('#events').innerText").count("the loss is noisy") == 1
        assert "\u00d7 3" in page.ask("document.querySelector('#events').innerText")
        tiles = page.ask("document.querySelector('#tiles').innerText")
        assert "e-4" in tiles.split("Learning rate")[1].split()[0]
        choose = "(s => {{ s.value = {!r}; s.dispatchEvent(new Event('change')) }})(document.querySelector('#axis'))"
        for kind in ("time", "epoch", "step"):
            page.ask(choose.format(kind))
            labels = page.ask("document.querySelector('#charts .chart svg').textContent")
            assert kind in labels
        page.drag("#charts .chart svg", (0.4, 0.5), (0.6, 0.5))
        assert not page.ask("document.querySelector('#unzoom').hidden")
        page.picture(tmp_path / "images" / "zoomed.png", whole=True)
        page.ask("document.querySelector('#unzoom').click()")
        assert page.ask("document.querySelector('#unzoom').hidden")
        assert page.problems == []


def saved_by_button(page: Page, folder: Path) -> None:
    """The buttons hand over a picture and a page that holds its own numbers."""
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    for ending in ("png", "html"):
        page.ask(f"document.querySelector('#{ending}').click()")
        target = folder / f"spirals.{ending}"
        page.until(target.exists, f"{target} is saved")
    width, height = width_and_height(folder / "spirals.png")
    assert width > 1000 and height > 1000
    assert '"name": "spirals"' in (folder / "spirals.html").read_text().replace('"name":"', '"name": "')


def lines_of_a_lost_run(folder: Path, ranks: int) -> None:
    (folder / "monitor").mkdir(parents=True)
    for rank in range(ranks):
        lines: list[dict[str, Any]] = [{"time": 1e9, "event": "start", "rank": rank, "ranks": ranks, "device": "cpu"}]
        for step in range(10, 4000, 10):
            values = {"loss": 5 / step**0.4, "step_seconds": 0.1 + 0.001 * rank, "wait_seconds": 0.01 * (rank % 3)}
            lines.append({"time": 1e9 + step, "step": step, "memory_bytes": 2 * 10**9, **values})
        lines.append({"time": 1e9 + 4001, "step": 4000, "loss": "nan"})
        text = "the loss on rank 1 is not finite since step 3991"
        lines.append({"time": 1e9 + 4001, "event": "stop", "text": text, "step": 4000})
        (folder / "monitor" / f"rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_lost_run_of_many_ranks_as_a_file(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "</script><b>lost"
    lines_of_a_lost_run(folder, 12)
    target = tmp_path / "lost.html"
    program = accelerate("monitor", folder, "--export", target)
    assert program.wait(60) == 0
    end(program)
    page.open(target.as_uri())
    page.wait("document.querySelector('#state').textContent === 'stopped'")
    assert "not finite since step 3991" in page.ask("document.querySelector('#banner').textContent")
    assert page.ask("document.querySelector('h1').textContent") == "</script><b>lost".rpartition("/")[2]
    legends = page.ask("[...document.querySelectorAll('.legend')].map(e => e.innerText).join()")
    assert "middle" in legends and "rank 11" not in legends
    assert page.ask("document.querySelectorAll('tbody tr').length") == 12
    assert page.problems == [] and all(request.startswith("file:") for request in page.requests)


def test_a_run_of_many_ranks_shows_those_that_stand_out(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    write_large_run(folder, 300, slow=77, failed=123)
    target = tmp_path / "many.html"
    program = accelerate("monitor", folder, "--export", target)
    assert program.wait(60) == 0
    end(program)
    for width, theme in ((1280, "light"), (420, "light"), (420, "dark")):
        page.resize(width, 900)
        page.open(f"{target.as_uri()}?theme={theme}")
        page.wait("document.querySelector('#state').textContent === 'failed'")
        rows = page.ask("[...document.querySelectorAll('tbody tr')].map(row => row.innerText)")
        assert len(rows) < 20 and rows[0].startswith("77") and "+60% step time" in rows[0]
        assert any(row.startswith("123") and "failed" in row for row in rows)
        assert page.ask("document.querySelector('#states').textContent") == "299 silent  ·  1 failed"
        assert page.ask("document.querySelector('#spread').rows.length") == 4
        assert "300 \u00d7 cpu" in page.ask("document.querySelector('#facts').textContent")
        page.picture(tmp_path / "images" / f"many_{width}_{theme}.png", whole=True)
        assert page.ask("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out on a telephone
        inside = "[...document.querySelectorAll('table')].every(t => t.scrollWidth <= t.parentElement.clientWidth)"
        assert page.ask(inside), width
    assert page.problems == []


def test_long_names_and_lost_numbers_fit_a_telephone(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / ("a-name-that-somebody-made-of-all-settings-of-the-run-" * 2)
    lines_of_a_lost_run(folder, 1)
    long = "evaluation/accuracy_of_the_second_head_on_the_validation_set"
    (folder / "own.jsonl").write_text("".join(f'{{"step": {n}, "{long}": "nan"}}\n' for n in range(5)))
    target = tmp_path / "long.html"
    program = accelerate("monitor", folder, "--export", target)
    assert program.wait(60) == 0
    end(program)
    for width in (1360, 420):
        page.resize(width, 900)
        page.open(target.as_uri())
        page.wait("document.querySelector('#state').textContent === 'stopped'")
        assert page.ask("document.documentElement.scrollWidth <= innerWidth")
        outside = "[...document.querySelectorAll('h1, h2, td')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert page.ask(outside) == 0
        assert page.ask("(t => t.scrollWidth <= t.parentElement.clientWidth)(document.querySelector('table'))")
    assert "not one finite number" in page.ask("document.body.textContent")
    assert page.problems == []


def test_a_picture_is_made_by_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    lines_of_a_lost_run(folder, 2)
    for theme in ("light", "dark"):
        target = tmp_path / f"{theme}.png"
        program = accelerate("monitor", folder, "--export", target, "--theme", theme)
        assert program.wait(90) == 0
        end(program)
        width, height = width_and_height(target)
        assert width == 1440 and height > 1000
