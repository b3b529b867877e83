"""The loop that diffusers' training scripts have in common, as they write it.

The main process alone saves every few updates, keeps the newest checkpoints and removes others; hooks save and load
models by their own methods; a run resumes from the latest; averages are kept; pictures go to the trackers by name.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from report import OUTPUT, report, weight_of
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import CLIPTextConfig, CLIPTextModel

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.logging import get_logger
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

logger = get_logger(__name__, log_level="INFO")
NUM_UPDATES, EVERY, LIMIT, ACCUMULATION, SEED = 8, 3, 1, 2, 0
NOISE = DDPMScheduler(num_train_timesteps=50)

Hook = Callable[..., None]
Batch = dict[str, torch.Tensor]


@dataclass
class Script:
    """What one script has of its own."""

    name: str
    #: What is prepared and trained, by the name of its folder in a checkpoint.
    models: dict[str, torch.nn.Module]
    loss: Callable[[Batch, dict[str, Any]], torch.Tensor]
    data: Sequence[Any]
    collate: Callable[[list[Any]], Batch]
    parameters: list[torch.nn.Parameter]
    ema: EMAModel | None = None
    #: (accelerator, script) -> what saves and what loads, where a script brings its own.
    hooks: Callable[[Accelerator, Script], tuple[Hook, Hook]] | None = None
    #: What the main process writes at the end, and numbers about it.
    final: Callable[[Accelerator, dict[str, Any], str], dict[str, Any]] | None = None
    #: After each update: gradients or weights that the script mends by hand.
    before_step: Callable[[dict[str, Any]], None] | None = None
    after_step: Callable[[dict[str, Any]], None] | None = None
    results: dict[str, Any] = field(default_factory=dict)


def unet(**options: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8, attention_head_dim=4, **options,
    )  # fmt: skip


def text_encoder() -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def digits(count: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
    """Pictures, with sentences of four tokens that name what is on them."""
    pictures, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(pictures[start : start + count] / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
    words = [[0, int(label) + 2, 12, 1] for label in labels[start : start + count]]
    return [{"pixels": one, "words": torch.tensor(other)} for one, other in zip(pixels, words, strict=True)]


def stacked(rows: list[dict[str, torch.Tensor]]) -> Batch:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def noised(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(noisy pictures, moments, noise), a function of the pictures: a resumed run then goes on exactly."""
    draw = torch.Generator().manual_seed(int(pixels.abs().sum() * 1000) % 10**6)
    noise = torch.randn(pixels.shape, generator=draw)
    moments = torch.randint(0, 50, (len(pixels),), generator=draw)
    return NOISE.add_noise(pixels, noise, moments), moments, noise


def name_of(model: Any, script: Script) -> str:
    """Which of the script's models this is, by its class, as scripts tell them apart."""
    return next(name for name, each in script.models.items() if isinstance(model, type(each)))


def usual_hooks(accelerator: Accelerator, script: Script) -> tuple[Hook, Hook]:
    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            if script.ema is not None:
                script.ema.save_pretrained(os.path.join(output_dir, "ema"))
            for model in models:
                plain = accelerator.unwrap_model(model)
                plain.save_pretrained(os.path.join(output_dir, name_of(plain, script)))
                weights.pop()

    def load(models: list[Any], input_dir: str) -> None:
        if script.ema is not None:
            stored = EMAModel.from_pretrained(os.path.join(input_dir, "ema"), UNet2DConditionModel)
            script.ema.load_state_dict(stored.state_dict())
        while models:
            plain = accelerator.unwrap_model(models.pop())
            found = type(plain).from_pretrained(os.path.join(input_dir, name_of(plain, script)))
            plain.load_state_dict(found.state_dict())

    return save, load


def remove_old(folder: str) -> None:
    """Before a checkpoint is saved, as many are left as there may be beside it."""
    checkpoints = [each for each in os.listdir(folder) if each.startswith("checkpoint")]
    checkpoints = sorted(checkpoints, key=lambda each: int(each.split("-")[1]))
    if len(checkpoints) >= LIMIT:
        removed = checkpoints[: len(checkpoints) - LIMIT + 1]
        logger.info(f"{len(checkpoints)} checkpoints already exist, removing {len(removed)}")
        for each in removed:
            shutil.rmtree(os.path.join(folder, each))


def log_pictures(accelerator: Accelerator, update: int) -> list[str]:
    """Names of trackers that the script has no branch for."""
    pictures, unknown = torch.zeros(2, 8, 8, 1).numpy(), []
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.writer.add_images("validation", pictures, update, dataformats="NHWC")
        elif tracker.name == "wandb":
            tracker.log({"validation": list(pictures)})
        else:
            unknown.append(tracker.name)
            logger.warning(f"image logging not implemented for {tracker.name}")
    return unknown


def new_accelerator(name: str) -> Accelerator:
    folder = f"{OUTPUT}/{name}"
    return Accelerator(
        gradient_accumulation_steps=ACCUMULATION, log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=os.path.join(folder, "logs")),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        # The order of samples is a function of seed and epoch then, whatever the number of processes.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )  # fmt: skip


def run(build: Callable[[Accelerator], Script], name: str, resume: bool) -> None:
    """Train, or go on from the latest checkpoint; the main process reports."""
    accelerator = new_accelerator(name)
    logging.basicConfig(level=logging.WARNING)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(SEED)
    folder = f"{OUTPUT}/{name}"
    if accelerator.is_main_process:
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder, exist_ok=True)
    script = build(accelerator)
    if len(script.models) > 1 or script.hooks or script.ema:
        save, load = (script.hooks or usual_hooks)(accelerator, script)
        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
    optimizer = torch.optim.AdamW(script.parameters, lr=1e-2)
    loader = torch.utils.data.DataLoader(
        script.data, shuffle=True, batch_size=2, collate_fn=script.collate, num_workers=0
    )
    scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=accelerator.num_processes,
        num_training_steps=NUM_UPDATES * accelerator.num_processes,
    )  # fmt: skip
    *prepared, optimizer, loader, scheduler = accelerator.prepare(*script.models.values(), optimizer, loader, scheduler)
    models = dict(zip(script.models, prepared, strict=True))
    if script.ema is not None:
        script.ema.to(accelerator.device)
    if accelerator.is_main_process:
        accelerator.init_trackers(name, config={"learning_rate": 1e-2, "seed": SEED})

    updates_per_epoch = math.ceil(len(loader) / ACCUMULATION)
    update, losses, unknown = 0, [], []
    if resume:
        checkpoints = sorted(
            (each for each in os.listdir(folder) if each.startswith("checkpoint")),
            key=lambda each: int(each.split("-")[1]),
        )
        accelerator.print(f"Resuming from checkpoint {checkpoints[-1]}")
        accelerator.load_state(os.path.join(folder, checkpoints[-1]))
        update = int(checkpoints[-1].split("-")[1])
    for _epoch in range(update // updates_per_epoch, math.ceil(NUM_UPDATES / updates_per_epoch)):
        for model in models.values():
            model.train()
        train_loss = 0.0
        for batch in loader:
            with accelerator.accumulate(*models.values()):
                loss = script.loss(batch, models)
                train_loss += accelerator.gather(loss.detach().repeat(2)).mean().item() / ACCUMULATION
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    if script.before_step is not None:
                        script.before_step(models)
                    accelerator.clip_grad_norm_(script.parameters, 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if script.ema is not None:
                    script.ema.step(next(iter(models.values())).parameters())
                if script.after_step is not None:
                    script.after_step(models)
                update += 1
                losses.append(train_loss)
                accelerator.log({"train_loss": train_loss}, step=update)
                train_loss = 0.0
                if accelerator.is_main_process and update % EVERY == 0:
                    remove_old(folder)
                    accelerator.save_state(os.path.join(folder, f"checkpoint-{update}"))
                    logger.info(f"Saved state to checkpoint-{update}")
            accelerator.log({"step_loss": loss.detach().item(), "lr": scheduler.get_last_lr()[0]}, step=update)
            if update >= NUM_UPDATES:
                break
        if accelerator.is_main_process:
            unknown += log_pictures(accelerator, update)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        plain = {each: accelerator.unwrap_model(model) for each, model in models.items()}
        results = {
            "losses": losses, "learning_rate": scheduler.get_last_lr(), "unknown_trackers": unknown,
            "weights": {each: weight_of(model) for each, model in plain.items()},
            "trackers": [tracker.name for tracker in accelerator.trackers],
            "checkpoints": sorted(each for each in os.listdir(folder) if each.startswith("checkpoint")),
            "folders": sorted(entry.name for entry in os.scandir(f"{folder}/checkpoint-6") if entry.is_dir()),
            **script.results,
        }  # fmt: skip
        if script.ema is not None:
            script.ema.copy_to(next(iter(plain.values())).parameters())
            results["averaged"] = weight_of(next(iter(plain.values())))
        if script.final is not None:
            results.update(script.final(accelerator, plain, folder))
    accelerator.end_training()
    if accelerator.is_main_process:
        events = EventAccumulator(os.path.join(folder, "logs", name)).Reload().Tags()
        report(**results, scalars=sorted(set(events["scalars"])), pictures=events["images"])
