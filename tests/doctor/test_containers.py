"""The doctor knows what an object is wherever a script keeps it: each rule that asks for it, in each kind of place."""

from __future__ import annotations

import textwrap
from typing import Final

import pytest

from accelerate.guests.scripts.doctor import examine

#: A right loop. NET, OPTIMIZER, LOADER, HELD_OUT and SCHEDULER stand for the places of the objects.
LOOP: Final = """\
NET = nn.Linear(8, 2)
OPTIMIZER = torch.optim.AdamW(NET.parameters(), lr=1e-3)
LOADER = DataLoader(data, shuffle=True)
HELD_OUT = DataLoader(data)
SCHEDULER = torch.optim.lr_scheduler.LambdaLR(OPTIMIZER, abs)
NET, OPTIMIZER, LOADER, HELD_OUT, SCHEDULER = accelerator.prepare(NET, OPTIMIZER, LOADER, HELD_OUT, SCHEDULER)
for epoch in range(3):
    NET.train()
    for inputs, targets in LOADER:
        loss = nn.functional.cross_entropy(NET(inputs), targets)
        accelerator.backward(loss)
        OPTIMIZER.step()
        SCHEDULER.step()
        OPTIMIZER.zero_grad()
    NET.eval()
    right = 0
    for inputs, targets in HELD_OUT:
        with torch.no_grad():
            found = NET(inputs).argmax(-1)
        found, targets = accelerator.gather_for_metrics((found, targets))
        right += (found == targets).sum().item()
    accelerator.print(right)
accelerator.save_state("state")
"""
PREPARE: Final = LOOP.splitlines()[5]
STEP: Final = "        OPTIMIZER.step()\n"
LAST: Final = 'accelerator.save_state("state")\n'


def without(name: str) -> tuple[str, str]:
    """Return the line that prepares all objects, and the same without one."""
    left, right = PREPARE.split(" = accelerator.prepare(")
    names = [each for each in left.split(", ") if each != name]
    assert right == f"{left})" and len(names) == 4
    return PREPARE, f"{', '.join(names)} = accelerator.prepare({', '.join(names)})"


EVALUATION: Final = LOOP[LOOP.index("    for inputs, targets in HELD_OUT") : LOOP.index("    accelerator.print")]
GATHER: Final = "        found, targets = accelerator.gather_for_metrics((found, targets))\n"
MADE: Final = "OPTIMIZER = torch.optim.AdamW(NET.parameters(), lr=1e-3)\n"
#: By rule: what is replaced in the loop, by what, and the line of the result in which the mistake is found.
MISTAKES: Final = {
    "D104": ((STEP, STEP + "        if loss < 0.1:\n            break\n"), "break"),
    "D105": ((STEP, f"        if accelerator.is_main_process:\n    {STEP}"), "OPTIMIZER.step()"),
    "D106": (
        (EVALUATION, "    if accelerator.is_main_process:\n" + textwrap.indent(EVALUATION, "    ")),
        "for inputs, targets in HELD_OUT",
    ),
    "D202": (without("NET"), "NET = nn"),
    "D203": (without("OPTIMIZER"), "OPTIMIZER = torch"),
    "D204": (without("LOADER"), "LOADER = Data"),
    "D205": (without("SCHEDULER"), "SCHEDULER = torch"),
    "D206": ((PREPARE, f"{without('OPTIMIZER')[1]}\n{MADE}".rstrip()), "OPTIMIZER = torch"),
    "D209": ((PREPARE, PREPARE.replace("NET,", "ready,", 1)), "NET(inputs)"),
    "D213": (("DataLoader(data, shuffle=True)", "DataLoader(data, batch_size=4, shuffle=True)"), "LOADER = Data"),
    "D310": (("        OPTIMIZER.zero_grad()\n", ""), "OPTIMIZER.step()"),
    "D309": ((STEP, STEP + "        accelerator.clip_grad_norm_(NET.parameters(), 1.0)\n"), "clip_grad_norm_"),
    "D313": (("    NET.train()\n", ""), "NET.eval()"),
    "D305": ((STEP, f"        if epoch % 4 == 0:\n    {STEP}"), "OPTIMIZER.step()"),
    "D407": ((PREPARE, f"total = 3 * len(LOADER)\n{PREPARE}\nwarm_up = total"), "len(LOADER)"),
    "D410": (
        (
            "        SCHEDULER.step()\n        OPTIMIZER.zero_grad()\n",
            "        OPTIMIZER.zero_grad()\n    SCHEDULER.step()\n",
        ),
        "SCHEDULER.step()",
    ),
    "D501": ((GATHER, ""), "for inputs, targets in HELD_OUT"),
    "D502": ((GATHER, GATHER.replace("gather_for_metrics", "gather")), "accelerator.gather("),
    "D503": (("    NET.eval()\n", "    nn.Dropout()\n"), "for inputs, targets in HELD_OUT"),
    "D604": ((LAST, 'accelerator.save(NET.state_dict(), "net.pt")\n'), "NET.state_dict()"),
    "D605": ((LAST, "accelerator.print(NET.module)\n"), "NET.module"),
    "D607": ((LAST, "NET.load_state_dict({})\n"), "NET.load_state_dict"),
}
NAMES: Final = ("NET", "OPTIMIZER", "LOADER", "HELD_OUT", "SCHEDULER")
#: By kind of place: what comes before the loop, how a name is written there, by name and by number.
PLACES: Final = {
    "name": ("", "{0}"),
    "dict": ("parts = {{}}\n", 'parts["{0}"]'),
    "list": ("parts = [None] * 5\n", "parts[{1}]"),
    "namespace": ("parts = SimpleNamespace()\n", "parts.{0}"),
    "attribute": ("", "self.{0}"),
    "dict of an attribute": ("self.parts = {{}}\n", 'self.parts["{0}"]'),
    "namespace of an attribute": ("self.parts = SimpleNamespace()\n", "self.parts.{0}"),
}
HEAD: Final = """\
import torch
from types import SimpleNamespace
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
data = TensorDataset(torch.randn(64, 8), torch.zeros(64).long())
"""


def script(place: str, text: str = LOOP) -> str:
    """Return the loop as a script that keeps its objects in such places."""
    before, form = PLACES[place]
    text = before.format() + text
    for number, name in enumerate(NAMES):
        text = text.replace(name, form.format(name.lower(), number))
    if "self." in text:
        text = f"class Trainer:\n    def fit(self):\n{textwrap.indent(text, ' ' * 8)}\n\nTrainer().fit()\n"
    return HEAD + text


def found_in(text: str) -> list[tuple[int, str]]:
    return [(each.line, each.code) for each in examine(text, "train.py")]


@pytest.mark.parametrize("place", PLACES)
def test_a_right_loop_has_no_findings_wherever_its_objects_are(place: str) -> None:
    assert found_in(script(place)) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("code", MISTAKES)
def test_a_mistake_is_found_wherever_the_object_is(code: str, place: str) -> None:
    (old, new), where = MISTAKES[code]
    assert LOOP.count(old) == 1
    text = script(place, LOOP.replace(old, new))
    for number, name in enumerate(NAMES):
        where = where.replace(name, PLACES[place][1].format(name.lower(), number))
    lines = [number for number, line in enumerate(text.splitlines(), 1) if where in line]
    found = found_in(text)
    assert any((line, code) in found for line in lines), (found, text)


# -- ways from the place where objects are made to the loop -------------------------------------------------

ALL: Final = "net, optimizer, loader, held_out, scheduler"
MAKE: Final = LOOP[: LOOP.index(PREPARE)]
READY: Final = f"{PREPARE}\n"
TRAIN: Final = LOOP[LOOP.index("for epoch") :]
FIELDS: Final = "".join(f"    {name.lower()}: object\n" for name in NAMES)
#: By way: the script, and how a name is written in the loop. MAKE, READY and TRAIN stand for the parts of the loop.
WAYS: Final = {
    "made by a function": (f"def build():\n    MAKE\n    return {ALL}\n\n\n{ALL} = build()\nREADY\nTRAIN\n", "{0}"),
    "prepared by a function": (
        f"def build():\n    MAKE\n    READY\n    return {ALL}\n\n\n{ALL} = build()\nTRAIN\n",
        "{0}",
    ),
    "given to a function": (f"def fit({ALL}):\n    TRAIN\n\n\nMAKE\nREADY\nfit({ALL})\n", "{0}"),
    "prepared where they are given": (f"def fit({ALL}):\n    READY\n    TRAIN\n\n\nMAKE\nfit({ALL})\n", "{0}"),
    "given by name": (
        f"def fit(parts):\n    TRAIN\n\n\nMAKE\nREADY\n"
        f"parts = dict({', '.join(f'{n.lower()}={n.lower()}' for n in NAMES)})\nfit(parts)\n",
        'parts["{0}"]',
    ),
    "dict": (
        f"MAKE\nREADY\nparts = {{{', '.join(f'{chr(34)}{n.lower()}{chr(34)}: {n.lower()}' for n in NAMES)}}}\nTRAIN\n",
        'parts["{0}"]',
    ),
    "list": (f"MAKE\nREADY\nparts = [{ALL}]\nTRAIN\n", "parts[{1}]"),
    "tuple": (f"MAKE\nREADY\nparts = {ALL}\nTRAIN\n", "parts[{1}]"),
    "dataclass": (f"@dataclass\nclass Parts:\n{FIELDS}\n\nMAKE\nREADY\nparts = Parts({ALL})\nTRAIN\n", "parts.{0}"),
    "made as a dataclass": (
        f"@dataclass\nclass Parts:\n{FIELDS}\n\ndef build():\n    MAKE\n    READY\n    return Parts({ALL})\n\n\n"
        "parts = build()\nTRAIN\n",
        "parts.{0}",
    ),
    "object": (
        f"class Parts:\n    def __init__(self, {ALL}):\n"
        + "".join(f"        self.{name.lower()} = {name.lower()}\n" for name in NAMES)
        + f"\n\nMAKE\nREADY\nparts = Parts({ALL})\nTRAIN\n",
        "parts.{0}",
    ),
    "loop over lists": (
        f"MAKE\nREADY\nfor {ALL} in zip({', '.join(f'[{n.lower()}]' for n in NAMES)}):\n    TRAIN\n",
        "{0}",
    ),
    "loop over a list of tuples": (f"MAKE\nREADY\nfor {ALL} in [({ALL})]:\n    TRAIN\n", "{0}"),
}
#: Rules about uses of the objects, which are the same lines in all ways.
OF_USES: Final = ("D104", "D105", "D106", "D310", "D309", "D410", "D501", "D502", "D503", "D604", "D605", "D607")


def script_by(way: str, loop: str = LOOP) -> str:
    """Return the loop as a script in which its objects come this way."""
    text, form = WAYS[way]
    start = loop.index("for epoch")
    parts = {"MAKE": MAKE, "READY": READY, "TRAIN": loop[start:]}
    lines: list[str] = []
    for line in text.splitlines():
        part = parts.get(line.strip())
        written = line if part is None else textwrap.indent(part.rstrip(), line[: -len(line.lstrip())])
        for number, name in enumerate(NAMES):
            written = written.replace(name, (form if line.strip() == "TRAIN" else "{0}").format(name.lower(), number))
        lines.append(written)
    return (
        HEAD.replace("import torch\n", "from dataclasses import dataclass\nimport torch\n", 1) + "\n".join(lines) + "\n"
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_right_loop_has_no_findings_however_its_objects_come(way: str) -> None:
    assert found_in(script_by(way)) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("code", OF_USES)
def test_a_mistake_is_found_however_the_object_came(code: str, way: str) -> None:
    (old, new), where = MISTAKES[code]
    text = script_by(way, LOOP.replace(old, new))
    for number, name in enumerate(NAMES):
        where = where.replace(name, WAYS[way][1].format(name.lower(), number))
    lines = [number for number, line in enumerate(text.splitlines(), 1) if where in line]
    found = found_in(text)
    assert any((line, code) in found for line in lines), (found, text)


# -- known misses -------------------------------------------------------------------------------------------

PHASES: Final = """\
loaders = {"train": DataLoader(data, shuffle=True), "val": DataLoader(data)}
net = nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer = accelerator.prepare(net, optimizer)
PREPARED
for epoch in range(3):
    for phase in ["train", "val"]:
        net.train(phase == "train")
        for inputs, targets in loaders[phase]:
            with torch.set_grad_enabled(phase == "train"):
                loss = nn.functional.cross_entropy(net(inputs), targets)
            if phase == "train":
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "prepared",
    [
        'loaders["train"], loaders["val"] = accelerator.prepare(loaders["train"], loaders["val"])',
        "for name in loaders:\n    loaders[name] = accelerator.prepare(loaders[name])",
        "loaders = {name: accelerator.prepare(loader) for name, loader in loaders.items()}",
        "for name, loader in loaders.items():\n    loaders[name] = accelerator.prepare(loader)",
    ],
)
def test_loaders_of_phases_are_known(prepared: str) -> None:
    right = HEAD + PHASES.replace("PREPARED", prepared)
    assert found_in(right) == []
    broken = f"{right}            if loss < 0.1:\n                break\n"
    assert found_in(broken) == [(len(broken.splitlines()), "D104")]
    dropped = HEAD + PHASES.replace("PREPARED", "")
    assert [code for _, code in found_in(dropped)] in (["D204"], ["D204", "D204"])


LISTS: Final = """\
nets = [nn.Linear(8, 2) for _ in range(2)]
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
loader = accelerator.prepare(DataLoader(data, shuffle=True))
nets = [accelerator.prepare(net) for net in nets]
optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
for inputs, targets in loader:
    for net, optimizer in zip(nets, optimizers):
        accelerator.backward(nn.functional.cross_entropy(net(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
"""


def test_lists_of_objects_are_known() -> None:
    assert found_in(HEAD + LISTS) == []
    saved = f'{HEAD}{LISTS}accelerator.save([net.state_dict() for net in nets], "nets.pt")\n'
    assert found_in(saved) == [(len(saved.splitlines()), "D604")]
    first = f'{HEAD}{LISTS}accelerator.save(nets[0].state_dict(), "nets.pt")\n'
    assert found_in(first) == [(len(first.splitlines()), "D604")]
    alone = HEAD + LISTS.replace("nets = [accelerator.prepare(net) for net in nets]\n", "")
    assert "D202" in [code for _, code in found_in(alone)]


@pytest.mark.parametrize("factory", ["nn.Linear(8, 2)", "networks.create(8)", "build()"])
def test_a_model_of_any_factory_is_known_by_its_optimizer(factory: str) -> None:
    """A library's function, or one of the script, makes it; a function that gets it makes the optimizer."""
    trains = (
        "import networks\n\n\ndef build():\n    return networks.create(8)\n\n\n"
        "class Trainer:\n    def __init__(self, net):\n"
        "        self.net = net\n        self.optimizer = make(self.net)\n"
        "        self.loader = DataLoader(data, shuffle=True)\n"
        "        self.net, self.optimizer, self.loader = accelerator.prepare(self.net, self.optimizer, self.loader)\n\n"
        "    def fit(self):\n        for inputs, targets in self.loader:\n"
        "            accelerator.backward(nn.functional.cross_entropy(self.net(inputs), targets))\n"
        "            self.optimizer.step()\n            self.optimizer.zero_grad()\n\n"
        "    def save(self):\n        accelerator.save_state('state')\n\n\n"
        "def make(model: nn.Module):\n    return torch.optim.SGD(model.parameters(), lr=0.1)\n\n\n"
        f"trainer = Trainer({factory})\ntrainer.fit()\ntrainer.save()\n"
    )
    assert found_in(HEAD + trains) == []
    for saved in ("self.net.state_dict()", "self.net"):
        wrong = HEAD + trains.replace("accelerator.save_state('state')", f"torch.save({saved}, 'net.pt')")
        line = next(number for number, each in enumerate(wrong.splitlines(), 1) if "torch.save" in each)
        assert (line, "D604") in found_in(wrong)
    late = HEAD + trains + "torch.save(trainer.net.state_dict(), 'net.pt')\n"
    assert (len(late.splitlines()), "D604") in found_in(late)


def test_values_that_come_from_themselves_end() -> None:
    turns = (
        "def again():\n    return again()\n\n\ndef one():\n    return other()\n\n\ndef other():\n    return one()\n\n\n"
        "parts, config, nets = again(), one(), [nn.Linear(8, 2)]\n"
        'parts = parts["x"]\nparts = parts[0].net\nconfig = config.model\nconfig["x"] = config["y"]\n'
        "nets[0] = nets[1]\n"
        "for nets in nets:\n    for nets in zip(nets, nets):\n        nets = [nets for nets in nets]\n"
        "nets.append(nets[0])\n"
    )
    assert found_in(HEAD + turns) == []
