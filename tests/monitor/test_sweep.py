"""The list of the 50 runs of a sweep in a headless browser: filter, sort, columns, notes, and the parallel axes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.monitor.browser import Page
from tests.monitor.programs import monitor
from tests.monitor.sweep import write_sweep

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

ROWS = "document.querySelectorAll('#runs tbody tr').length"
LINES = "document.querySelectorAll('#plot .line').length"
FILTER = "document.querySelector('#filter').value"
FOUND = "document.querySelector('#found').textContent"
TITLES = "[...document.querySelectorAll('#runs th button')].map(b => b.textContent)"
AXES = "[...document.querySelectorAll('.axis-title')].map(e => e.lastChild.textContent)"


def cells(page: Page, title: str) -> list[str]:
    """Return the texts of the column of this title, from the top."""
    column = page.ask(TITLES).index(title)
    return page.ask(f"[...document.querySelectorAll('#runs tbody tr')].map(tr => tr.cells[{column}].innerText)")


def numbers(page: Page, title: str) -> list[float]:
    """Return the finite numbers of the column of this title, from the top."""
    return [float(text.replace(",", "")) for text in cells(page, title) if text[0].isdigit()]


def click(page: Page, selector: str, which: str = "e => true") -> None:
    """Click the first element of the selector for which the JavaScript function ``which`` is true."""
    event = "new MouseEvent('click', { bubbles: true })"
    page.ask(f"[...document.querySelectorAll({json.dumps(selector)})].find({which}).dispatchEvent({event})")


def sort(page: Page, title: str) -> None:
    click(page, "#runs button", f"e => e.ariaLabel === 'sort by {title}'")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    write_sweep(folder, running=0)
    return folder


def test_runs_are_filtered_by_words_and_numbers(page: Page, sweep: Path) -> None:
    with monitor(sweep) as (_, address):
        page.open(address)
        page.wait(f"{ROWS} === 50")
        for text, title, is_right in (
            ("loss < 0.6", "Loss", lambda value: value < 0.6),
            ("eval_accuracy >= .7 and lr <= 1e-3", "eval_accuracy", lambda value: value >= 0.7),
            ("warmup_steps > 400", "warmup steps", lambda value: value > 400),
        ):
            page.fill("#filter", text)
            found = numbers(page, title)
            assert 0 < len(found) < 50 and all(map(is_right, found)), text
            assert page.ask(FOUND) == f"{page.ask(ROWS)} of 50"
        page.fill("#filter", "optimizer = adamw")
        assert set(cells(page, "optimizer")) == {"adamw"}
        page.fill("#filter", "outofmemory")
        assert set(cells(page, "State")) == {"failed"}
        page.fill("#filter", "run_07")
        assert page.ask(ROWS) == 1
        page.fill("#filter", "lss < 2")
        assert page.ask(ROWS) == 0 and "lss" in page.ask(FOUND)
        page.fill("#filter", "loss <")  # not yet complete
        assert page.ask(ROWS) == 50
        assert page.problems == []


def test_every_column_sorts_and_runs_without_its_number_stand_last(page: Page, sweep: Path) -> None:
    with monitor(sweep) as (_, address):
        page.open(address)
        page.wait(f"{ROWS} === 50")
        before, titles = cells(page, "Run"), page.ask(TITLES)
        assert {"lr", "width", "dropout", "optimizer", "Loss", "eval_accuracy", "eval_loss", "Last step"} <= {*titles}
        assert not {"output dir", "epochs", "amp"} & {*titles}  # a name of the run, and settings that are the same
        for title in ("Loss", "lr", "eval_accuracy", "Last step"):
            sort(page, title)
            found = numbers(page, title)
            assert found == sorted(found) and len(found) > 40
            if title == "Loss":
                assert cells(page, title)[-1] == "nan"
            sort(page, title)
            assert numbers(page, title) == found[::-1]
            if title == "Loss":
                assert cells(page, title)[-1] == "nan"
            sort(page, title)
            assert cells(page, "Run") == before
        for again in (False, True):
            page.ask("[...document.querySelectorAll('#columns label')].find(e => e.textContent === 'Loss').click()")
            assert ("Loss" in page.ask(TITLES)) == again
            page.open(f"{address}?again={again}")  # the choice is kept
            page.wait(f"{ROWS} === 50")
            assert ("Loss" in page.ask(TITLES)) == again
        assert page.problems == []


def test_a_sweep_is_limited_by_its_axes(page: Page, sweep: Path) -> None:
    with monitor(sweep) as (_, address):
        page.resize(1280, 900)
        page.open(address)
        page.wait(f"{LINES} === 50")
        axes = page.ask(AXES)
        assert axes[-1] == "eval_accuracy" and {"lr", "width", "dropout", "optimizer"} <= {*axes}
        result = f"#plot .bar:nth-of-type({2 * len(axes) - 1})"
        page.drag(result, (0.5, 0.3), (0.5, -0.1))  # the best results
        assert page.ask(FILTER).startswith("eval_accuracy >= ") and "<=" not in page.ask(FILTER)
        few = page.ask(LINES)
        assert 0 < few < 50 and page.ask(ROWS) == few
        assert page.ask("document.querySelectorAll('#plot .left-out').length") == 50 - few
        click(page, "#plot .choice", "e => e.textContent === 'adamw'")
        assert "optimizer = adamw" in page.ask(FILTER) and page.ask(LINES) < few
        page.drag(result, (0.5, 0.5), (0.5, 0.5))  # a click takes its limit away
        assert page.ask(FILTER) == "optimizer = adamw"
        choose = "s => { s.value = 'number eval_loss'; s.dispatchEvent(new Event('change')) }"
        page.ask(f"({choose})(document.querySelector('#measure'))")
        assert page.ask(AXES)[-1] == "eval_loss"
        click(page, "#plot .line")
        page.wait("!document.querySelector('#single').hidden && document.querySelectorAll('#charts .chart').length > 4")
        titles = page.ask("[...document.querySelectorAll('.chart h2')].map(e => e.textContent)")
        assert any(title.startswith("eval_accuracy") and title.endswith(" at step 1,200") for title in titles)
        assert page.problems == []


def test_a_run_is_named_and_tagged_on_the_page(page: Page, sweep: Path) -> None:
    with monitor(sweep) as (_, address):
        page.open(address)
        page.wait(f"{ROWS} === 50")
        click(page, "#runs .pen", "e => e.ariaLabel.endsWith(' run_03')")
        for field, text in (("name", "baseline"), ("tags", "keep, paper"), ("note", "for table 2")):
            page.fill(f"#noting [name={field}]", text)
        click(page, "#noting [type=submit]")
        page.wait("[...document.querySelectorAll('#runs a')].some(a => a.textContent === 'baseline')")
        written = json.loads((sweep / "run_03" / "notes.jsonl").read_text())
        assert written["note"] == {"name": "baseline", "tags": ["keep", "paper"], "note": "for table 2"}
        page.fill("#filter", "paper")
        assert page.ask(ROWS) == 1 and cells(page, "Note") == ["for table 2"]
        page.open(f"{address}#run=run_03")
        page.wait("document.querySelector('h1').textContent === 'baseline'")
        assert page.ask("[...document.querySelector('#note').childNodes].map(e => e.textContent)") == [
            "keep", "paper", "for table 2",
        ]  # fmt: skip
        assert page.problems == []


def test_charts_zoom_move_and_show_values(page: Page, sweep: Path) -> None:
    chart = "#charts .chart svg"
    with monitor(sweep) as (_, address):
        page.open(f"{address}#run=run_01")
        page.wait("document.querySelectorAll('#charts .chart').length > 4")
        page.point_at(chart, right=0.5)
        page.wait("document.querySelector('#tip').style.display === 'block'")
        tip = page.ask("document.querySelector('#tip').innerText")
        assert tip.startswith("step ") and "smoothed" in tip
        page.drag(chart, (0.5, 0.5), (1.4, 0.5))  # beyond the edge
        assert page.ask("zoom[1]") == 1200 and 500 < page.ask("zoom[0]") < 700
        page.drag(chart, (0.3, 0.5), (0.7, 0.5), shift=True)
        first, last = page.ask("zoom")
        assert 200 < first < 400 and 800 < last < 1000
        page.ask(f"document.querySelector('{chart}').dispatchEvent(new Event('dblclick'))")
        assert page.ask("zoom") is None and page.ask("document.querySelector('#unzoom').hidden")
        assert page.problems == []


def test_the_list_fits_its_window(page: Page, images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    write_sweep(folder)
    top = "document.querySelector('#runs th').getBoundingClientRect().top"
    with monitor(folder) as (_, address):
        for width, theme in ((1280, "light"), (1280, "dark"), (420, "light"), (420, "dark")):
            page.resize(width, 860)
            page.open(f"{address}?theme={theme}")
            page.wait(f"{LINES} === 50")
            sort(page, "eval_accuracy")
            sort(page, "eval_accuracy")
            page.wait("document.documentElement.scrollWidth <= innerWidth")
            at = page.ask(top)
            page.ask("document.querySelector('#chooser .scroll').scrollTop = 400")
            assert page.ask(top) == at  # the header stays in sight while the rows move
            page.ask("document.querySelector('#chooser .scroll').scrollTop = 0")
            is_in_docs = (width, theme) == (1280, "light")
            page.picture(
                images / "monitor_list.png" if is_in_docs else tmp_path / "images" / f"list_{width}_{theme}.png"
            )
        assert page.problems == []
