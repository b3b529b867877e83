"""The record files of a run of many ranks, made up: one of them is slow, and one may have failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGIN = 1e9


def write_large_run(folder: Path, ranks: int, *, reports: int = 40, slow: int = 77, failed: int | None = None) -> None:
    """Write the files of a run of ``ranks`` ranks, each with as many reports."""
    (folder / "monitor").mkdir(parents=True)
    for rank in range(ranks):
        lines: list[dict[str, Any]] = [
            {
                "time": BEGIN,
                "event": "start",
                "pid": rank,
                "rank": rank,
                "ranks": ranks,
                "device": "cpu",
                "strategy": "DDP",
            }
        ]
        for report in range(1, reports + 1):
            numbers = {"loss": 5 / report, "step_seconds": 0.8 if rank == slow else 0.5, "wait_seconds": 0.01}
            step = {"time": BEGIN + 30 * report, "step": 60 * report, "epoch": 0, "memory_bytes": 60 * 10**9}
            lines.append({**step, **numbers, "learning_rate": 1e-4, "tokens_per_second": 4e6, "total_steps": 10_000})
            if report == reports // 2:
                lines.append(
                    {"time": BEGIN + 30 * report, "event": "save", "folder": "c/checkpoint_0", "step": 60 * report}
                )
        lines.append({"time": BEGIN + 30 * reports, "event": "warning", "text": "the link is slow"})
        if rank == failed:
            lines.append(
                {"time": BEGIN + 30 * reports + 1, "event": "error", "text": "RuntimeError: device-side assert"}
            )
        (folder / "monitor" / f"rank_{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
