"""Libraries whose `fit` prepares by this one: skorch's AccelerateMixin, and fastai's distributed context.

python fitted.py NAME...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from report import OUTPUT, report, weight_of
from sklearn.datasets import load_digits

from accelerate import Accelerator
from accelerate.utils import set_seed

DIGITS = load_digits()
PIXELS = (DIGITS.data[:160] / 16).astype(np.float32)
LABELS = DIGITS.target[:160].astype(np.int64)


class Tempered(torch.nn.CrossEntropyLoss):
    """Has a parameter: on CPU ranks the peer refuses modules that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.nn.Parameter(torch.ones(()))

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(input / self.temperature, target)


def skorch_net(accelerator: Accelerator, **options: Any) -> Any:
    from skorch import NeuralNetClassifier
    from skorch.callbacks import EarlyStopping, LRScheduler
    from skorch.dataset import ValidSplit
    from skorch.hf import AccelerateMixin

    class AcceleratedNet(AccelerateMixin, NeuralNetClassifier):
        """skorch's classifier with this library."""

    set_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    settings: dict[str, Any] = {"lr": 0.1, "batch_size": 16, "max_epochs": 4, "verbose": 0, **options}
    return AcceleratedNet(
        network, criterion=Tempered, accelerator=accelerator, optimizer=torch.optim.SGD,
        train_split=ValidSplit(5, stratified=False),
        callbacks=[LRScheduler("StepLR", step_size=2, gamma=0.5), EarlyStopping(patience=3)], **settings,
    )  # fmt: skip


def skorch() -> dict[str, Any]:
    """Schedules, stops early, predicts, saves its parameters and loads them into another net."""
    accelerator = Accelerator()
    net = skorch_net(accelerator)
    net.fit(PIXELS, LABELS)
    proba = net.predict_proba(PIXELS[:37])
    net.save_params(f_params=f"{OUTPUT}/skorch.pt")
    again = skorch_net(accelerator).initialize()
    again.load_params(f_params=f"{OUTPUT}/skorch.pt")
    return {
        **{name: [epoch[f"{name}_loss"] for epoch in net.history] for name in ("train", "valid")},
        "accuracy": float(net.score(PIXELS, LABELS)), "rows": list(proba.shape), "proba": float(proba[:, 0].sum()),
        "answers": net.predict(PIXELS[:20]).tolist(), "weight": weight_of(net.module_),
        "loaded": weight_of(again.module_), "epochs": len(net.history),
    }  # fmt: skip


def skorch_accumulating() -> dict[str, Any]:
    """skorch clears gradients before every backward pass; the peer then loses those of the window's earlier batches."""
    whole = skorch_net(Accelerator(), batch_size=32).fit(PIXELS, LABELS)
    pieces = skorch_net(Accelerator(gradient_accumulation_steps=2)).fit(PIXELS, LABELS)
    pairs = zip(whole.module_.parameters(), pieces.module_.parameters(), strict=True)
    return {"as_one_batch": all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)}


def fastai() -> dict[str, Any]:
    """A Learner in `distrib_ctx`, one cycle; on several processes it asks for CUDA."""
    from fastai.basics import DataLoader, DataLoaders, Learner, accuracy
    from fastai.callback import schedule  # noqa: F401, it gives Learner its fit_one_cycle
    from fastai.distributed import rank0_first

    set_seed(0)
    rows = list(zip(torch.tensor(PIXELS), torch.tensor(LABELS), strict=True))
    loaders = DataLoaders(
        DataLoader(rows[:112], bs=8, shuffle=False, device=torch.device("cpu")),
        DataLoader(rows[112:], bs=8, device=torch.device("cpu")), device=torch.device("cpu"),
    )  # fmt: skip
    network = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    first = rank0_first(lambda: "first")
    learner = Learner(loaders, network, loss_func=torch.nn.CrossEntropyLoss(), metrics=accuracy, path=OUTPUT)
    learner.remove_cbs([each for each in learner.cbs if type(each).__name__ == "ProgressCallback"])
    with learner.no_logging(), learner.distrib_ctx(sync_bn=False):
        learner.fit_one_cycle(2, 1e-2)
    saved = learner.save("fastai")
    return {
        "first": first, "losses": [float(each) for each in learner.recorder.losses],
        "values": [[float(each) for each in row] for row in learner.recorder.values],
        "weight": weight_of(learner.model), "saved": saved is not None,
    }  # fmt: skip


if __name__ == "__main__":
    programs: dict[str, Callable[[], dict[str, Any]]] = {
        "skorch": skorch, "skorch_accumulating": skorch_accumulating, "fastai": fastai,
    }  # fmt: skip
    report(**{name: programs[name]() for name in sys.argv[1:]})
