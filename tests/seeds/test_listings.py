"""Every code listing of the documents runs: under each launcher, in fp32 and in bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.seeds.tools import HERE, LISTINGS, launcher, run
from tests.slow import slow

row = pytest.mark.row

PLAIN = ["mlp", "blog_base", "blog_evaluation_base", "migrating_base"]
CONVERTED = [
    "mlp_accelerated", "blog_five_lines", "blog_simpler", "blog_evaluation", "migrated", "notes_init", "notes_gather",
]  # fmt: skip
HAND_WRITTEN = ["blog_ddp"]  # last: it ends the process group by hand


def test_every_listing_is_run() -> None:
    assert {path.stem for path in LISTINGS.glob("*.py")} == {*PLAIN, *CONVERTED, *HAND_WRITTEN}


def _run(name: str, listings: list[str], folder: Path, precision: str = "no") -> list[dict[str, Any]]:
    """What each rank wrote down."""
    words = launcher(name)
    extra = {"ACCELERATE_MIXED_PRECISION": precision}
    if name == "accelerate":
        words += ["--mixed_precision", precision]
        extra = {}
    finished = run([*words, HERE / "run_listings.py", folder, *listings], **extra)
    assert "leaked" not in finished.stderr and "destroy_process_group" not in finished.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]


@row("000-06", "000-21", "000-22", "001-13", "001-19", "001-60", "002-04", "002-08", "003-11", "004-09")
@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=slow)])
def test_listings_run_with_python(precision: str, tmp_path: Path) -> None:
    # Not converted, converted, and not converted again: nothing that the package does reaches the plain script.
    (results,) = _run("python", [*PLAIN, *CONVERTED], tmp_path, precision)
    for name in CONVERTED:
        assert results[name].get("num_processes", 1) == 1
    assert results["mlp"]["printed"].endswith("Training process has finished.\n")
    assert results["migrated"]["learning_rate"] == pytest.approx(0.1 * 0.9**6)
    if precision == "no":
        for plain, converted in (
            ("mlp", "mlp_accelerated"),
            ("blog_base", "blog_five_lines"),
            ("migrating_base", "migrated"),
        ):
            assert results[plain]["parameters"] == pytest.approx(results[converted]["parameters"], abs=1e-6)
            assert results[plain]["loss"] == pytest.approx(results[converted]["loss"], abs=1e-6)
    else:
        assert results["mlp"]["loss"] == pytest.approx(results["mlp_accelerated"]["loss"], abs=0.1)
        assert results["mlp_accelerated"]["mixed_precision"] == "bf16"
    assert results["mlp_accelerated"]["loss_dtype"] == "torch.float32"
    assert results["blog_five_lines"]["parameters"] == results["blog_simpler"]["parameters"]
    assert results["blog_evaluation"]["predictions"] == results["blog_evaluation_base"]["predictions"]


@row("000-01", "001-15", "001-17", "001-19", "001-49", "001-60", "002-01", "002-18", "003-01", "004-02", "004-15")
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("torchrun", "bf16"),
        *(
            pytest.param(name, precision, marks=slow)
            for name, precision in (
                ("accelerate", "no"),
                ("accelerate", "bf16"),
                ("torchrun", "no"),
                ("torch.distributed.launch", "no"),
                ("torch.distributed.launch", "bf16"),
            )
        ),
    ],
)
def test_listings_run_on_two_processes(name: str, precision: str, tmp_path: Path) -> None:
    first, second = _run(name, [*CONVERTED, *HAND_WRITTEN], tmp_path, precision)
    for listing in CONVERTED:
        if "num_processes" in first[listing]:
            assert first[listing]["num_processes"] == 2, listing
            assert first[listing]["mixed_precision"] == precision
        if "parameters" in first[listing]:
            assert first[listing]["parameters"] == second[listing]["parameters"], f"{listing}: the replicas differ"
    assert first["blog_ddp"]["parameters"] == second["blog_ddp"]["parameters"]
    # Three calls a rank, and each stands for two: 0.9 to the power of six.
    assert first["migrated"]["learning_rate"] == pytest.approx(0.1 * 0.9**6)
    for results in (first, second):
        assert results["blog_evaluation"]["predictions"] == list(map(float, range(11)))
        assert results["blog_evaluation"]["labels"] == list(map(float, range(11)))
        assert "Training process has finished." in results["mlp_accelerated"]["printed"]
