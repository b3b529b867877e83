"""PEFT's LoRA: the loop of its examples with resume, and under FSDP, which wraps adapters by PEFT's own policy."""

from __future__ import annotations

import logging
import math
import os
import random
import sys
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.utils.other import fsdp_auto_wrap_policy
from report import ASSETS, OUTPUT, report
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, get_scheduler

from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin, skip_first_batches
from accelerate.logging import get_logger
from accelerate.utils import DataLoaderConfiguration, set_seed

logger = get_logger(__name__)
BERT, NUM_EPOCHS, ACCUMULATION, SAVED_AT = f"{ASSETS}/bert", 2, 2, 5
WORDS = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "hill", "red", "blue", "big", "small"]


def sentences(tokenizer: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """Sentences that are labelled by whether a cat is in them."""
    draw = random.Random(seed)
    chosen = [[draw.choice(WORDS) for _ in range(draw.randint(3, 8))] for _ in range(count)]
    return [dict(tokenizer(" ".join(words), truncation=True), labels=int("cat" in words)) for words in chosen]


def adapter_model() -> Any:
    model = AutoModelForSequenceClassification.from_pretrained(BERT)
    return get_peft_model(
        model, LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, target_modules=["query", "value"])
    )


def main(mode: str) -> None:
    folder = f"{OUTPUT}/adapters_{mode.replace('resume', 'train')}"
    sharded = mode.startswith("fsdp")
    options: dict[str, Any] = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}
    if sharded:
        options = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=int(mode[-1]), use_orig_params=True)}
    # The order of samples is a function of seed and epoch then, whatever the number of processes.
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, dataloader_config=order, **options)
    logging.basicConfig(level=logging.ERROR)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(BERT)
    with accelerator.main_process_first():
        train_set, held_out_set = sentences(tokenizer, 70, 0), sentences(tokenizer, 37, 1)
    collate = DataCollatorWithPadding(tokenizer)
    loader = DataLoader(train_set, shuffle=True, collate_fn=collate, batch_size=4)
    held_out = DataLoader(held_out_set, collate_fn=collate, batch_size=4)
    model = adapter_model()
    if sharded and getattr(accelerator.state, "fsdp_plugin", None) is not None:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=5e-3)
    num_updates = NUM_EPOCHS * math.ceil(len(loader) / ACCUMULATION)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=num_updates)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

    per_epoch = math.ceil(len(loader) / ACCUMULATION)
    update = first_epoch = skipped = 0
    if mode == "resume":
        accelerator.load_state(f"{folder}/step_{SAVED_AT}")
        update = SAVED_AT
        first_epoch, skipped = divmod(SAVED_AT * ACCUMULATION, len(loader))
    losses, accuracy = [], 0.0
    for epoch in range(first_epoch, NUM_EPOCHS):
        model.train()
        resumed = mode == "resume" and epoch == first_epoch
        for batch in skip_first_batches(loader, skipped) if resumed else loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if accelerator.sync_gradients:
                update += 1
                if update == SAVED_AT and mode == "train":
                    accelerator.save_state(f"{folder}/step_{SAVED_AT}")
            if update >= NUM_EPOCHS * per_epoch:
                break
        model.eval()
        right = seen = 0
        for batch in held_out:
            with torch.no_grad():
                guesses = model(**batch).logits.argmax(-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
            right, seen = right + int((guesses == labels).sum()), seen + len(labels)
        accuracy = right / seen
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    plain = accelerator.unwrap_model(model)
    if accelerator.is_main_process:  # who has the whole state, where it was sharded
        if sharded:  # PEFT asks the modules themselves, whose shards only all processes together can gather
            plain = adapter_model()
            plain.load_state_dict(state)
        plain.save_pretrained(f"{folder}/adapter", state_dict=state, save_function=accelerator.save)
        base = AutoModelForSequenceClassification.from_pretrained(BERT)
        loaded = PeftModel.from_pretrained(base, f"{folder}/adapter")
        adapters = {name: tensor for name, tensor in loaded.state_dict().items() if "lora" in name}
        weight = sum(tensor.double().abs().sum().item() for tensor in adapters.values())
        report(
            losses=losses, accuracy=accuracy, seen=seen, weight=weight, learning_rate=scheduler.get_last_lr(),
            adapters=len(adapters), files=sorted(os.listdir(f"{folder}/adapter")), model=type(model).__name__,
        )  # fmt: skip
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
