"""lm-evaluation-harness's command on a tiny GPT-2 and a local task."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm_eval.__main__ import cli_evaluate
from report import ASSETS, OUTPUT, report

folder = Path(OUTPUT, "harness")
sys.argv = [
    "lm_eval", "--model", "hf", "--model_args", f"pretrained={ASSETS}/gpt2,dtype=float32", "--tasks", "cats",
    "--include_path", f"{ASSETS}/task", "--batch_size", "4", "--device", "cpu", "--output_path", str(folder),
    "--log_samples",
]  # fmt: skip
cli_evaluate()
results = sorted(folder.rglob("results_*.json"))
samples = sorted(folder.rglob("samples_cats_*.jsonl"))
if results:
    rows = [json.loads(line) for line in samples[-1].read_text().splitlines()]
    report(
        accuracy=json.loads(results[-1].read_text())["results"]["cats"]["acc,none"],
        samples=len(rows),
        likelihood=sum(float(answer[0]) for row in rows for answer in row["filtered_resps"]),
    )
