"""FSDP1 on real ranks: the run of one process, with flat parameters."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from tests.ranks import RankFailed, run_on_ranks
from tests.sharded_runs import BLOCKS, Network, assert_same_run, plugin_of, samples, train
from tests.slow import mostly_slow, slow_for

slow = slow_for("many layouts", "meshes")

FLAT: dict[str, Any] = {"fsdp_version": 1, **BLOCKS}
APART: dict[str, Any] = {**FLAT, "use_orig_params": True}

VARIANTS: dict[str, dict[str, Any]] = {
    "whole model one unit": {"fsdp_version": 1},
    "blocks": FLAT,
    "original parameters": APART,
    "sent from rank 0": {**FLAT, "sync_module_states": True},
    "recomputed": {**APART, "activation_checkpointing": True},
    "offloaded": {**FLAT, "cpu_offload": True},
    "ignored modules": {**APART, "ignored_modules": "layers.1.up"},
    "gradients only": {**FLAT, "reshard_after_forward": "SHARD_GRAD_OP"},
    "not sharded": {**APART, "reshard_after_forward": "NO_SHARD"},
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The run of one process."""
    return run_on_ranks(train, 1)[0]


#: Of flat and of original parameters.
QUICK = ("blocks", "sent from rank 0", "recomputed", "offloaded", "ignored modules")


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, QUICK, slow))
def test_losses_norms_and_weights_are_those_of_one_process(name: str, alone: dict[str, Any]) -> None:
    """Whatever the variant."""
    ranks = run_on_ranks(train, 2, VARIANTS[name])
    assert_same_run(ranks[0], alone)
    assert ranks[1]["weights"] == {}


def test_shards_are_replicated_over_hosts(alone: dict[str, Any]) -> None:
    """Two hosts of two ranks."""

    def hybrid() -> dict[str, Any]:
        os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(int(os.environ["RANK"]) % 2))
        return train({**FLAT, "reshard_after_forward": "HYBRID_SHARD"})

    assert_same_run(run_on_ranks(hybrid, 4)[0], alone)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=slow), "fp16"])
def test_mixed_precision_follows_one_process(precision: str) -> None:
    """With the master weights in float32."""
    reference = run_on_ranks(lambda: train(precision=precision), 1)[0]
    assert_same_run(run_on_ranks(lambda: train(FLAT, precision=precision), 2)[0], reference, tolerance=1e-2)


def test_weighted_losses_give_the_true_mean() -> None:
    """Also for the flat parameter of the root."""
    reference = run_on_ranks(lambda: train(weighted=True), 1)[0]
    sharded = run_on_ranks(lambda: train(FLAT, weighted=True), 2)[0]
    torch.testing.assert_close(torch.tensor(sharded["norms"]), torch.tensor(reference["norms"]), rtol=1e-5, atol=1e-5)


def test_groups_that_share_a_flat_parameter_are_refused() -> None:
    """With the way out."""

    def go() -> None:
        run = Accelerator(cpu=True, fsdp_plugin=plugin_of(FLAT))
        model = Network()
        groups = [{"params": [p]} for p in model.parameters()]
        run.prepare(model, torch.optim.SGD(groups, lr=0.1))

    with pytest.raises(RankFailed, match="use_orig_params=True"):
        run_on_ranks(go, 2)


def begin(options: dict[str, Any] | None) -> tuple[Accelerator, Any, Any]:
    """A run that can be saved, with tied weights."""
    run = Accelerator(cpu=True, fsdp_plugin=plugin_of(options))
    torch.manual_seed(0)
    model = Network(tied=True)
    return run, *run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def steps(run: Accelerator, model: Any, optimizer: Any) -> list[float]:
    """Norms of some updates on the same samples."""
    norms: list[float] = []
    for _ in range(3):
        run.backward(model(samples(8).tensors[0]).square().mean())
        norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def save(options: dict[str, Any] | None, folder: str) -> list[float]:
    """The norms of the updates after saving."""
    run, model, optimizer = begin(options)
    steps(run, model, optimizer)
    run.save_state(folder)
    return steps(run, model, optimizer)


def resume(options: dict[str, Any] | None, folder: str) -> list[float]:
    """The norms of the updates after loading."""
    run, model, optimizer = begin(options)
    run.load_state(folder)
    return steps(run, model, optimizer)


FORMS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "flat, whole": (FLAT, 2),
    "flat, shards": ({**FLAT, "state_dict_type": "SHARDED_STATE_DICT"}, 2),
    "apart, shards": ({**APART, "state_dict_type": "SHARDED_STATE_DICT"}, 2),
    "fsdp2": ({**FLAT, "fsdp_version": 2}, 2),
    "one process": (None, 1),
}


READERS: dict[str, tuple[dict[str, Any] | None, int]] = {
    "flat on four": (FLAT, 4),
    "apart": (APART, 2),
    "fsdp2": FORMS["fsdp2"],
    "one process": (None, 1),
}


@pytest.mark.parametrize("form", mostly_slow(FORMS, ["flat, whole"], slow))
def test_a_checkpoint_loads_under_every_strategy_and_rank_count(form: str, tmp_path: Path) -> None:
    """The updates after it are the same ones."""
    options, num_ranks = FORMS[form]
    folder = str(tmp_path / "saved")
    expected = run_on_ranks(save, num_ranks, options, folder)[0]
    for name, (other, count) in READERS.items():
        found = run_on_ranks(resume, count, other, folder)[0]
        assert found == pytest.approx(expected, rel=1e-4), name


def test_the_deprecated_name_of_the_choice_still_works() -> None:
    """With one warning, from the plugin."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert plugin_of({"sharding_strategy": "FULL_SHARD"}) is not None
    assert any("reshard_after_forward" in str(one.message) for one in told)
