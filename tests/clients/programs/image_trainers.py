"""Trainers of image generators: denoising-diffusion-pytorch's, rectified-flow-pytorch's and imagen-pytorch's.

They keep their losses to themselves, so a hook on the model collects what it returns.

python image_trainers.py NAME...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from report import OUTPUT, report, weight_of
from sklearn.datasets import load_digits

from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, gather_object, set_seed

FOLDER = Path(OUTPUT) / "image_trainers"


def digits(count: int) -> Path:
    """A folder of small pictures, written by the process that comes first."""
    folder = FOLDER / f"digits{count}_{os.environ.get('RANK', '0')}"
    folder.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(load_digits().images[:count]):
        Image.fromarray((image * 15).astype(np.uint8)).resize((16, 16)).save(folder / f"{index:03}.png")
    return folder


def collect(model: torch.nn.Module) -> tuple[list[float], list[list[float]]]:
    """(losses, the sum of each picture that was given): those of every call of ``model`` from now on."""
    losses: list[float] = []
    pictures: list[list[float]] = []

    def keep(_module: torch.nn.Module, given: Any, returned: Any) -> None:
        loss = returned[0] if isinstance(returned, tuple) else returned
        losses.append(loss.item())
        pictures.append(given[0].double().sum((1, 2, 3)).tolist())

    model.register_forward_hook(keep)
    return losses, pictures


def everywhere(losses: list[float]) -> list[list[float]]:
    """The losses of every process."""
    return gather_object([losses])


def together(pictures: list[list[float]]) -> list[list[float]]:
    """What all processes were given in each call, whoever was given it."""
    shares = gather_object([pictures])
    return [sorted(round(each, 4) for share in shares for each in share[call]) for call in range(len(pictures))]


def denoising_trainer() -> tuple[Any, list[float], list[list[float]]]:
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

    set_seed(0)
    diffusion = GaussianDiffusion(
        Unet(dim=8, dim_mults=(1, 2), channels=1, flash_attn=False), image_size=16, timesteps=20, sampling_timesteps=2
    )
    losses, pictures = collect(diffusion)
    trainer = Trainer(
        diffusion, digits(100), train_batch_size=16, gradient_accumulate_every=2, train_lr=1e-3, train_num_steps=6,
        ema_update_every=2, save_and_sample_every=2, num_samples=4, calculate_fid=False, augment_horizontal_flip=False,
        results_folder=str(FOLDER / "denoising_diffusion"),
    )  # fmt: skip
    trainer.ds.paths.sort()  # the file system's order otherwise
    return trainer, losses, pictures


def denoising_diffusion() -> dict[str, Any]:
    """The main process alone averages, samples and saves."""
    trainer, losses, pictures = denoising_trainer()
    trainer.train()
    # Six whole batches: the second epoch's order follows from how much noise each process drew before.
    results = {"losses": everywhere(losses), "pictures": together(pictures[:6]), "weight": weight_of(trainer.model)}
    if trainer.accelerator.is_main_process:
        files = sorted(os.listdir(FOLDER / "denoising_diffusion"))
        results.update(averaged=weight_of(trainer.ema.ema_model), files=files)
    return results


def denoising_diffusion_resumed() -> dict[str, Any]:
    """Goes on from what the main process saved."""
    trainer, losses, _pictures = denoising_trainer()
    trainer.load(2)
    first = trainer.step
    trainer.train()
    return {"from": first, "losses": everywhere(losses), "weight": weight_of(trainer.model)}


def rectified_flow() -> dict[str, Any]:
    """Accumulates, logs, averages on the main process alone."""
    from rectified_flow_pytorch import ImageDataset, RectifiedFlow, Trainer, Unet

    set_seed(0)
    flow = RectifiedFlow(Unet(dim=8, dim_mults=(1, 2), channels=1))
    losses, pictures = collect(flow)
    data = ImageDataset(digits(40), 16)
    data.paths.sort()
    # The order of samples is a function of seed and epoch then, whatever the number of processes.
    options: dict[str, Any] = {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}
    options["kwargs_handlers"] = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    trainer = Trainer(
        flow, dataset=data, num_train_steps=9, learning_rate=1e-3, batch_size=8, grad_accum_every=2,
        checkpoint_every=4, save_results_every=4, num_samples=4, checkpoints_folder=str(FOLDER / "rectified_flow"),
        results_folder=str(FOLDER / "rectified_flow"), ema_kwargs={"update_every": 1, "update_after_step": 1},
        accelerate_kwargs=options,
    )  # fmt: skip
    trainer()
    results = {"losses": everywhere(losses), "pictures": together(pictures), "weight": weight_of(trainer.model)}
    if trainer.is_main:
        results.update(averaged=weight_of(trainer.ema_model), files=sorted(os.listdir(FOLDER / "rectified_flow")))
    return results


def know_text_encoder() -> None:
    """imagen-pytorch asks for a configuration of T5 when it is imported: put a small one where the hub's lie."""
    from transformers import T5Config

    hub = Path(os.environ["HF_HOME"]) / "hub" / "models--google--t5-v1_1-base"
    snapshot = hub / "snapshots" / "small"
    if not snapshot.is_dir():
        T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(snapshot)
        (hub / "refs").mkdir(exist_ok=True)
        (hub / "refs" / "main").write_text("small")


def imagen_trainer() -> Any:
    know_text_encoder()
    from imagen_pytorch import Imagen, ImagenTrainer, Unet

    set_seed(0)
    shape: dict[str, Any] = {"dim": 8, "channels": 1, "dim_mults": (1, 2), "num_resnet_blocks": 1, "attn_heads": 2,
                             "attn_dim_head": 4, "layer_attns": False, "layer_cross_attns": False}  # fmt: skip
    networks = [Unet(cond_on_text=False, **shape), Unet(cond_on_text=False, lowres_cond=True, **shape)]
    cascade = Imagen(networks, image_sizes=(8, 16), timesteps=4, channels=1, condition_on_text=False)
    trainer = ImagenTrainer(
        cascade, only_train_unet_number=1, lr=1e-3, max_grad_norm=1.0, warmup_steps=3, cosine_decay_max_steps=20,
        verbose=False,
        # The order of samples is a function of seed and epoch then, whatever the number of processes.
        accelerate_dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        split_batches=True, ema_update_every=2,
    )  # fmt: skip
    images = torch.tensor(load_digits().images[:40] / 16, dtype=torch.float32).unsqueeze(1)
    data = torch.utils.data.TensorDataset(torch.nn.functional.interpolate(images, (16, 16)))
    trainer.add_train_dataset(data, batch_size=8, shuffle=True)
    trainer.add_valid_dataset(data, batch_size=8)
    trainer.prepare()
    return trainer


def imagen() -> dict[str, Any]:
    """Trains one network of two with a scaler and schedules of the library's own, saves, and goes on from there."""
    trainer = imagen_trainer()
    losses = [trainer.train_step(unet_number=1, max_batch_size=4) for _ in range(6)]
    results = {
        "losses": everywhere(losses), "checked": trainer.valid_step(unet_number=1), "steps": trainer.num_steps_taken(1),
        "learning_rate": trainer.get_lr(1), "weight": weight_of(trainer.imagen),
    }  # fmt: skip
    trainer.save(str(FOLDER / "imagen.pt"))
    return results | ({"averaged": weight_of(trainer.ema_unets)} if trainer.is_main else {})


def imagen_resumed() -> dict[str, Any]:
    """Goes on from what was saved."""
    if not (FOLDER / "imagen.pt").exists():
        imagen()
    trainer = imagen_trainer()
    trainer.load(str(FOLDER / "imagen.pt"))
    losses = [trainer.train_step(unet_number=1) for _ in range(3)]
    return {"losses": everywhere(losses), "steps": trainer.num_steps_taken(1), "weight": weight_of(trainer.imagen)}


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    programs: dict[str, Callable[[], dict[str, Any]]] = {
        "denoising_diffusion": denoising_diffusion,
        "denoising_diffusion_resumed": denoising_diffusion_resumed,
        "rectified_flow": rectified_flow,
        "imagen": imagen,
        "imagen_resumed": imagen_resumed,
    }
    report(**{name: programs[name]() for name in sys.argv[1:]})
