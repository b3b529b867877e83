"""Every block of code in the documentation and the README is executed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import accelerate.accelerator  # noqa: F401  (here, so that forked pages find it imported)
from tests.docs.pages import LIMIT_SECONDS, NOT_CODE, ROOT, RUN, blocks, num_ranks, pages, run_page
from tests.ranks import RankFailed, run_on_ranks
from tests.slow import mostly_slow, slow_for

pytestmark = pytest.mark.timeout(2 * LIMIT_SECONDS)
PAGES = {str(page.relative_to(ROOT)): page for page in pages()}
#: Their commands train several times. Each command has tests of its own.
LONG = {
    *("docs/guides/balance.md", "docs/guides/migrate.md", "docs/guides/reproduce.md", "docs/guides/several_gpus.md"),
    *("docs/guides/verify.md", "docs/reference/doctor_rules.md"),
}
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_here_or_on_ranks(page: Path, folder: Path) -> list[int]:
    """How many blocks each rank has run: in one process without a launcher's environment, or on as many as it says."""
    ranks = num_ranks(page)

    def run() -> int:
        if ranks == 1:
            for name in LAUNCHED:
                os.environ.pop(name, None)
        return run_page(page, str(folder))

    return run_on_ranks(run, ranks, timeout_seconds=LIMIT_SECONDS)


@pytest.mark.parametrize("name", mostly_slow(PAGES, set(PAGES) - LONG, slow_for("commands that train several times")))
def test_the_code_of_a_page_runs(name: str, tmp_path: Path) -> None:
    page = PAGES[name]
    expected = sum(block.language not in NOT_CODE for block in blocks(page))
    assert set(run_here_or_on_ranks(page, tmp_path)) == {expected}


def test_pages_that_take_long_exist() -> None:
    assert set(PAGES) >= LONG


def test_every_block_says_what_it_is_and_each_exception_has_a_reason() -> None:
    found = [block for page in PAGES.values() for block in blocks(page)]
    assert len(found) > 20
    unknown = [f"{block.place} {block.language!r}" for block in found if block.language not in (*RUN, *NOT_CODE)]
    assert not unknown, f"a block is one of {', '.join((*RUN, *NOT_CODE))}: {unknown}"
    idle = [block.place for block in found if block.reason is not None and len(block.reason) < 10]
    assert not idle, f"`<!-- not run: REASON -->` without a reason: {idle}"


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "raise ValueError('wrong')"),
        ("bash", "accelerate launch --no_such_flag script.py"),
        ("bash", "pip install nothing-at-all"),
        ("yaml", "no_such_key: 1"),
        ("json", "{"),
        ("diff", "+ if:"),
    ],
)
def test_a_block_that_is_wrong_is_found(
    language: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n```{language}\n{code}\n```\n")
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    with pytest.raises(RankFailed):
        run_here_or_on_ranks(page, tmp_path)
