"""train.py in the manner of timm: a scaler that does the step, autocast as a partial, meters reduced by a helper."""
import argparse
import logging
import os
import time
from collections import OrderedDict
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

_logger = logging.getLogger('train')
parser = argparse.ArgumentParser(description='PyTorch ImageNet Training')
parser.add_argument('-b', '--batch-size', type=int, default=8)
parser.add_argument('--epochs', type=int, default=2)
parser.add_argument('--amp', action='store_true', default=False)
parser.add_argument('--amp-dtype', default='float16', type=str)
parser.add_argument('--clip-grad', type=float, default=1.0)
parser.add_argument('--local_rank', default=0, type=int)


class AverageMeter:
    def __init__(self):
        self.sum, self.count, self.avg = 0, 0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class NativeScaler:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cuda", enabled=False)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, need_update=True):
        self._scaler.scale(loss).backward()
        if need_update:
            if clip_grad is not None:
                self._scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()


def reduce_tensor(tensor, n):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= n
    return rt


def is_primary(args):
    return args.rank == 0


def init_distributed_device(args):
    args.distributed = False
    args.world_size = 1
    args.rank = 0
    args.local_rank = 0
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        args.local_rank = int(os.environ['LOCAL_RANK'])
        dist.init_process_group(backend='gloo', init_method='env://')
        args.world_size = dist.get_world_size()
        args.rank = dist.get_rank()
        args.distributed = True
    args.device = 'cpu'
    return torch.device(args.device)


def create_loader(dataset, batch_size, is_training, distributed):
    sampler = None
    if distributed:
        sampler = DistributedSampler(dataset, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=is_training)


def main():
    args = parser.parse_args([])
    device = init_distributed_device(args)
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    model.to(device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    amp_autocast = suppress
    amp_dtype = torch.bfloat16 if args.amp_dtype == 'bfloat16' else torch.float16
    loss_scaler = None
    if args.amp:
        amp_autocast = partial(torch.autocast, device_type=device.type, dtype=amp_dtype)
        loss_scaler = NativeScaler()
    if args.distributed:
        if is_primary(args):
            _logger.info("Using native Torch DistributedDataParallel.")
        model = NativeDDP(model)
    x = torch.randn(64 + 30, 6)
    y = x[:, :4].argmax(1)
    loader_train = create_loader(TensorDataset(x[:64], y[:64]), args.batch_size, True, args.distributed)
    loader_eval = create_loader(TensorDataset(x[64:], y[64:]), args.batch_size, False, args.distributed)
    train_loss_fn = nn.CrossEntropyLoss().to(device=device)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    for epoch in range(args.epochs):
        if args.distributed and hasattr(loader_train.sampler, 'set_epoch'):
            loader_train.sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, loader_train, optimizer, train_loss_fn, args, device, amp_autocast, loss_scaler)
        eval_metrics = validate(model, loader_eval, train_loss_fn, args, device, amp_autocast)
        lr_scheduler.step()
        if is_primary(args):
            print('final', epoch, eval_metrics['count'], eval_metrics['loss'], eval_metrics['top1'])


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, device, amp_autocast, loss_scaler):
    losses_m = AverageMeter()
    model.train()
    for batch_idx, (input, target) in enumerate(loader):
        input, target = input.to(device), target.to(device)
        with amp_autocast():
            output = model(input)
            loss = loss_fn(output, target)
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer, clip_grad=args.clip_grad, parameters=model.parameters())
        else:
            loss.backward()
            if args.clip_grad is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
        if args.distributed:
            reduced_loss = reduce_tensor(loss.data, args.world_size)
            losses_m.update(reduced_loss.item() * args.world_size, input.size(0))


def validate(model, loader, loss_fn, args, device, amp_autocast):
    losses_m, top1_m = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for batch_idx, (input, target) in enumerate(loader):
            input = input.to(device)
            target = target.to(device)
            with amp_autocast():
                output = model(input)
            loss = loss_fn(output, target)
            acc1 = (output.argmax(1) == target).float().mean()
            if args.distributed:
                reduced_loss = reduce_tensor(loss.data, args.world_size)
                acc1 = reduce_tensor(acc1, args.world_size)
            else:
                reduced_loss = loss.data
            losses_m.update(reduced_loss.item(), input.size(0))
            top1_m.update(acc1.item(), output.size(0))
    return OrderedDict([('count', top1_m.count), ('loss', losses_m.avg), ('top1', top1_m.avg)])


if __name__ == '__main__':
    main()
