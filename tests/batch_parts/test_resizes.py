"""A run that is killed and goes on on other numbers of ranks ends with the bits of one that wasn't."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpointing.series import inspect
from accelerate.utils import set_seed
from tests.batch_parts.training import MODELS, NUM_PARTS, data, layout_options, optimizer_of, state_of
from tests.ranks import RankFailed, run_on_ranks
from tests.slow import IS_SLOW, slow_for

NUM_UPDATES, SAVED_EACH = (1000, 20) if IS_SLOW else (24, 4)
NUM_STOPS = 10 if IS_SLOW else 3


def trains(folder: str, model: str, layout: str, killed_at: int) -> list[str]:
    """Train to the last update, from the newest checkpoint, and be killed at ``killed_at`` (0: not)."""
    accelerator = Accelerator(cpu=True, batch_parts=NUM_PARTS, **layout_options(layout))
    set_seed(3)
    net: Any = MODELS[model]()
    optimizer: Any = optimizer_of("adamw", net)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_UPDATES * NUM_PARTS)
    loader: Any = DataLoader(data(71, noisy=True), batch_size=2, shuffle=True)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    saved = sorted(int(path.name) for path in Path(folder).iterdir() if path.name.isdecimal())
    if saved:
        accelerator.load_state(f"{folder}/{saved[-1]}")
    while optimizer.num_updates < NUM_UPDATES:
        for rows, targets in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(rows), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            if optimizer.num_updates == killed_at and accelerator.is_last_process:
                os.kill(os.getpid(), signal.SIGKILL)
            if optimizer.num_updates % SAVED_EACH == 0:
                accelerator.save_state(f"{folder}/{optimizer.num_updates}")
            if optimizer.num_updates == NUM_UPDATES:
                break
    return [state_of(accelerator, net, optimizer), accelerator.fingerprint()]


@pytest.mark.timeout(3600 if IS_SLOW else 120)
@pytest.mark.parametrize("model", MODELS if IS_SLOW else ["Dense"])
@pytest.mark.parametrize("layout", ["replicas", pytest.param("fsdp2", marks=slow_for("kills of shards", "oracle"))])
def test_kills_and_other_numbers_of_ranks_change_no_bit(tmp_path: Path, model: str, layout: str) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    (expected,) = run_on_ranks(trains, 1, str(whole), model, "replicas", 0, timeout_seconds=900)
    draw = random.Random(f"{model} {layout}")
    sizes = (1, 2, 3, 4) if layout == "replicas" else (2, 3, 4)
    for killed_at in sorted(draw.sample(range(1, NUM_UPDATES), NUM_STOPS)):
        with pytest.raises(RankFailed, match=r"died|killed|SIGKILL"):
            run_on_ranks(trains, draw.choice(sizes), str(stopped), model, layout, killed_at, timeout_seconds=900)
    num_ranks = draw.choice(sizes)
    found = run_on_ranks(trains, num_ranks, str(stopped), model, layout, 0, timeout_seconds=900)
    assert found == [expected] * num_ranks
    # each checkpoint says what it holds, whoever saved it
    for folder in sorted(stopped.iterdir()):
        if (whole / folder.name).is_dir() and folder.name.isdecimal():
            fingerprints = [inspect(one).manifest.details["fingerprint"] for one in (folder, whole / folder.name)]
            assert fingerprints[0] == fingerprints[1], folder.name
