"""Small scripts in two forms: right, and with one fault planted by replacing a piece of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

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

# -- pieces of it ------------------------------------------------------------------------------------------

PREPARE: Final = "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)"
ADAM: Final = "AdamW(model.parameters(), lr=1e-2)"
GATE: Final = "self.gate = nn.Linear(6, 16)"
LOSS: Final = "loss = nn.functional.mse_loss(model(inputs), targets)"
BACKWARD: Final = "accelerator.backward(loss)"
CLIP: Final = "accelerator.clip_grad_norm_(model.parameters(), 1.0)"
IF_SYNC: Final = "            if accelerator.sync_gradients:\n                "
KEEP_AVERAGE: Final = "accelerator.register_for_checkpointing(average)\n"
AVERAGE: Final = LOOP[LOOP.index(f"{IF_SYNC}with torch.no_grad") : LOOP.index("            scheduler.step()")]
#: Without the average, which holds values of one layout, the model can be sharded.
BARE: Final = LOOP.replace(AVERAGE, "").replace("average = copy.deepcopy(model)\n", "").replace(KEEP_AVERAGE, "")

CELL: Final = "return self.last(torch.tanh(self.first(inputs)) * gate)"
SQUARES: Final = "loss = ((model(inputs) - targets) ** 2 * mask).sum()"


def prepare(*names: str) -> str:
    """The line that prepares these only."""
    return f"{', '.join(names)} = accelerator.prepare({', '.join(names)})"


def gate(module: str) -> tuple[tuple[str, str], ...]:
    """The change that puts a module behind the gate."""
    return ((GATE, f"self.gate = nn.Sequential(nn.Linear(6, 16), {module})"),)


@final
@dataclass(frozen=True)
class Script:
    """A script, and what `accelerate verify` must find in it.

    Attributes:
        changes: pieces of the text and their replacements.
        layouts: the layouts to run.
        code: of the finding in the first of them; "" for a right script.
        quantity: that differs.
        name: a part of the parameter's name.
        factor: by which it differs.
    """

    changes: tuple[tuple[str, str], ...] = ()
    layouts: str = "ranks2,parts2,resume"
    code: str = ""
    quantity: str = ""
    name: str = ""
    factor: float | None = None
    base: str = LOOP

    @property
    def text(self) -> str:
        """The text of the script."""
        found = self.base
        for old, new in self.changes:
            assert old in found, old
            found = found.replace(old, new)
        return found


RIGHT: Final = {
    "everything": Script(),
    "sharded": Script(layouts="fsdp2,fsdp1,hsdp", base=BARE),
    "recomputed_and_compiled": Script(layouts="recompute,compile", base=BARE),
    "resumed_on_fewer": Script(layouts="resume_ranks"),
    "four_ranks": Script(layouts="ranks4,ranks2_parts2"),
    "weighted": Script(((LOSS, SQUARES), (BACKWARD, "accelerator.backward(loss, weight=mask.sum())"))),
    "momentum": Script(((ADAM, "SGD(model.parameters(), lr=1e-2, momentum=0.9)"),)),
    "two_groups": Script(((ADAM, "AdamW([{'params': [p], 'lr': 0.01 / p.ndim} for p in model.parameters()])"),)),
    "frozen": Script((("model = Net()\n", "model = Net()\nmodel.gate.requires_grad_(False)\n"),)),
    "without_clipping": Script(((IF_SYNC + CLIP, ""),)),
    "clipped_by_value": Script(((CLIP, "accelerator.clip_grad_value_(model.parameters(), 0.1)"),)),
    "dropout": Script(gate("nn.Dropout(0.5)")),
    "unshuffled": Script(((", shuffle=True", ""),)),
    "layer_norm": Script(gate("nn.LayerNorm(16)")),
    "group_norm": Script(gate("nn.GroupNorm(4, 16)")),
    "by_hand": Script(layouts="ranks2,ranks4", base=BY_HAND),
    "folds": Script(layouts="ranks2", base=FOLDS),
    "centered": Script(((ADAM, "RMSprop(model.parameters(), lr=1e-3, momentum=0.5, centered=True)"),)),
}

FAULTS: Final = {
    "sum_of_losses": Script(((LOSS, LOSS[:-1] + ", reduction='sum')"),), "ranks2", "V02", "gradient", factor=0.5),
    "sum_of_losses_in_parts": Script(
        ((LOSS, LOSS[:-1] + ", reduction='sum')"),), "parts2", "V03", "gradient", factor=0.5
    ),
    "backward_by_hand": Script(((BACKWARD, "loss.backward()"),), "parts2", "V03", "gradient", factor=2.0),
    "mean_of_means": Script(((LOSS, SQUARES + " / mask.sum()"),), "ranks2", "V13", "gradient"),
    "mean_of_means_in_parts": Script(((LOSS, SQUARES + " / mask.sum()"),), "parts2", "V13", "gradient"),
    "loader_not_prepared": Script(((PREPARE, prepare("model", "optimizer", "scheduler")),), "ranks2", "V01", "samples"),
    "data_divided_twice": Script(
        (
            ("(64, 6)", "(64, 6)[accelerator.process_index :: accelerator.num_processes]"),
            ("torch.rand(64, 1)", "torch.rand(len(x), 1)"),
        ),
        "ranks2",
        "V01",
        "samples",
    ),
    "model_not_prepared": Script(
        ((PREPARE, prepare("optimizer", "loader", "scheduler")),), "ranks2", "V05", "gradient"
    ),
    "without_reduction": Script(
        ((f"            {LOSS}", f"            with accelerator.no_sync(model):\n                {LOSS}"),),
        "ranks2",
        "V05",
        "gradient",
    ),
    "schedule_of_micro_batches": Script(
        ((PREPARE, prepare("model", "optimizer", "loader")),), "parts2", "V07", "learning rate"
    ),
    "rate_by_ranks": Script(
        (("lr=1e-2", "lr=1e-2 * accelerator.num_processes"),), "ranks2", "V07", "learning rate", factor=2.0
    ),
    "average_not_saved": Script(((KEEP_AVERAGE, ""),), "resume", "V14", "parameter", "Net1"),
    "batch_norm": Script(gate("nn.BatchNorm1d(16)"), "ranks2", "V11", "gradient"),
    "gate_detached": Script(
        ((CELL, f"gate = gate.detach() if accelerator.gradient_accumulation_steps > 1 else gate\n        {CELL}"),),
        "parts2",
        "V04",
        "gradient",
        "gate",
    ),
    "main_process_weighs_double": Script(
        ((BACKWARD, "accelerator.backward(loss * (1 + accelerator.is_main_process))"),), "ranks2", "V13", "gradient"
    ),
    "divided_by_ranks_twice": Script(
        ((BACKWARD, "accelerator.backward(loss / accelerator.num_processes)"),), "ranks2", "V02", "gradient", factor=0.5
    ),
    "divided_by_parts_twice": Script(
        ((BACKWARD, "accelerator.backward(loss / accelerator.gradient_accumulation_steps)"),),
        "parts2",
        "V03",
        "gradient",
        factor=0.5,
    ),
    "by_hand_without_a_sampler": Script(
        ((", sampler=DistributedSampler(data)", ", shuffle=True"), ("    loader.sampler.set_epoch(epoch)\n", "")),
        "ranks2",
        "V01",
        "samples",
        base=BY_HAND,
    ),
    "by_hand_without_a_mean": Script(
        (
            ("model = DistributedDataParallel(", "model = ("),
            (
                "loss.backward()\n",
                "loss.backward()\n        for p in model.parameters():\n            dist.all_reduce(p.grad)\n",
            ),
        ),
        "ranks2",
        "V02",
        "gradient",
        factor=2.0,
        base=BY_HAND,
    ),
    "sum_of_losses_in_the_second_fold": Script(
        ((LOSS, LOSS[:-1] + ", reduction='sum' if fold else 'mean')"),),
        "ranks2",
        "V02",
        "gradient",
        factor=0.5,
        base=FOLDS,
    ),
    "decay_by_ranks": Script(
        (("lr=1e-2)", "lr=1e-2, weight_decay=0.1 * accelerator.num_processes)"),), "ranks2", "V08", "parameter"
    ),
}
