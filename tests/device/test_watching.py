"""A rank that doesn't come to a collective of the device is named, with its line, within the limit."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from tests.device.devices import on_devices
from tests.multi.test_hangs import THRESHOLD_SECONDS, Heard
from tests.ranks import RankFailed


def one_rank_sleeps(notes: str) -> None:
    import logging

    os.environ["ACCELERATE_HANG_SECONDS"] = str(THRESHOLD_SECONDS)
    run = Accelerator()
    model = run.prepare(torch.nn.Linear(2, 2))
    rows = torch.ones(1, 2, device=run.device)
    run.backward(model(rows).sum())
    logging.getLogger("accelerate.distributed.watchdog").addHandler(Heard(notes))
    loss = model(rows).sum()
    if run.process_index == 1:
        Path(notes + ".pid").write_text(str(os.getpid()))
        time.sleep(60)  # the culprit
    run.backward(loss)


def test_the_rank_that_stays_away_is_named(tmp_path: Path) -> None:
    notes = tmp_path / "verdict"
    with pytest.raises(RankFailed):
        on_devices(one_rank_sleeps, 2, str(notes))
    seconds, _, text = notes.read_text().partition("\n")
    assert float(seconds) < THRESHOLD_SECONDS + 10
    conclusion = text.partition("Verdict: ")[2]
    assert "the others wait for rank 1" in conclusion
    assert "# the culprit" in conclusion and "test_watching.py:" in conclusion
