"""transformers on top: the Trainer with a DeepSpeed configuration, models built in pieces, layers cut by AutoTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_on_ranks

pytest.importorskip("transformers", reason="transformers isn't installed: make deepspeed")

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
ADAM = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
}


def llama() -> Any:
    """A tiny Llama, always the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=32, use_cache=False, **sizes)
    )


def texts(count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Token ids that can be learned, always the same."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, 64, (count,), generator=generator)
    rows = [(start + torch.arange(12)) % 64 for start in starts]
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def trainer(folder: Path, config: dict[str, Any] | None, num_ranks: int, **options: Any) -> Any:
    """A Trainer as a script writes it."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8 // num_ranks,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        warmup_steps=2,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
        **{"num_train_epochs": 3, "save_strategy": "no", "deepspeed": config, **options},
    )
    return Trainer(model=llama(), args=arguments, train_dataset=texts(), eval_dataset=texts(8))


def history(folder: Path, config: dict[str, Any] | None, num_ranks: int, **options: Any) -> dict[str, list[float]]:
    """Losses, gradient norms and learning rates, and the loss of an evaluation."""
    run = trainer(folder, config, num_ranks, **options)
    run.train()
    logs = [log for log in run.state.log_history if "loss" in log]
    found = {name: [float(log[name]) for log in logs] for name in ("loss", "grad_norm", "learning_rate")}
    return {**found, "eval": [run.evaluate()["eval_loss"]]}


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(CONFIG))
    config["zero_optimization"]["stage"] = stage
    return {**config, **more}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The Trainer on one process, without DeepSpeed."""
    return run_on_ranks(history, 1, tmp_path_factory.mktemp("alone"), None, 1, timeout_seconds=100)[0]


@pytest.mark.parametrize(
    ("stage", "more"), [(1, {}), (2, {"optimizer": ADAM}), (3, {})], ids=["zero1", "zero2-own-adam", "zero3"]
)
def test_the_trainer_runs_unmodified(
    stage: int, more: dict[str, Any], tmp_path: Path, alone: dict[str, list[float]]
) -> None:
    found = run_on_ranks(history, 2, tmp_path, configuration(stage, **more), 2, timeout_seconds=100)[0]
    assert len(found["loss"]) == 6
    for name, values in alone.items():
        if name == "learning_rate" and more:
            continue  # the engine has stepped its schedule already when the Trainer asks
        # The Trainer rounds what it logs.
        assert found[name] == pytest.approx(values, rel=1e-4, abs=2e-4), name


def test_a_trainer_goes_on_from_its_checkpoint(tmp_path: Path, alone: dict[str, list[float]]) -> None:
    def first() -> None:
        trainer(tmp_path, configuration(3), 2, save_strategy="steps", save_steps=4, max_steps=6).train()

    def second() -> list[float]:
        run = trainer(tmp_path, configuration(3), 2, max_steps=6)
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        return [float(log["loss"]) for log in run.state.log_history if "loss" in log]

    run_on_ranks(first, 2, timeout_seconds=100)
    saved = tmp_path / "checkpoint-4"
    assert (saved / "model.safetensors").is_file() and (saved / "global_step4").is_dir()
    found = run_on_ranks(second, 2, timeout_seconds=100)[0]
    assert found[-2:] == pytest.approx(alone["loss"][-2:], abs=2e-4)


def test_models_are_built_in_pieces(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)

    def build() -> list[Any]:
        from transformers import LlamaForCausalLM

        from accelerate import Accelerator, DeepSpeedPlugin

        plugin = DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=True)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        model = LlamaForCausalLM.from_pretrained(tmp_path)
        pieces = [getattr(p, "ds_id", None) is not None and p.numel() == 0 for p in model.parameters()]
        with plugin.zero3_init_context_manager(enable=False):
            whole = [p.numel() > 0 for p in llama().parameters()]
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        model = accelerator.prepare(model)
        return [all(pieces), all(whole), accelerator.get_state_dict(model)]

    (in_pieces, whole, state), _ = run_on_ranks(build, 2)
    assert in_pieces and whole
    assert all(torch.equal(state[name], value) for name, value in llama().state_dict().items())


def test_layers_are_cut_by_autotp() -> None:
    def train(num_ranks: int) -> list[float]:
        from accelerate import Accelerator, DeepSpeedPlugin

        config = configuration(1, gradient_clipping=0.5, tensor_parallel={"autotp_size": num_ranks})
        for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
            del config["zero_optimization"][name]
        plugin = None if num_ranks == 1 else DeepSpeedPlugin(hf_ds_config=config)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(texts(), batch_size=8)  # pyright: ignore[reportArgumentType]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    expected = run_on_ranks(train, 1, 1)[0]
    assert run_on_ranks(train, 2, 2) == [pytest.approx(expected, abs=1e-5)] * 2


def test_generation() -> None:
    def generate(uses_deepspeed: bool) -> list[int]:
        from accelerate import Accelerator, DeepSpeedPlugin

        plugin = DeepSpeedPlugin(zero_stage=2) if uses_deepspeed else None
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(texts(), batch_size=8)  # pyright: ignore[reportArgumentType]
        model, _, _ = accelerator.prepare(model, optimizer, loader)
        prompt = torch.tensor([[1, 2, 3]])
        return accelerator.unwrap_model(model).generate(prompt, max_new_tokens=5, do_sample=False)[0].tolist()

    assert run_on_ranks(generate, 2, True)[0] == run_on_ranks(generate, 1, False)[0]
