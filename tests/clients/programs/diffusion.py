"""The loop of diffusers' unconditional image generation on a tiny UNet: EMA, save and load hooks, a tracker, resume."""

from __future__ import annotations

import math
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from report import OUTPUT, report, weight_of
from sklearn.datasets import load_digits

from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.logging import get_logger
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

logger = get_logger(__name__, log_level="INFO")
NUM_UPDATES, SAVED_AT, ACCUMULATION = 8, 3, 2


def unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


def main(resume: bool) -> None:
    folder = f"{OUTPUT}/diffusion"
    accelerator = Accelerator(
        gradient_accumulation_steps=ACCUMULATION,
        # The order of samples is a function of seed and epoch then, whatever the number of processes.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        log_with="tensorboard" if "tensorboard" in sys.argv else None,
        project_config=ProjectConfiguration(project_dir=folder, logging_dir=os.path.join(folder, "logs")),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=7200))],
    )
    logger.info(accelerator.state, main_process_only=False)
    set_seed(0)
    model = unet()
    schedule = {"use_ema_warmup": True, "inv_gamma": 1.0, "power": 0.75, "model_cls": UNet2DModel}
    ema = EMAModel(model.parameters(), decay=0.999, model_config=model.config, **schedule)

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            ema.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for each in models:
                each.save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load(models: list[Any], input_dir: str) -> None:
        ema.load_state_dict(EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel).state_dict())
        for _ in range(len(models)):
            each = models.pop()
            stored = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            each.register_to_config(**stored.config)
            each.load_state_dict(stored.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.tensor(load_digits().images[:24] / 8 - 1, dtype=torch.float32).unsqueeze(1)
    loader = torch.utils.data.DataLoader([{"input": image} for image in images], batch_size=2, shuffle=True)
    scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=NUM_UPDATES * accelerator.num_processes,
    )  # fmt: skip
    noise_scheduler = DDPMScheduler(num_train_timesteps=50)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    ema.to(accelerator.device)
    if accelerator.is_main_process:
        accelerator.init_trackers("train_unconditional", config={"learning_rate": 1e-3})

    updates_per_epoch = math.ceil(len(loader) / ACCUMULATION)
    update, losses = 0, []
    if resume:
        accelerator.load_state(os.path.join(folder, f"checkpoint-{SAVED_AT}"))
        update = SAVED_AT
    for _epoch in range(update // updates_per_epoch, math.ceil(NUM_UPDATES / updates_per_epoch)):
        model.train()
        for batch in loader:
            clean = batch["input"]
            draw = torch.Generator().manual_seed(int(clean.abs().sum() * 1000) % 10**6)
            noise = torch.randn(clean.shape, generator=draw)
            failure_time = torch.randint(0, 50, (clean.shape[0],), generator=draw)
            with accelerator.accumulate(model):
                guess = model(noise_scheduler.add_noise(clean, noise, failure_time), failure_time).sample
                loss = torch.nn.functional.mse_loss(guess.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
                update += 1
                losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
                accelerator.log({"loss": losses[-1], "lr": scheduler.get_last_lr()[0]}, step=update)
                if update == SAVED_AT and not resume:
                    accelerator.save_state(os.path.join(folder, f"checkpoint-{SAVED_AT}"))
            if update >= NUM_UPDATES:
                break
    accelerator.wait_for_everyone()
    plain = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        pipeline = DDPMPipeline(unet=plain, scheduler=noise_scheduler)
        pipeline.set_progress_bar_config(disable=True)
        made = pipeline(generator=torch.Generator().manual_seed(0), num_inference_steps=2, output_type="np").images
        pipeline.save_pretrained(os.path.join(folder, "final"))
        report(
            losses=losses, weight=weight_of(plain), learning_rate=scheduler.get_last_lr(), image=list(made.shape),
            model=type(plain).__name__,
        )  # fmt: skip
    accelerator.end_training()


if __name__ == "__main__":
    main("resume" in sys.argv)
