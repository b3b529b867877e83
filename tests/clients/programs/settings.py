"""transformers.Trainer under one setting after another: what it logs, evaluates and ends with.

python settings.py trainer | sharded | NAME...
"""

from __future__ import annotations

import copy
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import OUTPUT, report, weight_of
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from accelerate import ParallelismConfig

ROWS = 33
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
    "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 1,
}  # fmt: skip
BLOCKS = {"transformer_layer_cls_to_wrap": ["GPT2Block"]}


def row(index: int, ragged: bool = False) -> dict[str, torch.Tensor]:
    """The same in every process; ragged rows differ in how many of their tokens count."""
    draw = torch.Generator().manual_seed(index)
    tokens = torch.randint(1, 64, (8,), generator=draw)
    labels = tokens.clone()
    if ragged:
        labels[: index % 7] = -100
    return {"input_ids": tokens, "labels": labels}


class Tokens(Dataset):
    """Rows that can be asked for by number."""

    def __init__(self, count: int = ROWS, ragged: bool = False) -> None:
        self.count, self.ragged = count, ragged

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= self.count:
            raise IndexError(index)
        return row(index, self.ragged)


class Lengths(Tokens):
    """Rows of different lengths."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: each[: 2 + index % 7] for name, each in super().__getitem__(index).items()}


class Stream(IterableDataset):
    """Rows that come one after another."""

    def __init__(self, count: int = ROWS) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (row(index) for index in range(self.count))


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of different lengths as one batch."""
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence([each[name] for each in rows], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


def model(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    rates = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(**shape, **rates, bos_token_id=0, eos_token_id=0, pad_token_id=0))


def build(name: str, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """A trainer; what its constructor takes beside arguments is named so in ``options``."""
    taken = ("callbacks", "compute_metrics", "data_collator", "optimizers", "compute_loss_func", "train_dataset",
             "eval_dataset", "preprocess_logits_for_metrics", "optimizer_cls_and_kwargs")  # fmt: skip
    others = {each: options.pop(each) for each in taken if each in options}
    others = {"train_dataset": Tokens(), "eval_dataset": Tokens(10), **others}
    network = options.pop("model", None) or model(options.pop("dropout", 0.0))
    arguments = options.pop("arguments", TrainingArguments)
    return kind(network, arguments(f"{OUTPUT}/{name}", **{**DEFAULTS, **options}), **others)


def history(trained: Trainer) -> dict[str, Any]:
    """What was logged, without times."""
    timed = ("runtime", "per_second", "flos", "mem_", "init_")
    found: dict[str, list[Any]] = {}
    for entry in trained.state.log_history:
        for key, value in entry.items():
            if key not in ("step", "epoch") and not any(word in key for word in timed):
                found.setdefault(key, []).append(value)
    return found


def total_of(trained: Trainer) -> float:
    """A number that changes when any parameter does, sharded or not."""
    if not trained.is_fsdp_enabled:
        return weight_of(trained.accelerator.unwrap_model(trained.model))
    state = trained.accelerator.get_state_dict(trained.model)
    # Its tied weight is in the state under both names, or under one.
    return sum(each.double().abs().sum().item() for name, each in (state or {}).items() if name != "lm_head.weight")


def results(trained: Trainer, evaluate: bool = True) -> dict[str, Any]:
    found = {**history(trained), "step": trained.state.global_step, "epoch": trained.state.epoch}
    if evaluate:
        found["final"] = [value for key, value in trained.evaluate().items() if key.endswith("loss")]
    found["weight"] = total_of(trained)
    return found


def plain(name: str, **options: Any) -> dict[str, Any]:
    """Trained, then evaluated."""
    trained = build(name, **options)
    trained.train()
    return results(trained)


def resumed(name: str, at: int, again: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """A run that stopped at ``at`` ends as one that never did."""
    shutil.rmtree(f"{OUTPUT}/{name}", ignore_errors=True)
    whole = build(name, save_strategy="steps", save_steps=at, **copy.deepcopy(options))
    whole.train()
    rest = build(name, **{**copy.deepcopy(options), **(again or {})})
    rest.train(resume_from_checkpoint=f"{OUTPUT}/{name}/checkpoint-{at}")
    found = results(rest)
    return {**found, "same": total_of(whole) == found["weight"], "whole": history(whole)["loss"]}


def streamed(name: str, **options: Any) -> dict[str, Any]:
    return plain(name, train_dataset=Stream(), eval_dataset=Stream(10), **options)


def right(prediction: Any) -> dict[str, float]:
    """A metric over everything that was evaluated."""
    guesses = torch.as_tensor(prediction.predictions).argmax(-1)
    labels = torch.as_tensor(prediction.label_ids)
    return {"right": (guesses == labels).double().mean().item(), "seen": float(len(labels))}


def measured(name: str, **options: Any) -> dict[str, Any]:
    return plain(name, compute_metrics=right, eval_strategy="steps", eval_steps=2, **options)


def best(name: str, **options: Any) -> dict[str, Any]:
    shutil.rmtree(f"{OUTPUT}/{name}", ignore_errors=True)
    saving = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trained = build(name, load_best_model_at_end=True, save_total_limit=2, learning_rate=0.3, **saving, **options)
    trained.train()
    kept = sorted(path.name for path in Path(OUTPUT, name).glob("checkpoint-*"))
    return {**results(trained), "kept": kept, "best": Path(str(trained.state.best_model_checkpoint)).name}


def predicted(name: str, **options: Any) -> dict[str, Any]:
    trained = build(name, **options)
    trained.train()
    answer = trained.predict(Tokens(7))
    return {
        "shape": list(answer.predictions.shape), "sum": float(abs(answer.predictions).sum()),
        "labels": answer.label_ids.ravel().tolist()[:20], "metrics": answer.metrics["test_loss"],
    }  # fmt: skip


def twice(name: str, **options: Any) -> dict[str, Any]:
    """Evaluated, trained, evaluated, trained again with the same trainer."""
    alone = build(name, **options)
    alone.train()
    trained = build(name, **options)
    before = trained.evaluate()["eval_loss"]
    trained.train()
    middle = trained.evaluate()["eval_loss"]
    trained.train()
    undisturbed = middle == alone.evaluate()["eval_loss"]
    return {"before": before, "undisturbed": undisturbed, **results(trained)}


def averaged(name: str, **options: Any) -> dict[str, Any]:
    """Whether an evaluation is the average over samples, wherever the last batch lies."""
    split = {"split_batches": True, "dispatch_batches": True}
    stream = {"train_dataset": Stream(), "eval_dataset": Stream(10)}
    found = {}
    for way, changed in {
        "dispatched": {"accelerator_config": {"dispatch_batches": True}},
        "split_dispatched": {"accelerator_config": split},
        "stream": stream,
        "stream_split": {**stream, "accelerator_config": {"split_batches": True}},
    }.items():
        trained = build(name, **options, **changed)
        network, total = trained.model.eval(), 0.0
        with torch.no_grad():
            for index in range(10):
                batch = {key: value.unsqueeze(0) for key, value in row(index).items()}
                # As the Trainer does, over all 8 labels, of which 7 have a token before them.
                total += network(**batch).loss.item() * 7 / 8
        found[way] = abs(trained.evaluate()["eval_loss"] - total / 10) < 1e-5
    return found


class Events(TrainerCallback):
    """What a callback is told, and when."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            object.__getattribute__(self, "heard").append(name)
        return object.__getattribute__(self, name)


class Seen(TrainerCallback):
    """Gradients are there between backward and step, and gone afterwards."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradients = [each.grad for each in kwargs["model"].parameters() if each.grad is not None]
        self.norms.append(sum(each.double().abs().sum().item() for each in gradients))


def callbacks(name: str, **options: Any) -> dict[str, Any]:
    heard, seen = Events(), Seen()
    found = plain(name, callbacks=[heard, seen], gradient_accumulation_steps=2, eval_strategy="epoch", **options)
    return {**found, "heard": len(heard.heard), "norms": seen.norms}


class Own(Trainer):
    """A trainer whose step, loss and loader are its user's, as in many notebooks."""

    def get_train_dataloader(self) -> Any:
        loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=4, shuffle=True)  # pyright: ignore
        return self.accelerator.prepare(loader)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()


def own(name: str, **options: Any) -> dict[str, Any]:
    return plain(name, kind=Own, **options)


def sum_of_losses(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    shifted, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(shifted, wanted, reduction="sum", ignore_index=-100)
    return total / (num_items_in_batch if num_items_in_batch is not None else (wanted != -100).sum())


def given_optimizer(name: str, **options: Any) -> dict[str, Any]:
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return plain(name, model=network, optimizers=(optimizer, schedule), **options)


class TooMuch(GPT2LMHeadModel):
    """Runs out of memory when a batch has more than two rows."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if self.training and len(input_ids) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def smaller_batches(name: str, **options: Any) -> dict[str, Any]:
    network = TooMuch(model().config)
    network.load_state_dict(model().state_dict())
    return plain(name, model=network, auto_find_batch_size=True, **options)


class Pairs(Tokens):
    """What goes into an encoder, and what should come out of the decoder."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = super().__getitem__(index)
        return {**found, "labels": found["input_ids"][:5].clone(), "attention_mask": torch.ones_like(found["labels"])}


def sequences(name: str, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    network = T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0))
    trained = build(
        name, Seq2SeqTrainer, model=network, arguments=Seq2SeqTrainingArguments, predict_with_generate=True,
        generation_max_length=6, generation_num_beams=options.pop("beams", 1), train_dataset=Pairs(),
        eval_dataset=Pairs(10), compute_metrics=lambda given: {"length": float(given.predictions.shape[-1])},
        data_collator=None, **options,
    )  # fmt: skip
    trained.train()
    answer = trained.predict(Pairs(7))
    return {**results(trained), "answer": answer.predictions.ravel().tolist()}


def attributes(name: str, **options: Any) -> dict[str, Any]:
    """What libraries on top read of the accelerator of a trainer."""
    trained = build(name, **options)
    trained.train()
    run = trained.accelerator
    state, gradients = run.state, run.gradient_state
    return {
        "precision": run.mixed_precision, "kind": str(run.distributed_type), "count": run.num_processes,
        "main": [bool(run.is_main_process), bool(run.is_local_main_process)],
        "index": [run.process_index, run.local_process_index],
        "device": str(run.device), "scaler": run.scaler is None, "sync": run.sync_gradients,
        "ended": bool(gradients.end_of_dataloader), "remainder": gradients.remainder, "num_steps": gradients.num_steps,
        "kwargs": gradients.plugin_kwargs, "even": run.even_batches, "split": run.split_batches,
        "dispatch": run.dispatch_batches, "seedable": run.use_seedable_sampler, "models": len(run._models),
        "optimizers": len(run._optimizers), "skipped": run.optimizer_step_was_skipped,
        "accumulation": run.gradient_accumulation_steps, "fsdp2": run.is_fsdp2, "multi": run.multi_device,
        "distributed": run.use_distributed, "deepspeed": state.deepspeed_plugin is None,
        "parallelism": run.parallelism_config is None, "trackers": run.trackers, "saves": run.should_save_model,
        "fsdp": getattr(state, "fsdp_plugin", None) is None, "same": run.unwrap_model(trained.model) is trained.model,
        "wrapped": type(trained.model_wrapped).__name__, "mesh": run.torch_device_mesh is None,
    }  # fmt: skip


def sharded(name: str, **options: Any) -> dict[str, Any]:
    """FSDP as TrainingArguments ask for it, saved and gone on with."""
    shutil.rmtree(f"{OUTPUT}/{name}", ignore_errors=True)
    config = {**BLOCKS, **options.pop("fsdp_config", {})}
    arguments = {"fsdp": options.pop("fsdp", "full_shard auto_wrap"), "fsdp_config": config, **options}
    whole = build(name, save_strategy="steps", save_steps=4, **copy.deepcopy(arguments))
    whole.train()
    rest = build(name, **copy.deepcopy(arguments))
    rest.train(resume_from_checkpoint=f"{OUTPUT}/{name}/checkpoint-4")
    found = results(rest)
    rest.save_model(f"{OUTPUT}/{name}/final")
    return {
        "loss": history(whole)["loss"], "grad_norm": history(whole)["grad_norm"], "after": found["loss"],
        "final": found["final"], "weight": found["weight"], "whole": total_of(whole),
        "kind": str(getattr(rest.accelerator.distributed_type, "value", rest.accelerator.distributed_type)),
    }  # fmt: skip


SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {}, "cosine": {}, "cosine_with_restarts": {"num_cycles": 2}, "polynomial": {"power": 2.0},
    "constant": {}, "constant_with_warmup": {}, "inverse_sqrt": {}, "cosine_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 2, "num_stable_steps": 2},
}  # fmt: skip
SETTINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "max_steps": plain,
    "dropout": partial(plain, dropout=0.1),
    "epochs": partial(plain, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2),
    "accumulation": partial(plain, gradient_accumulation_steps=4, per_device_train_batch_size=2, dropout=0.1),
    "ragged_accumulation": partial(plain, gradient_accumulation_steps=3, train_dataset=Tokens(ragged=True)),
    "tokens_by_process": partial(
        plain, gradient_accumulation_steps=2, train_dataset=Tokens(ragged=True), average_tokens_across_devices=False
    ),
    "sync_each_batch": partial(
        plain, gradient_accumulation_steps=2,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    ),
    "bf16": partial(plain, bf16=True),
    "bf16_accumulation": partial(plain, bf16=True, gradient_accumulation_steps=2, bf16_full_eval=True),
    "fp16": partial(plain, fp16=True),
    "fp16_evaluation": partial(plain, fp16_full_eval=True),
    "no_clipping": partial(plain, max_grad_norm=0.0),
    "clipping": partial(plain, max_grad_norm=0.05),
    "checkpointed": partial(plain, gradient_checkpointing=True, dropout=0.1),
    "resume": partial(resumed, at=4, dropout=0.1),
    "resume_workers": partial(resumed, at=4, dataloader_num_workers=2, dropout=0.1, gradient_accumulation_steps=2),
    "resume_later_epoch": partial(resumed, at=11, max_steps=14, dropout=0.1),
    "resume_without_skipping": partial(resumed, at=4, ignore_data_skip=True),
    "resume_stream": partial(resumed, at=2, train_dataset=Stream(), max_steps=5),
    "resume_bf16": partial(resumed, at=4, bf16=True),
    "resume_weights_only": partial(resumed, at=4, again={"learning_rate": 1e-3}, lr_scheduler_type="constant"),
    "evaluation": measured,
    "evaluation_by_batch": partial(plain, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=3),
    "evaluation_accumulated": partial(measured, eval_accumulation_steps=1, per_device_eval_batch_size=3),
    "evaluation_gather_object": partial(
        measured, eval_use_gather_object=True, per_device_eval_batch_size=3, eval_delay=3
    ),
    "evaluation_at_start": partial(measured, eval_on_start=True, eval_delay=0, logging_first_step=True),
    "evaluation_of_several": partial(
        measured, eval_dataset={"one": Tokens(5), "other": Tokens(9)}, per_device_eval_batch_size=2
    ),
    "group_by_length": partial(
        plain, train_sampling_strategy="group_by_length", train_dataset=Lengths(), eval_dataset=Lengths(10),
        data_collator=pad,
    ),
    "lengths": partial(
        measured, train_dataset=Lengths(), eval_dataset=Lengths(11), data_collator=pad, per_device_eval_batch_size=2
    ),
    "drop_last": partial(plain, dataloader_drop_last=True, max_steps=-1, num_train_epochs=2),
    "stream": streamed,
    "stream_dispatched": partial(streamed, accelerator_config={"dispatch_batches": True}),
    "stream_not_dispatched": partial(streamed, accelerator_config={"dispatch_batches": False}),
    "stream_split": partial(streamed, accelerator_config={"split_batches": True}),
    "stream_workers": partial(streamed, dataloader_num_workers=1),
    "stream_epochs": partial(streamed, max_steps=12, gradient_accumulation_steps=2),
    "dispatched": partial(plain, accelerator_config={"dispatch_batches": True}),
    "split": partial(plain, accelerator_config={"split_batches": True}),
    "split_dispatched": partial(plain, accelerator_config={"split_batches": True, "dispatch_batches": True}),
    # Four updates: two ranks have equally many batches so far.
    "uneven": partial(plain, accelerator_config={"even_batches": False}, per_device_eval_batch_size=3, max_steps=4),
    "seedable": partial(plain, accelerator_config={"use_seedable_sampler": True}, max_steps=12),
    "not_seedable": partial(plain, accelerator_config={"use_seedable_sampler": False}, max_steps=12),
    "data_seed": partial(plain, data_seed=7),
    "non_blocking": partial(plain, accelerator_config={"non_blocking": True}, dataloader_pin_memory=False),
    "workers": partial(
        plain, dataloader_num_workers=2, dataloader_persistent_workers=True, dataloader_prefetch_factor=3, max_steps=12
    ),
    "best": best,
    "early_stopping": partial(best, callbacks=[EarlyStoppingCallback(1)], max_steps=20),
    "average": averaged,
    "predict": predicted,
    "predict_by_two": partial(predicted, per_device_eval_batch_size=2),
    "twice": twice,
    "callbacks": callbacks,
    "own_step": own,
    "own_loss": partial(
        plain, compute_loss_func=sum_of_losses, gradient_accumulation_steps=2, train_dataset=Tokens(ragged=True)
    ),
    "own_optimizer": given_optimizer,
    "optimizer_class": partial(plain, optimizer_cls_and_kwargs=(torch.optim.RMSprop, {"lr": 1e-3})),
    "sgd": partial(plain, optim="sgd"),
    "adafactor": partial(plain, optim="adafactor"),
    "label_smoothing": partial(plain, label_smoothing_factor=0.1),
    "neftune": partial(plain, neftune_noise_alpha=5.0),
    "plateau": partial(plain, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1,
                       lr_scheduler_kwargs={"patience": 0}, learning_rate=0.3),
    "smaller_batches": smaller_batches,
    "compiled": partial(plain, torch_compile=True, torch_compile_backend="aot_eager"),
    "input_tokens": partial(plain, include_num_input_tokens_seen=True),
    "unused_parameters": partial(plain, ddp_find_unused_parameters=True, ddp_bucket_cap_mb=1),
    "sequences": sequences,
    "sequences_beams": partial(sequences, beams=2, per_device_eval_batch_size=2),
    "attributes": attributes,
    "attributes_accumulating": partial(attributes, gradient_accumulation_steps=2, bf16=True),
    **{
        f"schedule_{name}": partial(plain, lr_scheduler_type=name, lr_scheduler_kwargs=options, warmup_steps=2)
        for name, options in SCHEDULES.items()
    },
}  # fmt: skip
SHARDED: dict[str, Callable[[str], dict[str, Any]]] = {
    # First: after it, the environment says FSDP, as libraries expect it to.
    "parallelism_replicas": partial(plain, parallelism_config=ParallelismConfig(dp_replicate_size=2)),
    "fsdp1": partial(sharded, fsdp_config={"version": 1}),
    "fsdp2": partial(sharded, fsdp_config={"version": 2}),
    "fsdp1_grad_op": partial(sharded, fsdp="shard_grad_op auto_wrap", fsdp_config={"version": 1}),
    "fsdp2_kept": partial(sharded, fsdp_config={"version": 2, "reshard_after_forward": False}),
    "fsdp1_accumulation": partial(
        sharded, fsdp_config={"version": 1}, gradient_accumulation_steps=2, per_device_train_batch_size=2
    ),
    "fsdp2_accumulation": partial(
        sharded, fsdp_config={"version": 2}, gradient_accumulation_steps=2, per_device_train_batch_size=2
    ),
    "fsdp1_whole": partial(sharded, fsdp_config={"version": 1, "state_dict_type": "FULL_STATE_DICT"}),
    "fsdp2_whole": partial(sharded, fsdp_config={"version": 2, "state_dict_type": "FULL_STATE_DICT"}),
    "fsdp1_checkpointing": partial(sharded, fsdp_config={"version": 1, "activation_checkpointing": True}),
    "fsdp2_checkpointing": partial(sharded, fsdp_config={"version": 2, "activation_checkpointing": True}),
    "fsdp2_bf16": partial(sharded, fsdp_config={"version": 2}, bf16=True),
    "fsdp1_bf16": partial(sharded, fsdp_config={"version": 1}, bf16=True),
    "fsdp2_offload": partial(sharded, fsdp="full_shard auto_wrap offload", fsdp_config={"version": 2}),
    "fsdp2_clipping": partial(sharded, fsdp_config={"version": 2}, max_grad_norm=0.05),
    "fsdp1_clipping": partial(sharded, fsdp_config={"version": 1}, max_grad_norm=0.05),
    "fsdp2_compiled": partial(
        sharded, fsdp_config={"version": 2}, torch_compile=True, torch_compile_backend="aot_eager"
    ),
    "parallelism_shards": partial(
        sharded, fsdp_config={"version": 2}, parallelism_config=ParallelismConfig(dp_shard_size=2)
    ),
}


def refused_or(run: Callable[[str], dict[str, Any]], name: str) -> dict[str, Any]:
    """What came out, or in what way it was refused."""
    try:
        return run(name)
    except Exception as error:  # a refusal is a result
        traceback.print_exc()
        return {"refused": type(error).__name__, "says": str(error)[:300]}


GROUPS = {"trainer": list(SETTINGS), "sharded": list(SHARDED)}
if __name__ == "__main__":
    every = {**SETTINGS, **SHARDED}
    names = [name for word in sys.argv[1:] for name in GROUPS.get(word, [word])]
    report(**{name: refused_or(every[name], name) for name in names})
