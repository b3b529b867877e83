# The blog post's hand-written DDP listing. Corrected: one name for the optimizer; a small Transformer that gets its target too. "cuda" is "cpu"; the process group is begun.
import os
import torch
import torch.nn.functional as F
from datasets import load_dataset
from torch.utils.data import DistributedSampler
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ.get("LOCAL_RANK", -1))
device = device = torch.device("cpu")
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo")

model = torch.nn.Transformer(8, 2, 1, 1, 16).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())

dataset = load_dataset('my_dataset')
sampler = DistributedSampler(dataset)
data = torch.utils.data.DataLoader(dataset, sampler=sampler)

model.train()
for epoch in range(10):
    sampler.set_epoch(epoch)
    for source, targets in data:
        source = source.to(device)
        targets = targets.to(device)

        optimizer.zero_grad()

        output = model(source, source)
        loss = F.cross_entropy(output, targets)

        loss.backward()

        optimizer.step()
