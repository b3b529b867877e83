"""What Megatron-LM is handed and what comes back, against a thin stand-in: the package itself needs GPUs.

The stand-in has the functions of Megatron-LM that are called, with their arguments, and trains a real little model; so
the contract is tested, and whether Megatron-LM itself trains is not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.errors import MissingDependency, NotBuilt, PreparationError, SettingError
from accelerate.utils import (
    DummyOptim,
    DummyScheduler,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
)
from tests.ranks import run_on_ranks

VOCABULARY = 11


class Language(nn.Module):
    """A language model as Megatron's are called: it computes the loss of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="gpt2", n_layer=1, n_embd=8, n_head=2, n_positions=6, vocab_size=VOCABULARY, return_dict=True
        )
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor, positions: Any, mask: Any, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.embed(tokens))
        return nn.functional.cross_entropy(scores.transpose(1, 2), labels, reduction="none")


class Schedule:
    """Megatron's schedule, as far as checkpoints see it."""

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"num_steps": 3}


class StandIn:
    """Megatron-LM's modules, and what was asked of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.args = argparse.Namespace()

    def install(self) -> None:
        """``import megatron.training`` and its like work."""
        functions: dict[str, dict[str, Any]] = {
            "megatron.training": {"get_args": lambda: self.args, "get_tokenizer": lambda: SimpleNamespace(eod=0)},
            "megatron.training.initialize": {"initialize_megatron": self.initialize},
            "megatron.training.training": {
                "setup_model_and_optimizer": self.setup,
                "train_step": self.train_step,
                "build_train_valid_test_data_iterators": lambda provider: [iter([name]) for name in provider()],
            },
            "megatron.training.utils": {
                "average_losses_across_data_parallel_group": lambda losses: torch.stack(
                    [one.detach() for one in losses]
                ),
            },
            "megatron.training.checkpointing": {
                "save_checkpoint": self.save_checkpoint,
                "load_checkpoint": self.load_checkpoint,
            },
            "megatron.core.utils": {"get_model_config": lambda model: "the model's config"},
            "megatron.core.enums": {"ModelType": SimpleNamespace(encoder_or_decoder="one")},
            "megatron.core.pipeline_parallel": {"get_forward_backward_func": lambda: self.forward_only},
        }
        for name in ("megatron", "megatron.core", *functions):
            module = ModuleType(name)
            module.__dict__.update(functions.get(name, {}))
            module.__path__ = []
            sys.modules[name] = module

    def initialize(self, extra_args_provider: Any, ignore_unknown_args: bool) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        parser.add_argument("--log-params-norm", action="store_true")
        known, rest = extra_args_provider(parser).parse_known_args()
        self.args.__dict__.update(vars(known))
        self.calls.append(("initialize", rest))

    def setup(self, provider: Any, kind: str) -> Any:
        self.calls.append(("setup", kind))
        self.model = provider(pre_process=True, post_process=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.lr)
        return [self.model], self.optimizer, Schedule()

    def _losses(self, step: Any, iterator: Any, model: Any, count: int, backward: bool) -> list[Any]:
        found = []
        for _ in range(count):
            output, loss_of = step(iterator, model[0])
            loss, logged = loss_of(output)
            if backward:
                (loss / count).backward()
            found.append(logged)
        return found

    def train_step(self, step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any, config: Any) -> Any:
        assert config == "the model's config"
        optimizer.zero_grad()
        found = self._losses(step, iterator, model, self.args.num_micro_batches, backward=True)
        norm = nn.utils.clip_grad_norm_(model[0].parameters(), self.args.clip_grad)
        optimizer.step()
        mean = {name: torch.stack([one[name] for one in found]).mean() for name in found[0]}
        return mean, 0, False, False, 0, norm, None

    def train_step_of_its_loop(
        self, step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any, config: Any,
        forward_backward_func: Any, iteration: Any = None,
    ) -> Any:  # fmt: skip
        """As in later versions, whose loop chooses the schedule."""
        assert forward_backward_func == self.forward_only
        return self.train_step(step, iterator, model, optimizer, scheduler, config)

    def forward_only(
        self, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, **_: Any
    ) -> Any:
        return self._losses(forward_step_func, data_iterator, model, num_microbatches, backward=False)

    def save_checkpoint(self, iteration: int, model: Any, *_: Any, **options: Any) -> None:
        Path(self.args.save).mkdir(parents=True)
        torch.save({"iteration": iteration, "model": model[0].state_dict()}, Path(self.args.save) / "state.pt")

    def load_checkpoint(self, model: Any, *_: Any) -> tuple[int, int]:
        state = torch.load(Path(self.args.load) / "state.pt")
        model[0].load_state_dict(state["model"])
        return state["iteration"], 0


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, VOCABULARY, (6,), generator=generator)} for _ in range(24)]


def plugin(**options: Any) -> MegatronLMPlugin:
    """A plugin whose model is the little one."""

    def provide(**_: Any) -> nn.Module:
        torch.manual_seed(0)
        return Language()

    defaults = {"custom_model_provider_function": provide, "context_parallel_size": 1, "num_micro_batches": 2}
    return MegatronLMPlugin(**{**defaults, **options})


def train(folder: Path, later: bool) -> dict[str, Any]:
    """A run under the stand-in: losses and norms of every update, and what Megatron was told."""
    megatron = StandIn()
    megatron.install()
    if later:
        sys.modules["megatron.training.training"].train_step = megatron.train_step_of_its_loop  # pyright: ignore
    sys.argv = ["script.py", "--lr", "99"]  # the script's own, which Megatron must not take
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin(gradient_clipping=0.5, set_all_logging_options=True))
    assert accelerator.distributed_type == "MEGATRON_LM" and accelerator.scaler is None
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=12, warmup_num_steps=2)
    loader = DataLoader(batches(), batch_size=4)  # pyright: ignore[reportArgumentType]
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    found: dict[str, Any] = {"args": dict(vars(megatron.args)), "calls": megatron.calls, "losses": [], "norms": []}
    model.train()
    for batch in loader:
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found["losses"].append(float(outputs["loss"]))
    model.eval()
    found["eval"] = float(model(**batch).loss)
    found["unwrapped"] = type(accelerator.unwrap_model(model)).__name__
    accelerator.save_state(folder)
    with torch.no_grad():
        megatron.model.head.weight.zero_()
    accelerator.load_state(folder)
    found["again"] = float(model(**batch).loss)
    with pytest.raises(NotBuilt, match=r"stream_weights\(\) doesn't read .* Megatron-LM's engine. .* save_state\(\)"):
        accelerator.stream_weights(model)
    return found


def plainly() -> tuple[list[float], list[float]]:
    """The same updates written by hand."""
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for rows in torch.stack([row["input_ids"] for row in batches()]).split(8):
        labels = torch.cat([rows[:, 1:], torch.zeros(len(rows), 1, dtype=torch.long)], dim=1)
        loss = model(rows, None, None, labels=labels).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


@pytest.mark.parametrize("later", [False, True])
def test_a_run_is_handed_over_and_trains(tmp_path: Path, later: bool) -> None:
    found = run_on_ranks(train, 1, tmp_path / "saved", later)[0]
    losses, norms = plainly()
    assert found["losses"] == pytest.approx(losses, abs=1e-6) and found["norms"] == pytest.approx(norms, abs=1e-6)
    assert found["again"] == found["eval"] and found["unwrapped"] == "Language"
    assert [name for name, _ in found["calls"]] == ["initialize", "setup"] and found["calls"][0][1] == []
    expected = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "micro_batch_size": 4,
        "num_micro_batches": 2,
        "global_batch_size": 8,
        "data_parallel_size": 1,
        "clip_grad": 0.5,
        "optimizer": "adam",
        "lr": 0.1,
        "num_layers": 1,
        "hidden_size": 8,
        "seq_length": 6,
        "train_iters": 12,
        "lr_warmup_iters": 2,
        "model_type_name": "gpt",
        "orig_vocab_size": VOCABULARY,
        "log_params_norm": True,
    }
    assert {name: found["args"].get(name) for name in expected} == expected


def test_data_in_megatrons_own_format() -> None:
    def run() -> list[str]:
        megatron = StandIn()
        megatron.install()
        given = plugin(custom_megatron_datasets_provider_function=lambda: ("train", "valid", "test"))
        given.custom_get_batch_function = next
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=given)
        model = Language()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = MegatronLMDummyDataLoader(micro_batch_size=3, data_path=["here"])
        prepared = accelerator.prepare(model, optimizer, data, data, data)
        assert megatron.args.data_path == ["here"] and megatron.args.megatron_dataset_flag is True
        return [next(iter(one)) for one in prepared[2:]]

    assert run_on_ranks(run, 1)[0] == ["train", "valid", "test"]


def test_what_megatron_cannot_take_is_refused_by_name() -> None:
    def run() -> None:
        StandIn().install()
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin())
        model = Language()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(batches(), batch_size=4)  # pyright: ignore[reportArgumentType]
        given = accelerator.state.megatron_lm_plugin
        provider, given.custom_model_provider_function = given.custom_model_provider_function, None
        with pytest.raises(SettingError, match="custom_model_provider_function"):
            accelerator.prepare(model, optimizer, loader)
        given.custom_model_provider_function = provider
        with pytest.raises(PreparationError, match="MegatronLMDummyScheduler"):
            accelerator.prepare(model, optimizer, loader, torch.optim.lr_scheduler.ConstantLR(optimizer))
        with pytest.raises(PreparationError, match="one model"):
            accelerator.prepare(model, Language(), optimizer, loader)
        with pytest.raises(PreparationError, match="dataloader"):
            accelerator.prepare(model, optimizer)
        with pytest.raises(PreparationError, match="device_placement"):
            accelerator.prepare(model, optimizer, loader, device_placement=[True] * 3)
        with pytest.raises(PreparationError, match="--use_deepspeed"):
            accelerator.prepare(model, DummyOptim(model.parameters()), loader)
        with pytest.raises(SettingError, match="Adam or SGD"):
            accelerator.prepare(model, torch.optim.Rprop(model.parameters()), loader)
        with pytest.raises(SettingError, match="custom_get_batch_function"):
            accelerator.prepare(model, optimizer, MegatronLMDummyDataLoader(micro_batch_size=2))
        given.custom_get_batch_function = next
        with pytest.raises(SettingError, match="custom_megatron_datasets_provider_function"):
            accelerator.prepare(model, optimizer, MegatronLMDummyDataLoader(micro_batch_size=2))

    run_on_ranks(run, 1)


def test_without_megatron_the_setting_is_named() -> None:
    def run() -> None:
        with pytest.raises(MissingDependency, match=r"megatron_lm_plugin.*NVIDIA/Megatron-LM"):
            Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())

    run_on_ranks(run, 1)


@pytest.mark.parametrize(
    ("placeholder", "flag"),
    [
        (MegatronLMDummyDataLoader(), "use_megatron_lm"),
        (MegatronLMDummyScheduler(None), "use_megatron_lm"),
        (DummyOptim(None), "use_deepspeed"),
        (DummyScheduler(None), "use_deepspeed"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_placeholders_need_their_engine(placeholder: object, flag: str) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(PreparationError, match=flag):
        accelerator.prepare(Language(), placeholder)
