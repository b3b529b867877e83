"""The classifier with a worker per device: options, spawn, a rate that drops, the best checkpoint."""

import argparse
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.utils.data
import torch.utils.data.distributed
from torch.optim.lr_scheduler import StepLR

parser = argparse.ArgumentParser(description="Train a classifier")
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int, help="of all devices of this node together")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--world-size", default=-1, type=int, help="number of nodes")
parser.add_argument("--rank", default=-1, type=int, help="rank of this node")
parser.add_argument("--dist-url", default="env://", type=str)
parser.add_argument("--dist-backend", default="gloo", type=str)
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--multiprocessing-distributed", action="store_true")
best_acc1 = 0


def main():
    args = parser.parse_args()
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    ngpus_per_node = torch.cuda.device_count() if torch.cuda.is_available() else 2
    if args.multiprocessing_distributed:
        args.world_size = ngpus_per_node * args.world_size
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
    else:
        main_worker(args.gpu, ngpus_per_node, args)


def main_worker(gpu, ngpus_per_node, args):
    global best_acc1
    args.gpu = gpu
    if args.distributed:
        if args.dist_url == "env://" and args.rank == -1:
            args.rank = int(os.environ["RANK"])
        if args.multiprocessing_distributed:
            args.rank = args.rank * ngpus_per_node + gpu
        dist.init_process_group(
            backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
        )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    if args.distributed:
        args.batch_size = int(args.batch_size / ngpus_per_node)
        model = torch.nn.parallel.DistributedDataParallel(model)
    device = torch.device("cpu")
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])

    x = torch.randn(96, 8)
    y = x[:, :3].argmax(1)
    train_dataset = torch.utils.data.TensorDataset(x[:64], y[:64])
    val_dataset = torch.utils.data.TensorDataset(x[64:], y[64:])
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset, shuffle=False)
    else:
        train_sampler = None
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=args.batch_size)

    for epoch in range(start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, device)
        acc1 = validate(val_loader, model, device)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if not args.multiprocessing_distributed or args.rank % ngpus_per_node == 0:
            state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(state, is_best)
    print(f"final {best_acc1:.4f}")


def train(loader, model, criterion, optimizer, epoch, device):
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time, end = time.time() - end, time.time()


def validate(loader, model, device):
    model.eval()
    correct = torch.zeros(())
    with torch.no_grad():
        for images, target in loader:
            correct += (model(images.to(device)).argmax(1) == target.to(device)).sum()
    return correct.item() / len(loader.dataset)


def save_checkpoint(state, is_best):
    path = os.path.join(tempfile.gettempdir(), f"migrate_{os.getpid()}.pth.tar")
    torch.save(state, path)
    if is_best and os.path.exists(path):
        shutil.copyfile(path, path + ".best")
        os.remove(path + ".best")
    if os.path.exists(path):
        os.remove(path)


if __name__ == "__main__":
    main()
