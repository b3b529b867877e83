"""A timm network with transforms of torchvision in a loop of one's own, and a vision transformer in a Trainer."""

from __future__ import annotations

from typing import Any

import timm
import torch
from report import OUTPUT, report, weight_of
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, ViTImageProcessor

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed


class Digits(Dataset):
    """Handwritten digits, as pictures."""

    def __init__(self, start: int, stop: int, change: Any, name: str) -> None:
        data = load_digits()
        self.images, self.labels = data.images[start:stop].astype("uint8") * 15, data.target[start:stop]
        self.change, self.name = change, name

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {self.name: self.change(self.images[index]), "labels": int(self.labels[index])}


def loop() -> dict[str, Any]:
    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=order)
    set_seed(0)
    change = transforms.Compose([transforms.ToPILImage(), transforms.Resize(32), transforms.ToTensor()])
    loader = DataLoader(Digits(0, 40, change, "image"), batch_size=4, shuffle=True)
    held_out = DataLoader(Digits(40, 59, change, "image"), batch_size=4)
    model = timm.create_model("test_vit", pretrained=False, num_classes=10, in_chans=1, img_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, epochs=1, steps_per_epoch=len(loader))
    model, optimizer, loader, held_out, schedule = accelerator.prepare(model, optimizer, loader, held_out, schedule)
    losses, right, seen = [], 0, 0
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    model.eval()
    for batch in held_out:
        with torch.no_grad():
            guesses = model(batch["image"]).argmax(-1)
        guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
        right, seen = right + int((guesses == labels).sum()), seen + len(labels)
    return {"losses": losses, "right": right, "seen": seen, "weight": weight_of(accelerator.unwrap_model(model))}


def trainer() -> dict[str, Any]:
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=16, patch_size=4, num_labels=10))

    def change(image: Any) -> torch.Tensor:
        colours = torch.as_tensor(image).expand(3, -1, -1)
        return processor(colours, return_tensors="pt")["pixel_values"][0]

    arguments = TrainingArguments(
        f"{OUTPUT}/images", max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    data = {
        "train_dataset": Digits(0, 40, change, "pixel_values"),
        "eval_dataset": Digits(40, 59, change, "pixel_values"),
    }
    trained = Trainer(model, arguments, **data)
    trained.train()
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    return {"losses": losses, "evaluation": trained.evaluate()["eval_loss"]}


report(loop=loop(), trainer=trainer())
