from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path

import pexpect
import pytest

from accelerate.commands.main import main
from accelerate.guests.scripts.migrate import Migration, Refused, migrate

LOOP = """\
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader([(torch.ones(2), torch.ones(1))] * 4)
for x, y in loader:
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


BY_HAND = (
    LOOP.replace("import torch\n", "import torch\nimport torch.distributed as dist\n", 1).replace(
        "optimizer =",
        "dist.init_process_group()\nmodel = torch.nn.parallel.DistributedDataParallel(model)\noptimizer =",
    )
    + "torch.save(model.module.state_dict(), 'model.pt')\nsize = 4 // dist.get_world_size()\n"
)

CLASS = """\
import torch
from torch.utils.data import DataLoader

class Net(torch.nn.Linear):
    def fit(self, loader):
        # The loop's own model is `self`.

        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        for x, y in loader:
            loss = (self(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

Net(2, 1).fit(DataLoader([(torch.ones(2), torch.ones(1))] * 4))
"""


#: The loss is computed by a method, around the wrapper that averages gradients.
BYPASS = LOOP.replace(
    "model = torch.nn.Linear(2, 1)",
    """class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def step(self, x, y):
        return (self.layer(x) - y).pow(2).mean()
model = Net()""",
).replace("(model(x) - y).pow(2).mean()", "model.step(x, y)")


def changed(text: str, before: str = "", after: str = "") -> Migration:
    """The migration of the loop with ``before`` replaced by ``after``."""
    assert before in text
    return migrate(text.replace(before, after), "train.py")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "empty"),
        ("x = 1\nfor x in:\n    pass\n", 2, "isn't valid Python"),
        ("print 'hello'\n", 1, "isn't valid Python"),
        ("x = '\x00'\n", 1, "isn't valid Python"),
        ("import torch\n\nprint(torch.ones(2))\n", 1, "nothing is trained"),
        ("from accelerate import Accelerator\n" + LOOP, 1, "uses accelerate already"),
        ("import accelerate as acc\n" + LOOP, 1, "uses accelerate already"),
        (LOOP + "model = accelerator.prepare(model)\n", 12, "uses accelerate already"),
        ("import pytorch_lightning as pl\n" + LOOP, 1, "Lightning"),
        ("from torch.distributed.fsdp import FullyShardedDataParallel\n" + LOOP, 1, "FSDP by hand"),
        ("import deepspeed\n" + LOOP, 1, "DeepSpeed by hand"),
        ("from transformers import Trainer\n\nTrainer(model).train()\n", 3, "runs the loop"),
        (LOOP + "a = x.to('cuda:0')\nb = x.to('cuda:1')\n", 13, "spread by hand"),
        (LOOP.replace("torch.optim.SGD", "make"), 5, "no optimizer was recognised"),
        (LOOP.replace("model.parameters()", "[w]"), 5, "no model was recognised"),
        (
            LOOP.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", "").replace(
                "    optimizer.step()\n    optimizer.zero_grad()",
                "    for p in model.parameters():\n        p.data.sub_(p.grad)",
            ),
            10,
            "weights are changed by hand",
        ),
        (BYPASS, 14, "`model.step\\(\\)` runs the model without its forward"),
        (LOOP.replace("for x", "loader = Wrapped(loader)\nfor x") + "class Wrapped: ...\n", 7, "an object of Wrapped"),
        (
            "import torch\nimport torch.multiprocessing as mp\n\ndef work():\n    loss.backward()\n\n"
            "mp.Process(target=work).start()\n",
            7,
            "one by one",
        ),
        (CLASS, 8, "the model trains itself"),
        (
            LOOP.replace("    loss.b", "    loss.backward(retain_graph=True)\n    loss.b"),
            9,
            "a second backward pass goes through",
        ),
        (LOOP.replace("in loader:", "in fetch():"), 7, "doesn't visibly go through the loader of line 6"),
        (LOOP + LOOP.partition("\n\n")[2], 12, "`model` is made again after training with the one of line 4"),
        (
            LOOP.replace("optimizer =", "model.bias.requires_grad_(False)\noptimizer =").replace(
                "    loss.backward()", "    model.bias.requires_grad = True\n    loss.backward()"
            ),
            10,
            "parameters that were frozen before",
        ),
        (
            BY_HAND + "keep(DataLoader([1], sampler=torch.utils.data.DistributedSampler([1])))\n",
            17,
            "DistributedSampler",
        ),
        (BY_HAND + "torch.save(other.module.state_dict(), 'm.pt')\n", 17, "`other` isn't a model known here"),
        (BY_HAND + "order = loader.sampler\n", 17, "the sampler of a prepared loader is the whole order"),
        (BY_HAND + "lr = 0.1 * args.world_size\n", 17, "isn't understood to be the number of processes"),
        ("for x in test_loader:\n    total += model(x).sum()\n    outputs.append(x)\n", 2, "adds up numbers"),
    ],
)
def test_what_cant_be_changed_is_refused_with_the_line_that_is_why(text: str, line: int, reason: str) -> None:
    with pytest.raises(Refused, match=rf"^train\.py:{line}: .*{reason}"):
        migrate(text, "train.py")


def test_a_migrated_script_is_refused_as_such() -> None:
    with pytest.raises(Refused, match="uses accelerate already"):
        migrate(migrate(LOOP, "train.py").after, "train.py")


def test_nothing_else_is_touched() -> None:
    text = LOOP.replace("import torch\n", "import torch  # the   library\n", 1).replace("\n", "\r\n")
    text = text.replace("optimizer.step()", "optimizer.step ( )   # ümläut: kept 'as' \"it\" is")
    found = migrate(text, "train.py")
    matcher = difflib.SequenceMatcher(None, text.splitlines(True), found.after.splitlines(True), autojunk=False)
    touched = [text.splitlines()[i] for tag, a, b, _, _ in matcher.get_opcodes() if tag != "equal" for i in range(a, b)]
    assert touched == ["    loss.backward()"]
    assert "optimizer.step ( )   # ümläut: kept 'as' \"it\" is\r\n" in found.after


def test_every_change_has_a_reason_and_a_line() -> None:
    found = migrate(LOOP, "train.py")
    assert found.changes and all(1 <= line <= len(LOOP.splitlines()) and why for line, why in found.changes)
    assert len({line for line, _ in found.changes}) >= 3
    assert found.diff().startswith("--- train.py\n+++ train.py (accelerated)\n@@")


def test_code_after_a_name_with_wide_characters_is_cut_at_the_right_place() -> None:
    found = changed(LOOP, "    loss.backward()", "    größe = 'ÄÖÜ'; loss.backward()")
    assert "größe = 'ÄÖÜ'; accelerator.backward(loss)" in found.after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("(loss / 4).backward()", "accelerator.backward(loss / 4)"),
        ("loss.backward(retain_graph=True)", "accelerator.backward(loss, retain_graph=True)"),
        ("(a + b).mean().backward()", "accelerator.backward((a + b).mean())"),
        ("loss.backward(torch.ones(1))", "accelerator.backward(loss, gradient=torch.ones(1))"),
        ("losses['total'].backward()", "accelerator.backward(losses['total'])"),
        ("criterion(model(x), y).backward()", "accelerator.backward(criterion(model(x), y))"),
    ],
)
def test_backward_however_the_loss_is_written(before: str, after: str) -> None:
    assert f"    {after}\n" in changed(LOOP, "loss.backward()", before).after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("device = torch.device('cuda:0')", "device = accelerator.device"),
        ("device = f'cuda:{gpu}'", "device = accelerator.device"),
        ("device = 'cuda' if torch.cuda.is_available() else 'cpu'", "device = accelerator.device"),
        ("device = torch.device(args.device)", "device = accelerator.device"),
        ("weights = torch.ones(3).cuda()", "weights = torch.ones(3).to(accelerator.device)"),
        ("weights = torch.ones(3, device='cuda')", "weights = torch.ones(3, device=accelerator.device)"),
        ("weights = torch.ones(3).to('cuda')", "weights = torch.ones(3).to(accelerator.device)"),
        ("name = 'cuda'", "name = 'cuda'"),
        ("x = torch.load('a', map_location='cuda:0')", "x = torch.load('a', map_location=accelerator.device)"),
    ],
)
def test_devices(before: str, after: str) -> None:
    line = f"{before}\nprint(device)\n" if before.startswith("device") else f"{before}\n"
    text = LOOP.replace("optimizer = ", f"{line}optimizer = ", 1)
    assert f"\n{after}\n" in migrate(text, "train.py").after


@pytest.mark.parametrize(
    ("moved", "stays"),
    [
        ("x, y = x.to(device), y.to(device)", None),
        ("x = x.cuda(non_blocking=True)", None),
        ("x = x.float().to(device)", "x = x.float()"),
        ("x = x.to(device, torch.float64)", "x = x.to(device, torch.float64)"),  # it converts, too
        ("noise = torch.randn_like(x).to(device)", "noise = torch.randn_like(x).to(device)"),
        ("z = {k: v.to(device) for k, v in x.items()}", "z = {k: v for k, v in x.items()}"),
    ],
)
def test_batches_of_a_prepared_loader_are_not_moved(moved: str, stays: str | None) -> None:
    text = LOOP.replace("    loss = ", f"    {moved}\n    loss = ").replace("model = ", 'device = "cuda"\nmodel = ', 1)
    after = migrate(text, "train.py").after
    body = after[after.index("in loader:") :]
    assert (f"    {stays}\n" in body) if stays else (".to(" not in body and ".cuda(" not in body)


@pytest.mark.parametrize(
    ("loss", "is_weighted"),
    [
        ("F.cross_entropy(model(x), y, ignore_index=0)", True),
        ("F.cross_entropy(model(x), y, weights)", True),
        ("F.nll_loss(model(x), y, weights, reduction='mean')", True),
        ("torch.nn.CrossEntropyLoss(weights)(model(x), y)", True),
        ("torch.nn.NLLLoss(weight=weights)(model(x), y)", True),
        ("F.cross_entropy(model(x), y)", False),
        ("F.cross_entropy(model(x), y, None, reduction='mean')", False),
        ("F.cross_entropy(model(x), y, weight=None)", False),
        ("F.cross_entropy(model(x), y, weights, reduction='sum')", False),
        ("torch.nn.MSELoss()(model(x), y)", False),
    ],
)
def test_a_weighted_mean_is_said_and_not_compared_on_two_processes(loss: str, is_weighted: bool) -> None:
    text = LOOP.replace("import torch\n", "import torch\nimport torch.nn.functional as F\n", 1)
    found = migrate(text.replace("(model(x) - y).pow(2).mean()", loss), "train.py")
    is_said = any("weighted mean" in note.text for note in found.notes)
    assert any("weighted mean" in each for each in found.differs) == is_said == is_weighted
    is_sum = any("the loss is a sum" in note.text for note in found.notes)
    assert any("the loss is a sum" in each for each in found.differs) == is_sum == ("reduction='sum'" in loss)


def test_a_loop_that_only_evaluates_keeps_its_loader_and_says_so() -> None:
    text = LOOP + "test_loader = DataLoader([1])\nfor x in test_loader:\n    x = x.cuda()\n    print(model(x))\n"
    found = migrate(text, "train.py")
    assert "x = x.to(accelerator.device)" in found.after and "test_loader = accelerator" not in found.after
    assert any(note.line == 13 and "every process goes through all of it" in note.text for note in found.notes)


@pytest.mark.parametrize(
    "made",
    ["optimizers[name](model.parameters(), lr=1)", "getattr(torch.optim, name)(model.parameters())",
     "Lion(model.parameters())", "bnb.optim.AdamW8bit(model.parameters())", "make_optimizer(model)"],
)  # fmt: skip
def test_optimizers_however_they_are_made(made: str) -> None:
    text = LOOP.replace("torch.optim.SGD(model.parameters(), lr=0.1)", made)
    text = "def make_optimizer(m):\n    return torch.optim.SGD(m.parameters(), lr=0.1)\n" + text
    assert "\nmodel, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n" in migrate(text, "t.py").after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dist.all_reduce(total)", 'total = accelerator.reduce(total, reduction="sum")'),
        ("dist.all_reduce(m['x'], op=dist.ReduceOp.MAX)", "m['x'] = accelerator.reduce(m['x'], reduction=\"max\")"),
        ("dist.reduce(total, 0, dist.ReduceOp.AVG)", 'total = accelerator.reduce(total, reduction="mean")'),
        ("dist.all_reduce(total.clone())", "dist.all_reduce(total.clone())"),  # nothing to give a value to
        ("dist.all_reduce(total, op=dist.ReduceOp.MIN)", "dist.all_reduce(total, op=dist.ReduceOp.MIN)"),
        ("dist.broadcast(total, 0)", "dist.broadcast(total, 0)"),
        ("dist.barrier()", "accelerator.wait_for_everyone()"),
        ("rank = dist.get_rank()", "rank = accelerator.process_index"),
        ("size = int(os.environ.get('WORLD_SIZE', 1))", "size = accelerator.num_processes"),
        ("torch.cuda.set_device(rank)", None),
        ("os.environ['MASTER_PORT'] = '1'", None),
        ("dist.init_process_group('nccl')", None),
    ],
)
def test_processes_by_hand(before: str, after: str | None) -> None:
    text = f"import os\nimport torch.distributed as dist\n{LOOP}{before}\nprint('end')\n"
    found = migrate(text, "train.py")
    body = found.after[found.after.index("zero_grad()") :]
    assert body == "zero_grad()\n" + (f"{after}\n" if after else "") + (
        "print('end')\n" if "dist." in before else "accelerator.print('end')\n"
    )
    if after == before:
        assert any("is left as it is" in note.text for note in found.notes)


def test_a_scaler_with_options_keeps_them() -> None:
    text = LOOP.replace("loader = ", "scaler = torch.amp.GradScaler('cuda', init_scale=128.0)\nloader = ", 1)
    text = text.replace("    loss = ", "    with torch.autocast('cuda'):\n        loss = ")
    text = text.replace("loss.backward()", "scaler.scale(loss).backward()").replace(
        "    optimizer.step()", "    scaler.step(optimizer)\n    scaler.update()"
    )
    after = migrate(text, "train.py").after
    assert "from accelerate import Accelerator, GradScalerKwargs\n" in after
    assert 'Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=128.0)])' in after
    assert "scaler" not in after.replace("GradScalerKwargs", "")
    assert "    optimizer.step()\n    optimizer.zero_grad()\n" in after


def test_a_switch_that_isnt_known_where_the_accelerator_is_made_is_said() -> None:
    text = LOOP.replace("    loss = ", "    with torch.autocast('cuda', enabled=x.sum() > 0):\n        loss = ")
    found = migrate(text, "train.py")
    assert 'Accelerator(mixed_precision="fp16")' in found.after
    assert any("switches mixed precision" in note.text for note in found.notes)


@pytest.mark.parametrize(
    ("before", "argument"),
    [
        ("scaler = torch.amp.GradScaler(enabled=False)\nhalf = True\n", '"fp16" if half else "no"'),
        ("half = torch.float16\n", '"fp16"'),
        ("", '"fp16" if torch.cuda.is_available() else "no"'),
        ('kind = "bfloat16"\n', """{'bfloat16': "bf16", 'float16': "fp16"}[kind]"""),
    ],
)
def test_an_autocast_made_elsewhere_is_replaced_where_it_is_entered(before: str, argument: str) -> None:
    made = {
        '"fp16"': "ctx = torch.autocast('cuda', half)",
        '"fp16" if half else "no"': "ctx = torch.autocast('cuda', torch.float16) if half else nullcontext()",
        '"fp16" if torch.cuda.is_available() else "no"': "ctx = nullcontext() if device_type == 'cpu' else "
        "torch.autocast('cuda', torch.float16)",
    }.get(argument, "ctx = torch.autocast('cuda', dtype={'bfloat16': torch.bfloat16, 'float16': torch.float16}[kind])")
    text = LOOP.replace("\nmodel =", f"\nfrom contextlib import nullcontext\n{before}{made}\nmodel =", 1)
    text = text.replace(
        "    loss = (model(x) - y).pow(2).mean()", "    with ctx:\n        loss = (model(x) - y).pow(2).mean()"
    )
    after = migrate(text, "train.py").after
    names = {"half": "True", "kind": '"bfloat16"'}
    written = [argument, *(argument.replace(name, value) for name, value in names.items())]
    assert any(f"Accelerator(mixed_precision={each})" in after for each in [*written, '"fp16"'])
    assert "with accelerator.autocast():" in after and "ctx" not in after


def test_the_accelerator_is_made_where_its_switch_is_known() -> None:
    text = LOOP.replace(
        "\nmodel =", "\ndef is_main():\n    return torch.distributed.get_rank() == 0\n\ndef main(args):\n    model ="
    )
    head, _, body = text.partition("    model =")
    body = body.replace("\n", "\n    ").replace(
        "loss = (m", "with torch.autocast('cuda', enabled=args.amp):\n            loss = (m"
    )
    after = migrate(f"{head}    model ={body}\nmain(options)\n", "train.py").after
    assert "def main(args):\n    global accelerator\n    accelerator = Accelerator(mixed_precision=" in after
    assert '"fp16" if args.amp else "no"' in after


def test_the_global_batch_is_said_and_can_be_kept() -> None:
    assert sum("N times as many samples" in note.text for note in migrate(LOOP, "train.py").notes) == 1
    kept = migrate(LOOP, "train.py", keep_batch=True)
    assert "from accelerate import Accelerator, DataLoaderConfiguration\n" in kept.after
    assert "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))" in kept.after
    assert not any("N times as many samples" in note.text for note in kept.notes)


@pytest.mark.parametrize(
    ("drawn", "is_said"),
    [
        ("z = torch.randn(4)", True),
        ("z = x.clone().normal_()", True),
        ("z = noise()", True),
        ("z = torch.randn(4, generator=own)", False),
        ("with torch.no_grad():\n        z = torch.randn(4)", False),
    ],
)
def test_numbers_that_all_processes_draw_alike_are_said(drawn: str, is_said: bool) -> None:
    text = "import torch\ndef noise():\n    return torch.rand(3)\n" + LOOP.replace(
        "    loss =", f"    {drawn}\n    loss ="
    )
    notes = [note.text for note in migrate(text.replace("model =", "torch.manual_seed(1)\nmodel =", 1), "t.py").notes]
    assert sum("draw the same numbers here" in note for note in notes) == is_said
    assert not any("draw the same" in note.text for note in migrate(text, "t.py").notes)


def test_a_bar_is_as_long_as_the_prepared_loader() -> None:
    bar = "from tqdm import tqdm\nsteps = 2 * len(loader)\nbar = tqdm(total=steps)\nfor x"
    after = migrate(LOOP.replace("for x", bar, 1), "train.py").after
    assert "bar = tqdm(total=2 * len(loader), disable=not accelerator.is_local_main_process)\n" in after


def test_a_file_is_loaded_when_it_is_written() -> None:
    text = LOOP + "torch.save(model.state_dict(), 'm.pt')\nmodel.load_state_dict(torch.load('m.pt'))\n"
    assert (
        "\naccelerator.wait_for_everyone()\naccelerator.unwrap_model(model).load_state_dict"
        in migrate(text, "t.py").after
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("kind = 'cuda' if 'cuda' in device else 'cpu'", "kind = 'cuda' if 'cuda' in device.type else 'cpu'"),
        ("a = device.startswith('cuda')", "a = device.type.startswith('cuda')"),
        ("a = make(device_type=device)", "a = make(device_type=device.type)"),
        ("device_type = 'cuda' if 'cuda' in device else 'cpu'", "device_type = accelerator.device.type"),
        ("Trainer(model, 'cuda' if ok else 'cpu')", "Trainer(model, accelerator.device)"),
    ],
)
def test_a_device_that_is_used_as_a_string(before: str, after: str) -> None:
    text = LOOP.replace("model =", f"device = 'cuda' if torch.cuda.is_available() else 'cpu'\n{before}\nmodel =", 1)
    assert f"\n{after}\n" in migrate(text, "train.py").after


def test_the_doctor_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOOP)
    main(["migrate", str(path)])
    assert "`accelerate doctor` finds no problems in the changed script." in capsys.readouterr().out
    path.write_text(LOOP + "if accelerator.is_main_process:\n    accelerator.wait_for_everyone()\n")
    main(["migrate", str(path), "--keep-batch"])
    printed = capsys.readouterr().out
    assert (
        "split_batches=True" in printed and "`accelerate doctor` on the changed script (its lines):\n  line " in printed
    )


def test_a_block_that_only_moved_something_is_gone() -> None:
    text = LOOP.replace("optimizer = ", "if torch.cuda.is_available():\n    model.cuda()\noptimizer = ", 1)
    after = migrate(text, "train.py").after
    assert "is_available" not in after
    text = LOOP.replace("optimizer = ", "if gpu:\n    model.cuda()\nelse:\n    print('slow')\noptimizer = ", 1)
    after = migrate(text, "train.py").after
    assert "if gpu:\n    pass\nelse:\n" in after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "if a:\n    model.cuda()\nelse:\n    model.cpu_only = 1\n",
            "if a:\n    pass\nelse:\n    model.cpu_only = 1\n",
        ),
        ("if a:\n    b = 1\nelse:\n    model.cuda()\n", "if a:\n    b = 1\n"),
        ("if a:\n    b = 1\nelif c:\n    model.cuda()\nd = 2\n", "if a:\n    b = 1\nd = 2\n"),
        ("if a:\n    b = 1\nelif c:\n    model.cuda()\nelse:\n    model.to('cuda')\n", "if a:\n    b = 1\n"),
        ("if a:\n    model.cuda()\nelse:\n    model.to('cpu')\n", ""),
        ("if a:\n    if c:\n        model.cuda()\n    b = 1\n", "if a:\n    b = 1\n"),
        ("if a: model.cuda()\nelse: b = 1\n", "if a: pass\nelse: b = 1\n"),
        ("with a:\n    model.cuda()\n", ""),
        (
            "try:\n    model.cuda()\nexcept RuntimeError:\n    b = 1\n",
            "try:\n    pass\nexcept RuntimeError:\n    b = 1\n",
        ),
    ],
)
def test_branches_that_are_left_empty(before: str, after: str) -> None:
    found = migrate(LOOP.replace("optimizer = ", f"{before}optimizer = ", 1), "train.py").after
    start, end = found.index("model = torch.nn.Linear(2, 1)\n"), found.index("optimizer = ")
    assert found[start:end] == f"model = torch.nn.Linear(2, 1)\n{after}"


def test_what_switches_processes_on_asks_the_accelerator() -> None:
    text = LOOP.replace(
        "model = ", "args.many = args.size > 1\nif args.many:\n    dist.init_process_group()\nmodel = ", 1
    )
    text = "import torch.distributed as dist\n" + text + "if args.many:\n    print('many')\n"
    after = migrate(text, "train.py").after
    assert "args.many = accelerator.use_distributed\nmodel" in after and "if args.many:\n    print" in after
    found = migrate(text.replace("args.many = args.size > 1\n", ""), "train.py")
    assert any("`args.many` switches" in note.text for note in found.notes)


def test_a_function_whose_caller_isnt_shown_prepares_what_it_gets() -> None:
    text = '''\
def fit(network, data, optimizer, device):
    """Trains."""
    network.train()
    for x, y in data:
        loss = network(x.to(device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
'''
    after = migrate(text, "fit.py").after
    assert (
        '    """Trains."""\n    accelerator = Accelerator()\n    network, optimizer, data = accelerator.prepare('
        in after
    )


def test_a_name_that_is_taken_is_left_alone() -> None:
    after = migrate(LOOP + "accelerator = 'the pedal'\n", "train.py").after
    assert "the_accelerator = Accelerator()" in after and "the_accelerator.backward(loss)" in after


def test_a_future_import_stays_first() -> None:
    after = migrate('"""Doc."""\nfrom __future__ import annotations\n' + LOOP, "train.py").after
    ast.parse(after)
    assert after.index("__future__") < after.index("from accelerate")


def test_nothing_is_written_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    assert main(["migrate", str(script)]) == 0
    assert script.read_text() == LOOP
    printed = capsys.readouterr().out
    assert "+    accelerator.backward(loss)" in printed and "Why:" in printed
    assert main(["migrate", str(script), "--output", str(tmp_path / "new.py")]) == 0
    assert script.read_text() == LOOP and "Accelerator()" in (tmp_path / "new.py").read_text()
    assert main(["migrate", str(script), "--write"]) == 0
    assert script.read_text() == (tmp_path / "new.py").read_text()
    assert main(["migrate", str(script)]) != 0
    assert "uses accelerate already" in capsys.readouterr().err


def test_files_that_are_no_scripts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, data, reason in (
        ("a.ipynb", b"{}", "notebook"),
        ("b.py", b"\xff\xfe", "UTF-8"),
        ("c.py", None, "No such file"),
    ):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        assert main(["migrate", str(tmp_path / name)]) != 0
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "is_written"), [("y", True), ("n", False), ("", False)])
def test_a_person_is_asked(tmp_path: Path, answer: str, is_written: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    program = pexpect.spawn(
        sys.executable, ["-m", "accelerate.commands.main", "migrate", str(script)], encoding="utf-8", timeout=30
    )
    program.expect(r"Write this to .*\? \[y/N\]")
    program.sendline(answer)
    program.expect(pexpect.EOF)
    program.close()
    assert ("accelerator.backward" in script.read_text()) is is_written
    assert program.exitstatus == (0 if is_written else 1)


PHASES = """
import torch
from torch.utils.data import DataLoader


def make(data):
    {made}
    return loaders


def fit(model, optimizer, loaders, device):
    for phase in ("train", "val"):
        for x, y in loaders[{key}]:
            x = x.to(device)
            loss = (model(x) - y).pow(2).mean()
            if phase == "train":
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()


device = "cuda"
model = torch.nn.Linear(2, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loaders = make(data)
fit(model, optimizer, loaders, device)
"""


@pytest.mark.parametrize(
    "made",
    [
        "loaders = {'train': DataLoader(data['train'], 4), 'val': DataLoader(data['val'], 4)}",
        "loaders = {x: DataLoader(data[x], 4) for x in ['train', 'val']}",
    ],
)
def test_of_a_dictionary_of_loaders_the_one_to_train_on_is_prepared(made: str) -> None:
    found = migrate(PHASES.format(made=made, key="phase"), "phases.py")
    assert 'model, optimizer, loaders["train"] = accelerator.prepare(model, optimizer, loaders["train"])' in found.after
    assert "x = x.to(device)" in found.after  # of the other loader it is still needed
    found = migrate(PHASES.format(made=made, key="'train'"), "phases.py")
    assert 'accelerator.prepare(model, optimizer, loaders["train"])' in found.after
    assert "x = x.to(device)" not in found.after


def test_a_loader_is_found_where_a_list_of_steps_goes_through_it() -> None:
    text = "losses = [step(batch) for batch in loader]"
    script = f"""
import torch
loader = torch.utils.data.DataLoader(data)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(batch):
    loss = model(batch).mean()
    loss.backward()
    optimizer.step()
    return loss.item()
{text}
"""
    assert "model, optimizer, loader = accelerator.prepare(" in migrate(script, "steps.py").after
