"""The average of weights equals a plain loop's, whatever the ranks hold of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from tests.ranks import run_on_ranks
from tests.sharded_runs import BLOCKS, Network, plugin_of

DECAY = 0.9
SHARDED: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "fsdp1": {"fsdp_version": 1, "use_orig_params": True, **BLOCKS},
    "fsdp1_flat": {"fsdp_version": 1, "use_orig_params": False, **BLOCKS},
    "fsdp2": {"fsdp_version": 2, **BLOCKS},
}


def batches(count: int = 6) -> list[torch.Tensor]:
    return list(torch.randn(count, 8, 8, generator=torch.Generator().manual_seed(1)))


def start(options: dict[str, Any] | None, **given: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin_of(options), **given)
    torch.manual_seed(0)
    model = Network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer, accelerator.average_weights(model, DECAY)


def train(accelerator: Accelerator, model: Any, optimizer: Any, average: Any, inputs: list[torch.Tensor]) -> None:
    for batch in inputs:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            average.update()


def evaluated(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        outputs = model(batches()[0])
    model.train()
    return outputs


def averaged_run(options: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    accelerator, model, optimizer, average = start(options)
    train(accelerator, model, optimizer, average, batches()[:3])
    accelerator.save_state(f"{folder}/checkpoint")
    train(accelerator, model, optimizer, average, batches()[3:])
    before = evaluated(model)
    with average.applied():
        inside = evaluated(model)
    after = evaluated(model)
    with average.applied():
        pass
    whole = average.weights()
    train(accelerator, model, optimizer, average, batches()[:1])  # and training goes on
    accelerator.load_state(f"{folder}/checkpoint")
    assert average.num_updates == 3
    train(accelerator, model, optimizer, average, batches()[3:])
    again = average.weights()
    return {
        "outputs": inside.tolist(),
        "restored": bool(torch.equal(before, after)),
        "differs": not torch.equal(before, inside),
        "whole": {name: value.tolist() for name, value in whole.items()},
        "resumed": all(torch.equal(whole[name], again[name]) for name in whole),
    }


def plain() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for batch in batches():
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach(), 1 - DECAY)
    model.load_state_dict({**model.state_dict(), **average})
    return average, evaluated(model)


def test_one_process_averages_as_a_plain_loop_does(tmp_path: Path) -> None:
    result = averaged_run(None, str(tmp_path))
    expected, outputs = plain()
    assert result["whole"] == {name: value.tolist() for name, value in expected.items()}  # bit by bit
    assert result["outputs"] == outputs.tolist()
    assert result["restored"] and result["differs"] and result["resumed"]


@pytest.mark.parametrize("options", list(SHARDED.values()), ids=list(SHARDED))
def test_two_ranks_hold_the_same_average(options: dict[str, Any] | None, tmp_path: Path) -> None:
    expected, outputs = plain()
    for result in run_on_ranks(averaged_run, 2, options, str(tmp_path)):
        assert result["restored"] and result["differs"] and result["resumed"]
        assert list(result["whole"]) and set(result["whole"]) >= set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(result["whole"][name]), value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(result["outputs"]), outputs, rtol=1e-5, atol=1e-6)


def load_elsewhere(options: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    accelerator, _, _, average = start(options)
    accelerator.load_state(f"{folder}/checkpoint")
    return {name: value.tolist() for name, value in average.weights().items()}


def test_an_average_saved_in_shards_continues_on_one_process(tmp_path: Path) -> None:
    run_on_ranks(averaged_run, 2, {**SHARDED["fsdp2"], "state_dict_type": "FULL_STATE_DICT"}, str(tmp_path))  # type: ignore[dict-item]
    here = load_elsewhere(None, str(tmp_path))
    there = run_on_ranks(load_elsewhere, 2, SHARDED["fsdp2"], str(tmp_path))[0]
    assert set(here) <= set(there)
    for name, value in here.items():
        assert value == there[name]


def test_an_average_moves_once_an_update() -> None:
    accelerator, model, optimizer, average = start(None, gradient_accumulation_steps=3)
    train(accelerator, model, optimizer, average, batches())
    assert average.num_updates == 2


def test_half_precision_weights_are_averaged_in_single_precision() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2, dtype=torch.bfloat16))
    average = accelerator.average_weights(model, 0.5)
    before = model.weight.detach().float().clone()
    with torch.no_grad():
        model.weight.add_(1)
    average.update()
    expected = before.lerp(model.weight.detach().float(), 0.5)
    assert torch.equal(average.weights()["weight"], expected)


def test_what_cant_be_right_is_refused() -> None:
    accelerator, model, _, average = start(None)
    with average.applied():
        with pytest.raises(ValueError, match="entered twice"), average.applied():
            pass
        with pytest.raises(ValueError, match="has the averaged weights"):
            average.update()
    with pytest.raises(ValueError, match="between 0 and 1"):
        accelerator.average_weights(model, 1.5)
    with pytest.raises(ValueError, match="at least one"):
        accelerator.average_weights(model, every=0)


def test_a_young_average_follows_faster_when_it_warms_up() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    average = accelerator.average_weights(model, 0.999, warmup=True)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    average.update()
    torch.testing.assert_close(average.weights()["weight"], before + 1 - 2 / 11)
