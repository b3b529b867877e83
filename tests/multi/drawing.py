"""Draw random numbers in many ways, and after each read a loader whose order tells what was drawn."""

import json
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, RandomSampler

from accelerate import Accelerator, init_empty_weights
from accelerate.utils import set_seed


class Net(nn.Module):
    def __init__(self, make=None, forward=None):
        super().__init__()
        self.first, self.table, self.last = nn.Linear(6, 40), nn.Embedding(7, 3), nn.Linear(40, 1)
        self.made = make(self) if make else None
        self.run = forward

    def forward(self, x):
        hidden = self.first(x) + self.table(torch.zeros(1, dtype=torch.long)).sum()
        return self.last(hidden if self.run is None else self.run(self, hidden))


def initial(fill, *shape):
    return lambda model: nn.Parameter(fill(torch.empty(shape or (5, 7))))


def filled(fill, *shape):
    def make(model):
        weight = nn.Parameter(torch.empty(shape or (5, 7)))
        with torch.no_grad():
            fill(weight)
        return weight

    return make


def own_stream(model):
    model.generator = torch.Generator().manual_seed(3)
    return filled(lambda weight: weight.normal_(generator=model.generator))(model)


def on_meta(model):
    with torch.device("meta"):
        layer = nn.Linear(9, 9)
    layer.to_empty(device="cpu").reset_parameters()
    return layer


def empty(model):
    with init_empty_weights():
        nn.Linear(9, 9)
    return nn.Linear(3, 3)


def noisy(model, hidden):
    return hidden + torch.randn(hidden.shape) + torch.rand_like(hidden) + torch.randn_like(hidden.detach())


def numbers(model, hidden):
    torch.randint(0, 5, (3,)), torch.randperm(11), torch.normal(hidden.detach().abs(), 1.0), torch.rand(()).item()
    return hidden * random.random() * np.random.rand()


def chosen(model, hidden):
    rows = torch.multinomial(hidden.softmax(-1).detach(), 2)
    torch.multinomial(torch.ones(9), 4, replacement=True), torch.bernoulli(hidden.sigmoid().detach())
    return hidden * rows.sum().clamp(1, 1)


def skipped(model, hidden):
    return hidden if torch.rand(()) < 0.5 else nn.functional.dropout(hidden, 0.3)


def attended(model, hidden):
    heads = hidden.view(1, 1, -1, 40)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).view(hidden.shape)


init = nn.init
MADE = {
    "uniform": filled(init.uniform_),
    "normal": filled(init.normal_),
    "few normal": filled(init.normal_, 3),
    "normal of no multiple": filled(init.normal_, 1100, 1000),
    "transposed": filled(lambda w: w.t().normal_()),
    "many": filled(init.uniform_, 3, 1 << 20),
    "trunc": filled(init.trunc_normal_),
    "xavier": filled(init.xavier_uniform_),
    "xavier normal": filled(init.xavier_normal_),
    "kaiming": filled(init.kaiming_uniform_),
    "kaiming normal": filled(init.kaiming_normal_),
    "orthogonal": filled(init.orthogonal_),
    "sparse": filled(lambda weight: init.sparse_(weight, 0.3)),
    "zeros": filled(init.zeros_),
    "ones": filled(init.ones_),
    "bernoulli": filled(lambda weight: weight.bernoulli_(0.3)),
    "random": filled(lambda weight: weight.random_(0, 9)),
    "exponential": filled(lambda weight: weight.exponential_()),
    "cauchy": filled(lambda weight: weight.cauchy_()),
    "log normal": filled(lambda weight: weight.log_normal_()),
    "geometric": filled(lambda weight: weight.geometric_(0.3)),
    "half": filled(lambda weight: weight.data.to(torch.bfloat16).normal_()),
    "double": filled(lambda weight: weight.data.double().uniform_()),
    "made": initial(lambda weight: torch.randn(4, 5)),
    "like": filled(lambda weight: weight.copy_(torch.rand_like(weight))),
    "by permutation": filled(lambda weight: weight[torch.randperm(5)]),
    "generator": own_stream,
    "meta": on_meta,
    "empty": empty,
    "recurrent": lambda model: nn.LSTM(3, 4, 2),
    "normed": lambda model: nn.LayerNorm(5),
    "attention": lambda model: nn.MultiheadAttention(8, 2),
    "convolution": lambda model: nn.Conv2d(3, 5, 3),
    "transformer": lambda model: nn.TransformerEncoderLayer(8, 2, 16),
    "twice": lambda model: model.first.reset_parameters(),
    "applied": lambda model: (
        model.apply(lambda m: init.normal_(m.weight) if isinstance(m, nn.Linear) else None) and None
    ),
    "numpy": lambda model: nn.Parameter(torch.from_numpy(np.random.rand(3, 4))),
    "by number": filled(lambda weight: weight.fill_(random.random())),
}
FORWARD = {
    "dropout": lambda model, hidden: nn.functional.dropout(hidden, 0.3),
    "small dropout": lambda model, hidden: nn.functional.dropout(hidden[:, :1], 0.5) + hidden,
    "alpha dropout": lambda model, hidden: nn.functional.alpha_dropout(hidden, 0.3, training=True),
    "feature dropout": lambda model, hidden: nn.functional.dropout1d(hidden[None], 0.3)[0],
    "in evaluation": lambda model, hidden: nn.functional.dropout(hidden, 0.3, training=False),
    "rrelu": lambda model, hidden: nn.functional.rrelu(hidden, training=True),
    "gumbel": lambda model, hidden: nn.functional.gumbel_softmax(hidden),
    "noise": noisy,
    "numbers": numbers,
    "multinomial": chosen,
    "skipped": skipped,
    "attended": attended,
    "checkpointed": lambda model, hidden: checkpoint(
        lambda x: nn.functional.dropout(x, 0.3), hidden, use_reentrant=False
    ),
}
SAMPLERS = {
    "shuffled": lambda: DataLoader(range(64), batch_size=2, shuffle=True),
    "with replacement": lambda: DataLoader(range(64), batch_size=2, sampler=RandomSampler(range(64), replacement=True)),
}
CASES = [
    *((name, make, None) for name, make in MADE.items()),
    *((name, None, forward) for name, forward in FORWARD.items()),
]

accelerator = Accelerator(cpu=True)
read = {}
for number, (name, make, forward) in enumerate(CASES):
    set_seed(number)
    sampler = list(SAMPLERS)[number % 2]
    model = accelerator.prepare_model(Net(make, forward), evaluation_mode=make is not None)
    if forward is not None:
        for _ in range(2):
            model(torch.ones(4, 6)).sum().backward()
    loader = accelerator.prepare(SAMPLERS[sampler]())
    batches = iter(loader)
    read[f"{name}, {sampler}"] = [next(batches).tolist() for _ in range(3)]
with open(f"{sys.argv[1]}/{accelerator.process_index}.json", "w") as file:
    json.dump(read, file)
