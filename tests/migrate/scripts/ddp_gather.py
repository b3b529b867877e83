"""DDP by hand that gathers by hand: predictions in lists of tensors, objects of all ranks, a rest that counts."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
parser.add_argument("--batch_size", type=int, default=8)
args = parser.parse_args([])


def gather_tensor(tensor, world_size):
    gathered = [torch.zeros_like(tensor) for _ in range(world_size)]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered, dim=0)


def evaluate(model, loader, device, world_size, dataset):
    model.eval()
    logits, labels = [], []
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            logits.append(model(x))
            labels.append(y)
    logits = gather_tensor(torch.cat(logits), world_size)[: len(dataset)]
    labels = gather_tensor(torch.cat(labels), world_size)[: len(dataset)]
    return len(labels), (logits.argmax(1) == labels).float().mean().item()


def main():
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    world_size = dist.get_world_size()
    rank = dist.get_rank()
    device = torch.device("cuda", args.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(3)
    x = torch.randn(64 + 30, 5)
    y = x[:, :3].argmax(1)
    train_set, test_set = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    train_sampler = DistributedSampler(train_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=args.batch_size, sampler=DistributedSampler(test_set, shuffle=False))
    model = nn.Linear(5, 3).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        model.train()
        running_loss = torch.zeros(1, device=device)
        for inputs, targets in train_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running_loss += loss.detach() * inputs.size(0)
        epoch_loss = running_loss / len(train_loader.sampler)
        dist.all_reduce(epoch_loss)
        epoch_loss /= world_size
        count, accuracy = evaluate(model, test_loader, device, world_size, test_set)
        reports = [None] * world_size
        dist.all_gather_object(reports, {"rank": rank, "loss": epoch_loss.item()})
        if rank == 0:
            print("final", epoch, len(reports), epoch_loss.item(), count, round(accuracy, 5))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
