"""Right scripts of the shapes that people write. `faults.py` plants mistakes in them, `right.py` right variations."""

from __future__ import annotations

from typing import Final

#: One file from top to bottom, with an evaluation, a schedule, accumulation and checkpoints.
FLAT: Final = """\
import json
import os
import shutil
import time

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from tqdm.auto import tqdm

STEPS = 4
set_seed(42)
accelerator = Accelerator(gradient_accumulation_steps=STEPS)
x = torch.randn(256, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
train_data, held_out = random_split(data, [192, 64])
train_loader = DataLoader(train_data, batch_size=16, shuffle=True)
eval_loader = DataLoader(held_out, batch_size=16)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=3 * len(train_loader))
model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, train_loader, eval_loader, scheduler
)
if os.path.exists("state"):
    accelerator.load_state("state")
best = 0.0
for epoch in range(3):
    model.train()
    for inputs, targets in tqdm(train_loader, disable=not accelerator.is_local_main_process):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    correct, total = 0, 0
    for inputs, targets in eval_loader:
        with torch.no_grad():
            predictions = model(inputs).argmax(-1)
        predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        correct += (predictions == targets).sum().item()
        total += len(targets)
    accuracy = correct / total
    accelerator.print(f"epoch {epoch}: {accuracy:.3f}")
    if accelerator.is_main_process:
        with open("results.jsonl", "a") as file:
            file.write(json.dumps({"epoch": epoch, "accuracy": accuracy}) + "\\n")
    if accuracy > best:
        best = accuracy
        accelerator.save_state("state")
    if accuracy > 0.99:
        break
accelerator.wait_for_everyone()
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save(weights, "model.pt")
"""

#: A class that holds everything, and knows whether it is the main process under a name of its own.
TRAINER: Final = """\
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Trainer:
    def __init__(self, epochs, batch_size):
        self.epochs = epochs
        self.accelerator = Accelerator()
        self.is_main = self.accelerator.is_main_process
        x = torch.linspace(-1, 1, 128).unsqueeze(1)
        self.loader = DataLoader(TensorDataset(x, x.sin()), batch_size=batch_size, shuffle=True)
        self.val_loader = DataLoader(TensorDataset(x, x.sin()), batch_size=batch_size)
        self.model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model, self.optimizer, self.loader, self.val_loader = self.accelerator.prepare(
            self.model, self.optimizer, self.loader, self.val_loader
        )

    def training_step(self, batch):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def mean(self, value):
        return self.accelerator.reduce(value, "mean").item()

    def validate(self):
        self.model.eval()
        errors = []
        with torch.no_grad():
            for inputs, targets in self.val_loader:
                error = (self.model(inputs) - targets).square().flatten()
                errors.append(self.accelerator.gather_for_metrics(error))
        return torch.cat(errors).mean().item()

    def save(self, epoch):
        model = self.accelerator.unwrap_model(self.model)
        torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")

    def log(self, text):
        if self.is_main:
            print(text)

    def fit(self):
        for epoch in range(self.epochs):
            self.model.train()
            for batch in self.loader:
                loss = self.training_step(batch)
            loss = self.mean(loss)
            error = self.validate()
            self.log(f"{epoch}: {loss:.4f} {error:.4f}")
            if self.is_main:
                self.save(epoch)
            self.accelerator.wait_for_everyone()


if __name__ == "__main__":
    set_seed(0)
    Trainer(epochs=3, batch_size=32).fit()
"""

#: Functions that hand everything to each other, and options.
FUNCTIONS: Final = """\
import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Linear(10, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Linear(width, 3)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))


def get_loaders(accelerator, args):
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(300, 10, generator=generator)
    y = x[:, :3].argmax(1)
    train = DataLoader(TensorDataset(x[:200], y[:200]), batch_size=args.batch_size, shuffle=True)
    test = DataLoader(TensorDataset(x[200:], y[200:]), batch_size=args.batch_size)
    return train, test


def is_first():
    return int(os.environ.get("RANK", "0")) == 0


def train_one_epoch(accelerator, model, loader, optimizer, scheduler):
    model.train()
    running = torch.zeros((), device=accelerator.device)
    for step, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        running += loss.detach()
    return accelerator.reduce(running / len(loader), "mean").item()


def evaluate(accelerator, model, loader):
    model.eval()
    outputs, references = [], []
    with torch.no_grad():
        for inputs, labels in loader:
            scores, labels = accelerator.gather_for_metrics((model(inputs), labels))
            outputs.append(scores.argmax(-1).cpu())
            references.append(labels.cpu())
    return (torch.cat(outputs) == torch.cat(references)).float().mean().item()


def main(args):
    set_seed(args.seed)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    train_loader, test_loader = get_loaders(accelerator, args)
    model = Net(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    patience = 0
    best = 0.0
    for epoch in range(args.epochs):
        loss = train_one_epoch(accelerator, model, train_loader, optimizer, scheduler)
        accuracy = evaluate(accelerator, model, test_loader)
        if is_first():
            print(epoch, loss, accuracy)
        if accuracy > best:
            best, patience = accuracy, 0
        else:
            patience += 1
        if patience >= 3:
            break
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    accelerator.save(unwrapped.state_dict(), args.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--output", default="net.pt")
    main(parser.parse_args())
"""

#: A language model in the style of nanoGPT: ranks, a `while` loop, batches by `next`.
MASTER: Final = """\
import os
import time

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

max_iters = 100
eval_interval = 20
batch_size = 12
out_dir = "out"

accelerator = Accelerator()
rank = accelerator.process_index
world_size = accelerator.num_processes
master_process = rank == 0
seed_offset = rank
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337)
tokens = torch.randint(0, 64, (4096,))
windows = tokens.unfold(0, 17, 8)
loader = DataLoader(TensorDataset(windows), batch_size=batch_size, shuffle=True)
val_loader = DataLoader(TensorDataset(windows[:64]), batch_size=batch_size)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        return self.head(self.dropout(self.embedding(tokens)))


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
model, optimizer, loader, val_loader = accelerator.prepare(model, optimizer, loader, val_loader)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = []
    for (tokens,) in val_loader:
        losses.append(loss_of(model, tokens))
    mean = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
    model.train()
    return mean


iter_num = 0
best_val_loss = 1e9
started = time.time()
batches = iter(loader)
while True:
    if iter_num % eval_interval == 0:
        val_loss = estimate_loss()
        if master_process:
            print(f"step {iter_num}: {val_loss:.4f} after {time.time() - started:.0f} s")
        if val_loss < best_val_loss:
            best_val_loss = val_loss
            weights = accelerator.get_state_dict(model)
            if master_process:
                torch.save({"model": weights, "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    try:
        (batch,) = next(batches)
    except StopIteration:
        batches = iter(loader)
        (batch,) = next(batches)
    loss = loss_of(model, batch)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if iter_num > max_iters:
        break
"""

#: Two networks that play against each other, with noise.
GAN: Final = """\
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(3)
accelerator = Accelerator()
real_data = torch.randn(512, 2) * 0.5 + 1
dataloader = DataLoader(TensorDataset(real_data), batch_size=64, shuffle=True, drop_last=True)
netG = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
netD = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4)
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4)
netG, netD, optimizerG, optimizerD, dataloader = accelerator.prepare(netG, netD, optimizerG, optimizerD, dataloader)
set_seed(3, device_specific=True)
for epoch in range(5):
    for i, (real,) in enumerate(dataloader):
        ones = torch.ones(len(real), 1, device=accelerator.device)
        optimizerD.zero_grad()
        noise = torch.randn(len(real), 4, device=accelerator.device)
        fake = netG(noise)
        errD = criterion(netD(real), ones) + criterion(netD(fake.detach()), 0 * ones)
        accelerator.backward(errD)
        optimizerD.step()
        if i % 2 == 0:
            optimizerG.zero_grad()
            errG = criterion(netD(netG(noise)), ones)
            accelerator.backward(errG)
            optimizerG.step()
        if accelerator.is_main_process and i % 10 == 0:
            print(epoch, i, errD.item())
accelerator.save_model(netG, "generator")
"""

#: Fine-tuning with transformers, in the form of its own examples.
FINE_TUNE: Final = """\
import logging

import datasets
import evaluate
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_scheduler

logger = get_logger(__name__)


def main():
    accelerator = Accelerator(log_with="tensorboard", project_dir="runs")
    set_seed(42)
    raw = datasets.load_dataset("glue", "mrpc")
    tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
    model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased", num_labels=2)
    with accelerator.main_process_first():
        processed = raw.map(lambda row: tokenizer(row["sentence1"], row["sentence2"]), batched=True)
    train_dataloader = DataLoader(processed["train"], shuffle=True, batch_size=8)
    eval_dataloader = DataLoader(processed["validation"], batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    num_epochs = 3
    lr_scheduler = get_scheduler(
        "linear", optimizer, num_warmup_steps=100, num_training_steps=len(train_dataloader) * num_epochs
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    accelerator.init_trackers("mrpc")
    metric = evaluate.load("glue", "mrpc")
    progress_bar = tqdm(range(num_epochs * len(train_dataloader)), disable=not accelerator.is_local_main_process)
    for epoch in range(num_epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            progress_bar.update(1)
        model.eval()
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            metric.add_batch(predictions=predictions, references=references)
        eval_metric = metric.compute()
        logger.info(f"epoch {epoch}: {eval_metric}")
        mean_loss = accelerator.reduce(total_loss, "mean").item() / len(train_dataloader)
        accelerator.log({"accuracy": eval_metric["accuracy"], "train_loss": mean_loss}, step=epoch)
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        "output", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained("output")
    accelerator.end_training()


if __name__ == "__main__":
    main()
"""
