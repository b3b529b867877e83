"""Models that transformers shards while it loads them: in the bare loop, resumed, and in its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from tests.ranks import run_on_ranks

transformers: Any = pytest.importorskip("transformers", reason="make clients installs it")
distributed: Any = pytest.importorskip("transformers.distributed.configuration_utils", reason="transformers 5.2")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LENGTH, BATCH = 16, 4
#: name -> (model, ranks, sizes)
CELLS: dict[str, tuple[str, int, dict[str, int]]] = {
    "fsdp2": ("llama", 2, {"fsdp_size": 2}),
    "tp2": ("llama", 2, {"tp_size": 2}),
    "ep2": ("mixture", 2, {"fsdp_size": 2, "ep_size": 2}),
    "ep2 x fsdp2": ("mixture", 4, {"fsdp_size": 4, "ep_size": 2}),
    "fsdp2 x tp2": ("llama", 4, {"fsdp_size": 2, "tp_size": 2}),
    "hsdp": ("llama", 4, {"fsdp_size": 2, "dp_replicate_size": 2}),
}
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and a tiny mixture of experts."""
    path = tmp_path_factory.mktemp("models")

    def save() -> None:
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **HEADS)).save_pretrained(path / "llama")
        config = transformers.Qwen3MoeConfig(**SHAPE, **HEADS, **EXPERTS)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(path / "mixture")

    run_on_ranks(save, 1)
    return path


def load(folder: Path, name: str, sizes: dict[str, int]) -> Any:
    """The model, in shards where ``sizes`` say so."""
    options: dict[str, Any] = {"distributed_config": distributed.DistributedConfig(**sizes)} if sizes else {}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / name, attn_implementation="sdpa", dtype=torch.float32, **options
    )


def words(count: int) -> torch.Tensor:
    """Always the same."""
    return torch.randint(0, 64, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def train(
    folder: Path, name: str, sizes: dict[str, int], *, saves: Path | None = None, loads: Path | None = None
) -> dict[str, Any]:
    """A pass of three updates, and a second one unless it is ``saves`` that is wanted; with ``loads`` that alone."""
    run = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = load(folder, name, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shares = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)
    loader = DataLoader(TensorDataset(words(6 * BATCH)), batch_size=BATCH // shares, shuffle=True)
    torch.manual_seed(1)
    loader, model, optimizer = run.prepare(loader, model, optimizer)
    if loads is not None:
        run.load_state(str(loads))
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(1 if saves or loads else 2):
        for (batch,) in loader:
            with run.accumulate(model):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
                run.backward(loss)
                if run.sync_gradients:
                    norms.append(float(run.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(run.reduce(loss.detach(), "mean")))
    if saves is not None:
        run.save_state(str(saves))
    weights = {name: value.tolist() for name, value in run.get_state_dict(model).items()}
    return {"losses": losses, "norms": norms, "weights": weights, "share": run.mesh.data_share()}


@pytest.mark.parametrize("name", CELLS)
def test_the_bare_loop_trains_and_resumes_as_one_process(name: str, folder: Path, tmp_path: Path) -> None:
    """Losses and norms to 1e-5; what is resumed is the run that was not interrupted, and goes on in one process too."""
    model, ranks, sizes = CELLS[name]
    expected = run_on_ranks(lambda: train(folder, model, {}), 1, timeout_seconds=300)[0]
    found = run_on_ranks(lambda: train(folder, model, sizes), ranks, timeout_seconds=300)
    assert [one["share"].index for one in found] == [rank // sizes.get("tp_size", 1) for rank in range(ranks)]
    assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found[0]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    saved = tmp_path / "saved"
    run_on_ranks(lambda: train(folder, model, sizes, saves=saved), ranks, timeout_seconds=300)
    resumed = run_on_ranks(lambda: train(folder, model, sizes, loads=saved), ranks, timeout_seconds=300)
    for whole, rest in zip(found, resumed, strict=True):
        assert rest["losses"] == whole["losses"][6:] and rest["norms"] == whole["norms"][3:]
        assert rest["weights"] == whole["weights"]
    alone = run_on_ranks(lambda: train(folder, model, {}, loads=saved), 1, timeout_seconds=300)[0]
    assert alone["losses"] == pytest.approx(expected["losses"][6:], rel=1e-5)


@pytest.mark.parametrize("other", ["fsdp2", "ep2 x fsdp2"])
def test_experts_are_resumed_in_another_layout(other: str, folder: Path, tmp_path: Path) -> None:
    """What two ranks of expert parallelism saved goes on in plain shards, or on four ranks, as in one process."""
    saved = tmp_path / "saved"
    expected = run_on_ranks(lambda: train(folder, "mixture", {}), 1, timeout_seconds=300)[0]
    run_on_ranks(lambda: train(folder, "mixture", CELLS["ep2"][2], saves=saved), 2, timeout_seconds=300)
    _, ranks, sizes = CELLS[other]
    found = run_on_ranks(lambda: train(folder, "mixture", sizes, loads=saved), ranks, timeout_seconds=300)[0]
    assert found["losses"] == pytest.approx(expected["losses"][6:], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"][3:], rel=1e-5)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(torch.tensor(found["weights"][name]), torch.tensor(value), rtol=1e-3, atol=1e-4)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """What the Trainer reads."""

    def __len__(self) -> int:
        return 8 * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = words(len(self))[index]
        return {"input_ids": row, "labels": row.clone()}


def trained(folder: Path, name: str, sizes: dict[str, int], output: Path) -> dict[str, Any]:
    """Four updates, then an evaluation; only weights are saved, which is all that the Trainer does for such models."""
    shares = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)
    size = BATCH // shares
    arguments = transformers.TrainingArguments(
        str(output),
        use_cpu=True,
        per_device_train_batch_size=size,
        per_device_eval_batch_size=size,
        gradient_accumulation_steps=2,
        max_steps=4,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps",
        save_steps=4,
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    run = transformers.Trainer(load(folder, name, sizes), arguments, train_dataset=Rows(), eval_dataset=Rows())
    run.train()
    log = [entry for entry in run.state.log_history if "grad_norm" in entry]
    evaluated = run.evaluate()["eval_loss"]
    strategy = type(run.accelerator.strategy).__name__
    return {
        "losses": [one["loss"] for one in log],
        "norms": [float(one["grad_norm"]) for one in log],
        "evaluated": evaluated,
        "strategy": strategy,
    }


@pytest.mark.parametrize("name", CELLS)
def test_the_trainer_trains_as_in_one_process(name: str, folder: Path, tmp_path: Path) -> None:
    """And what it saves is loaded whole."""
    model, ranks, sizes = CELLS[name]
    expected = run_on_ranks(lambda: trained(folder, model, {}, tmp_path / "one"), 1, timeout_seconds=300)[0]
    found = run_on_ranks(lambda: trained(folder, model, sizes, tmp_path / "all"), ranks, timeout_seconds=300)[0]
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(expected[what], rel=1e-4)
    assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-4)
    assert found["strategy"] == ("TensorParallel" if name == "tp2" else "Adopted")
    one, other = (load_file(tmp_path / run / "checkpoint-4" / "model.safetensors") for run in ("one", "all"))
    assert set(one) == set(other)
    for weight, value in one.items():
        torch.testing.assert_close(other[weight], value, rtol=1e-3, atol=1e-4)
