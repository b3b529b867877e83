"""The scripts of the corpus, each right as it stands. `corpus.py` plants faults in them."""

from __future__ import annotations

from typing import Final

#: A loop with all that a careful one has. Pieces in it are replaced.
LOOP: Final = """\
import copy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(1)
accelerator = Accelerator()
x = torch.randn(64, 6)
data = TensorDataset(x, x.sum(1, keepdim=True), torch.rand(64, 1) > 0.3)
loader = DataLoader(data, 8, shuffle=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.gate = nn.Linear(6, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, inputs):
        gate = self.gate(inputs).sigmoid()
        return self.last(torch.tanh(self.first(inputs)) * gate)


model = Net()
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
accelerator.register_for_checkpointing(average)
for epoch in range(3):
    for inputs, targets, mask in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if accelerator.sync_gradients:
                with torch.no_grad():
                    for mine, theirs in zip(average.parameters(), model.parameters()):
                        mine.lerp_(theirs, 0.1)
            scheduler.step()
            optimizer.zero_grad()
"""
#: A loop with torch's own DDP.
BY_HAND: Final = """\
import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
torch.manual_seed(1)
x = torch.randn(64, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

#: A model and an optimizer for each fold, and a parameter of no module.
FOLDS: Final = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(1)
x = torch.randn(64, 6)
for fold in range(2):
    loader = DataLoader(TensorDataset(x[fold::2], x[fold::2].sum(1, keepdim=True)), 8)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""

#: A language model whose layers have a plan of tensor parallelism, and whose sequences can be split.
SEQUENCES: Final = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(1)
accelerator = Accelerator()
tokens = torch.randint(0, 11, (64, 9))
loader = DataLoader(TensorDataset(tokens), 8, shuffle=True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.parts, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        parts = self.parts(self.norm(x)).unflatten(-1, (-1, 3, 2)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*parts.unbind(-2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    tp_plan = {"*.*.parts": "colwise", "*.*.out": "rowwise", "*.*.up": "colwise", "*.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(8, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 11)

    def forward(self, tokens, places):
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for (batch,) in loader:
        inputs, targets = batch[:, :-1].clone(), batch[:, 1:].clone()
        places = torch.arange(8).expand(len(batch), -1).clone()
        buffers = [inputs, targets, places]
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
        ):
            loss = F.cross_entropy(model(inputs, places).flatten(0, 1), targets.flatten())
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
#: A layer of experts, with a router, under a plan of expert parallelism.
EXPERTS: Final = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator, ParallelismConfig
from accelerate.plugins.parallelism import ExpertParallelConfig
from accelerate.utils import set_seed

set_seed(1)
config = ParallelismConfig(ep_size=2, ep_handler=ExpertParallelConfig(plan=["experts"]))
accelerator = Accelerator(parallelism_config=config)
x = torch.randn(64, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, tokens, counts):
        parts = tokens.split(counts.tolist())
        return torch.cat([torch.tanh(part @ weight) for part, weight in zip(parts, self.weight)])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.entrance, self.router = nn.Linear(6, 8), nn.Linear(8, 4)
        self.experts = Experts()
        self.last = nn.Linear(8, 1)

    def forward(self, inputs):
        hidden = self.entrance(inputs)
        weights, choice = self.router(hidden).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=4)
        found = self.experts(hidden[order], counts)
        mixed = torch.zeros_like(hidden).index_copy(0, order, found) * weights.unsqueeze(-1)
        return self.last(hidden + mixed)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
#: A model whose layers can be stages of a pipeline.
STAGES: Final = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(1)
accelerator = Accelerator()
x = torch.randn(64, 6)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = accelerator.pipeline_step(model, (inputs, targets), nn.functional.mse_loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""
#: A stream with a state of its own.
STREAM: Final = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(1)
accelerator = Accelerator()
rows = torch.randn(64, 7)


class Rows(IterableDataset):
    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < len(rows):
            self.next += 1
            yield rows[self.next - 1]
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


loader = DataLoader(Rows(), 8)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch[:, :6]), batch[:, 6:])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
