"""Models of transformers as stages of a pipeline, whole and in shards: trained, evaluated, saved, generating."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PipelineParallelConfig
from tests.ranks import RankFailed, run_on_ranks

transformers: Any = pytest.importorskip("transformers", reason="make clients installs it")

LENGTH, BATCH, PARTS = 16, 8, 2
FSDP = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}


def build(tied: bool = False) -> Any:
    """A tiny Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def accelerator(degrees: dict[str, int]) -> Accelerator:
    """Over ``degrees``; none: one process."""
    if not degrees:
        return Accelerator(cpu=True)
    shares = degrees.get("dp_shard", 1)
    sizes: dict[str, Any] = {f"{axis}_size": size for axis, size in degrees.items()}
    examples = (torch.zeros(BATCH // shares // PARTS, LENGTH, dtype=torch.int64),)
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(**FSDP) if shares > 1 else None,
        parallelism_config=ParallelismConfig(
            pp_handler=PipelineParallelConfig(num_micro_batches=PARTS, example_inputs=examples), **sizes
        ),
    )


def mean_loss(output: Any, goals: torch.Tensor) -> torch.Tensor:
    """Of the words that follow."""
    return cross_entropy(output.logits.flatten(0, 1), goals.flatten())


def train(degrees: dict[str, int], tied: bool, folder: str) -> dict[str, Any]:
    """Six updates: losses and norms; what evaluation says, and what the saved model generates."""
    run = accelerator(degrees)
    model = build(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = run.prepare(model, optimizer)
    share = run.mesh.data_share()
    losses: list[float] = []
    norms: list[float] = []
    for step in range(6):
        words = torch.randint(0, 64, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        words = words.chunk(share.count)[share.index]
        inputs, goals = words[:, :-1].contiguous(), words[:, 1:].contiguous()
        loss = run.pipeline_step(model, (inputs, goals), mean_loss)
        norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(run.reduce(loss, "mean")))
    model.eval()
    words = torch.arange(LENGTH * BATCH // share.count).remainder(64).view(-1, LENGTH)
    with torch.no_grad():
        guesses = model(words).logits.argmax(-1)
    run.save_model(model, folder)
    if run.is_main_process:  # a file that several ranks write at once is read half-written
        model.config.save_pretrained(folder)
    run.wait_for_everyone()
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    said = whole.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False)
    return {"losses": losses, "norms": norms, "guesses": guesses[0].tolist(), "said": said.tolist()}


@functools.cache
def alone(tied: bool, folder: str) -> dict[str, Any]:
    """The same by one process."""
    return run_on_ranks(lambda: train({}, tied, folder), 1)[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_a_model_of_transformers_trains_as_in_one_process(degrees: dict[str, int], tied: bool, tmp_path: Path) -> None:
    """And is saved whole: what was saved generates as the model of one process."""
    ranks = 2 * degrees.get("dp_shard", 1)
    expected = alone(tied, str(tmp_path / "alone"))
    found = run_on_ranks(lambda: train(degrees, tied, str(tmp_path / "stages")), ranks, timeout_seconds=180)
    for rank in found:
        for name in ("losses", "norms"):
            assert rank[name] == pytest.approx(expected[name], rel=1e-5)
        assert (rank["guesses"], rank["said"]) == (expected["guesses"], expected["said"])


def test_generating_through_stages_is_refused_with_the_way_out() -> None:
    """transformers keeps a cache of all layers."""
    with pytest.raises(RankFailed, match=r"LlamaForCausalLM\.generate\(\) keeps a cache .*accelerator\.save_model"):
        run_on_ranks(lambda: accelerator({"pp": 2}).prepare(build()).generate(torch.tensor([[1]])), 2)


def test_layers_of_a_traced_model_are_not_cut() -> None:
    """A trace has the sizes of whole layers in it."""
    with pytest.raises(RankFailed, match=r"pp_size=2 with tp_size=2: the forward of LlamaForCausalLM had to be traced"):
        run_on_ranks(lambda: accelerator({"pp": 2, "tp": 2}).prepare(build()), 4, timeout_seconds=120)
