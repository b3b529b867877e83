"""Small scripts in two forms: right, and with one fault planted by replacing a piece of the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from tests.verify.bases import BY_HAND, EXPERTS, FOLDS, LOOP, SEQUENCES, STAGES, STREAM

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

LOGITS: Final = "loss = F.cross_entropy"
FIND_UNUSED: Final = (
    "accelerator = Accelerator()",
    "from accelerate import DistributedDataParallelKwargs\n"
    "accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])",
)
#: Clips by the norm of what this rank holds.
CLIP_BY_HAND: Final = (
    "own = [getattr(p.grad, 'to_local', lambda p=p: p.grad)() for p in model.parameters()]\n"
    "                norm = torch.stack([gradient.norm() for gradient in own]).norm()\n"
    "                for gradient in own:\n                    gradient.div_(norm.clamp(min=0.1))"
)
#: A second model, trained beside the first and prepared with it.
ADAPTER: Final = (
    (
        "scheduler = torch",
        (
            "adapter = nn.Linear(6, 1)\n"
            "adapter_optimizer = torch.optim.SGD(adapter.parameters(), lr=1e-2)\nscheduler = torch"
        ),
    ),
    ("model(inputs)", "model(inputs) + adapter(inputs)"),
    (
        "            optimizer.zero_grad()\n",
        (
            "            optimizer.zero_grad()\n            adapter_optimizer.step()\n"
            "            adapter_optimizer.zero_grad()\n"
        ),
    ),
)
TIED: Final = "model = Net()\nmodel.gate.weight = model.first.weight\n"
PLATEAU: Final = ("StepLR(optimizer, 2, 0.5)", "ReduceLROnPlateau(optimizer, factor=0.5, patience=0)")
STEP_ON_MEAN: Final = ("scheduler.step()", "scheduler.step(accelerator.reduce(loss.detach(), 'mean'))")
HALVES: Final = (CELL, CELL + " * (1.0 if self.training else 0.5)")
#: What the backward pass needs is kept by the first batch after the cache was cleared.
CACHE: Final = (
    (
        "class Net",
        (
            "cache = {}\n\n\nclass Square(torch.autograd.Function):\n    @staticmethod\n"
            "    def forward(ctx, value):\n"
            "        cache.setdefault('value', value.detach().clone())\n"
            "        return value * value\n\n    @staticmethod\n    def backward(ctx, gradient):\n"
            "        return 2 * cache['value'] * gradient\n\n\nclass Net"
        ),
    ),
    (CELL, CELL.replace("* gate", "* Square.apply(gate)")),
)
#: In place of DistributedDataParallel.
MEAN_BY_HAND: Final = (
    (
        "        loss.backward()\n",
        (
            "        loss.backward()\n        for p in model.parameters():\n"
            "            dist.all_reduce(p.grad)\n            p.grad /= dist.get_world_size()\n"
        ),
    ),
    ("model = DistributedDataParallel(", "model = ("),
)


def scaler(loading: str) -> tuple[tuple[str, str], ...]:
    """The changes that scale the loss by hand; `loading` is what restoring the scale does."""
    return (
        (
            "class Net",
            (
                "class Scaler:\n    scale, inverse = 4.0, 0.25\n\n    def state_dict(self):\n"
                f"        return {{'scale': self.scale}}\n\n    def load_state_dict(self, found):\n"
                f"        state = found['scale']\n        {loading}\n\n\nscaler = Scaler()\n"
                "accelerator.register_for_checkpointing(scaler)\n\n\nclass Net"
            ),
        ),
        (BACKWARD, "accelerator.backward(loss * scaler.scale)"),
        (
            IF_SYNC,
            IF_SYNC + "for p in model.parameters():\n                    p.grad.mul_(scaler.inverse)\n                ",
        ),
    )


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
        code: of the finding in the first of them; "" for a right script, "failed" if the layout can't be run.
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
    "matrices_split": Script(layouts="tp2,tp2_fsdp2", base=SEQUENCES),
    "sequences_split": Script(layouts="cp2,ranks2,fsdp2", base=SEQUENCES),
    "experts_split": Script(layouts="ep2,ranks2,fsdp2", base=EXPERTS),
    "stages": Script(layouts="pp2,parts2", base=STAGES),
    "stream": Script(layouts="ranks2,resume", base=STREAM),
    "stream_in_parts": Script(
        layouts="ranks2,parts2,ranks2_parts2,fsdp2",
        base=STREAM,
        changes=(
            ("        loss = nn", "        with accelerator.accumulate(model):\n            loss = nn"),
            ("        accelerator.backward", "            accelerator.backward"),
            ("        optimizer.step()", "            optimizer.step()"),
            ("        optimizer.zero_grad()", "            optimizer.zero_grad()"),
        ),
    ),
    "bfloat16": Script(layouts="bf16,fsdp2_bf16", base=BARE),
    "adapter_saved": Script(
        (*ADAPTER, ("for epoch", "accelerator.register_for_checkpointing(adapter)\nfor epoch")), "resume", base=BARE
    ),
    "scaled": Script(scaler("self.scale = state"), "resume,parts2", base=BARE),
    "tied": Script((("model = Net()\n", TIED),), "ranks2,fsdp2", base=BARE),
    "unused_parameters": Script((FIND_UNUSED, (CELL, "return self.last(torch.tanh(self.first(inputs)))")), "ranks2"),
    "plateau": Script((PLATEAU, STEP_ON_MEAN), "ranks2", base=BARE),
    "evaluation_on_all_ranks": Script(
        (HALVES, (BACKWARD, f"model.eval()\n            model.train()\n            {BACKWARD}")), "ranks2"
    ),
    "cache_of_a_batch": Script(
        (*CACHE, ("            loss = ", "            cache.clear()\n            loss = ")), "parts2,ranks2", base=BARE
    ),
    "by_hand_with_a_mean": Script(MEAN_BY_HAND, "ranks2", base=BY_HAND),
    "by_hand_sharded": Script(
        (
            (
                "from torch.nn.parallel import DistributedDataParallel\n",
                "from torch.distributed.fsdp import fully_shard\n",
            ),
            ("model = DistributedDataParallel(", "model = fully_shard("),
        ),
        "ranks2",
        base=BY_HAND,
    ),
    "penalty": Script(
        (
            (
                LOSS,
                (
                    "inputs.requires_grad_()\n            found = model(inputs)\n"
                    "            slope, = torch.autograd.grad(found.sum(), inputs, create_graph=True)\n"
                    "            loss = nn.functional.mse_loss(found, targets) + slope.square().mean()"
                ),
            ),
        ),
        "parts2",
        base=BARE,
    ),
    "recurrent": Script(
        (
            (GATE, "self.gate = nn.Linear(6, 16)\n        self.cell = nn.LSTM(6, 16, batch_first=True)"),
            (CELL, "gate = gate + self.cell(inputs.unsqueeze(1))[0][:, 0]\n        " + CELL),
        )
    ),
    "convolutions": Script(
        (
            (GATE, "self.gate = nn.Linear(6, 16)\n        self.filter = nn.Conv1d(1, 1, 3, padding=1)"),
            (CELL, "gate = gate * self.filter(gate.unsqueeze(1))[:, 0]\n        " + CELL),
        )
    ),
    "warm_up": Script((("StepLR(optimizer, 2, 0.5)", "LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))"),)),
    "rate_counted_by_hand": Script(
        (
            ("scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)\n", "num_updates = 0\n"),
            (PREPARE, prepare("model", "optimizer", "loader")),
            (
                "            scheduler.step()",
                (
                    "            if accelerator.sync_gradients:\n"
                    "                num_updates += 1\n"
                    "                for group in optimizer.param_groups:\n"
                    "                    group['lr'] = 1e-2 * 0.5 ** (num_updates // 2)"
                ),
            ),
        ),
        "ranks2,parts2",
    ),
    "micro_batches_set_later": Script(
        (("accelerator = Accelerator()", "accelerator = Accelerator()\naccelerator.gradient_accumulation_steps = 2"),),
        "parts2,ranks2",
    ),
    "nesterov": Script(((ADAM, "SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)"),)),
    "two_losses": Script(
        ((BACKWARD, f"{BACKWARD}\n            accelerator.backward(model(inputs * 2).square().mean())"),),
        "ranks2,parts2",
    ),
    "norm_of_the_largest": Script(((CLIP, CLIP[:-1] + ", norm_type=float('inf'))"),)),
    "batch_sampler": Script(
        (
            (
                "DataLoader(data, 8, shuffle=True)",
                "DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 8, True))",
            ),
            (
                "import DataLoader, TensorDataset",
                "import BatchSampler, DataLoader, RandomSampler, TensorDataset",
            ),
        ),
        "ranks2,resume",
    ),
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
    "weights_in_bfloat16": Script(
        ((PREPARE, "if accelerator.num_processes > 1:\n    model.to(torch.bfloat16)\n" + PREPARE),),
        "bf16",
        "V09",
        "parameter",
        base=BARE,
    ),
    "adapter_reverts": Script(ADAPTER, "resume", "V14", "gradient", base=BARE),
    "sampler_divides_too": Script(
        (
            ("DataLoader(data, 8, shuffle=True)", "DataLoader(Part(data), 8)"),
            (
                "loader = ",
                (
                    "class Part(torch.utils.data.Dataset):\n    def __init__(self, data):\n"
                    "        self.data = data\n\n    def __len__(self):\n"
                    "        return len(self.data) // accelerator.num_processes\n\n"
                    "    def __getitem__(self, index):\n"
                    "        return self.data[index * accelerator.num_processes + accelerator.process_index]\n"
                    "\n\nloader = "
                ),
            ),
        ),
        "ranks2",
        "V13",
        "gradient",
    ),
    "clipped_by_a_shards_norm": Script(((CLIP, CLIP_BY_HAND),), "fsdp2", "V13", "gradient", base=BARE),
    "scale_changed_by_loading": Script(
        scaler("self.scale = state * 2"), "resume", "V14", "gradient", factor=2.0, base=BARE
    ),
    "second_resume": Script(
        (
            ("        self.next = 0\n\n    def __iter__", "        self.next = self.start = 0\n\n    def __iter__"),
            ('return {"next": self.next}', 'return {"next": self.next - self.start}'),
            ('self.next = state["next"]', 'self.next = self.start = state["next"]'),
        ),
        "resume",
        "V14",
        "gradient",
        base=STREAM,
    ),
    "loss_times_expert_ranks": Script(
        ((BACKWARD, "accelerator.backward(loss * accelerator.num_processes)"),),
        "ep2",
        "V02",
        "gradient",
        factor=2.0,
        base=EXPERTS,
    ),
    "nothing_before_the_experts": Script(
        (
            (
                "self.entrance(inputs)\n",
                (
                    "self.entrance(inputs)\n        if accelerator.num_processes > 1:\n"
                    "            hidden = hidden.detach()\n"
                ),
            ),
        ),
        "ep2",
        "V04",
        "gradient",
        "entrance",
        base=EXPERTS,
    ),
    "experts_times_ranks": Script(
        ((f"{BACKWARD}\n", f"{BACKWARD}\n        model.experts.weight.grad.mul_(accelerator.num_processes)\n"),),
        "ep2",
        "V02",
        "gradient",
        "experts",
        2.0,
        EXPERTS,
    ),
    "router_detached": Script(
        (
            (
                "        order = choice",
                (
                    "        weights = weights.detach() if accelerator.num_processes > 1 else weights\n"
                    "        order = choice"
                ),
            ),
        ),
        "ep2",
        "V04",
        "gradient",
        "router",
        base=EXPERTS,
    ),
    "second_stage_weighs_double": Script(
        (
            (
                "            if accelerator.sync_gradients:\n",
                (
                    "            for p in model.parameters():\n"
                    "                if p.grad is not None and accelerator.process_index:\n"
                    "                    p.grad.mul_(2)\n            if accelerator.sync_gradients:\n"
                ),
            ),
        ),
        "pp2",
        "V02",
        "gradient",
        factor=2.0,
        base=STAGES,
    ),
    "cache_of_another_batch": Script(
        (
            *CACHE,
            (
                "optimizer.zero_grad()",
                "optimizer.zero_grad()\n            if accelerator.sync_gradients:\n                cache.clear()",
            ),
        ),
        "parts2",
        "V13",
        "gradient",
        base=BARE,
    ),
    "exchange_in_each_part": Script(
        (
            (
                "    with accelerator.accumulate(model):\n",
                (
                    "    with accelerator.accumulate(model):\n            if accelerator.num_processes > 1:\n"
                    "                model.require_backward_grad_sync = True\n"
                ),
            ),
        ),
        "ranks2_parts2",
        "V15",
        "exchange of gradients",
        factor=2.0,
    ),
    "plateau_of_a_rank": Script(
        (PLATEAU, ("scheduler.step()", "scheduler.step(loss.detach())")), "ranks2", "V07", "learning rate", base=BARE
    ),
    "plateau_of_an_evaluation": Script(
        (
            PLATEAU,
            (
                "scheduler.step()",
                (
                    "with torch.no_grad():\n"
                    "                own = x[:8][accelerator.process_index :: accelerator.num_processes]\n"
                    "                evaluation = model(own.to(inputs)).square().mean()\n"
                    "            scheduler.step(evaluation)"
                ),
            ),
        ),
        "ranks2",
        "V07",
        "learning rate",
        base=BARE,
    ),
    "used_on_one_rank": Script(
        (FIND_UNUSED, (CELL, f"gate = gate if accelerator.is_main_process else torch.ones_like(gate)\n        {CELL}")),
        "ranks2",
        "V13",
        "gradient",
    ),
    "tie_cut": Script(
        (
            (
                "model = Net()\n",
                TIED
                + (
                    "if accelerator.num_processes > 1:\n"
                    "    model.gate.weight = nn.Parameter(model.gate.weight.detach().clone())\n"
                ),
            ),
        ),
        "ranks2",
        "V13",
        "gradient",
        "first.weight",
        base=BARE,
    ),
    "optimizer_of_a_copy": Script(
        (
            (
                "AdamW(model.parameters()",
                "AdamW((__import__('copy').deepcopy(model) if dist.get_world_size() > 1 else model).parameters()",
            ),
        ),
        "ranks2",
        "V04",
        "gradient",
        base=BY_HAND,
    ),
    "average_of_a_shard": Script(
        (
            (
                PREPARE,
                PREPARE
                + (
                    "\n\n\ndef own(p):\n"
                    "    return p.detach().to_local() if hasattr(p, 'to_local') else p.detach()\n\n\n"
                    "average = nn.ParameterList([nn.Parameter(own(p).clone(), False) for p in model.parameters()])"
                ),
            ),
            (
                "            scheduler.step()",
                (
                    "            for mine, theirs in zip(average, model.parameters()):\n"
                    "                mine.lerp_(own(theirs), 0.1)\n            scheduler.step()"
                ),
            ),
        ),
        "fsdp2",
        "V05",
        "parameter",
        "ParameterList",
        base=BARE,
    ),
    "schedule_stepped_twice": Script(
        (
            (
                "scheduler.step()",
                "scheduler.step()\n            if accelerator.num_processes > 1:\n                scheduler.step()",
            ),
        ),
        "ranks2",
        "V07",
        "learning rate",
    ),
    "clipped_in_each_part": Script(((IF_SYNC + CLIP, "            " + CLIP),), "parts2", "V13", "gradient"),
    "stopped_on_one_rank": Script(
        (
            (
                "            optimizer.zero_grad()\n",
                (
                    "            optimizer.zero_grad()\n"
                    "        if accelerator.process_index and optimizer.state[next(model.parameters())]['step'] > 2:\n"
                    "            raise SystemExit\n"
                ),
            ),
        ),
        "ranks2",
        "failed",
        base=BARE,
    ),
    "evaluation_on_one_rank": Script(
        (
            HALVES,
            (
                BACKWARD,
                (
                    f"{BACKWARD}\n"
                    "            if accelerator.num_processes > 1 and accelerator.is_main_process:\n"
                    "                model.eval()"
                ),
            ),
        ),
        "ranks2",
        "V13",
        "gradient",
    ),
    "rate_by_micro_batches": Script(
        (("lr=1e-2", "lr=1e-2 * loader.batch_size / 8"),), "parts2", "V07", "learning rate", factor=0.5
    ),
    "seed_of_a_rank": Script(
        (*MEAN_BY_HAND, ("loader = DataLoader", "torch.manual_seed(dist.get_rank())\nloader = DataLoader")),
        "ranks2",
        "V13",
        "gradient",
        base=BY_HAND,
    ),
    "by_hand_divided_again": Script(
        (("loss.backward()", "(loss / dist.get_world_size()).backward()"),),
        "ranks2",
        "V02",
        "gradient",
        factor=0.5,
        base=BY_HAND,
    ),
    "copies_times_tensor_ranks": Script(
        (
            (
                f"{BACKWARD}\n        ",
                f"{BACKWARD}\n        model.blocks[0].norm.weight.grad.mul_(accelerator.num_processes)\n        ",
            ),
        ),
        "tp2",
        "V02",
        "gradient",
        "norm",
        2.0,
        SEQUENCES,
    ),
    "positions_of_a_part": Script(
        ((LOGITS, "places = torch.arange(inputs.shape[1]).expand(len(batch), -1)\n            " + LOGITS),),
        "cp2",
        "V13",
        "gradient",
        base=SEQUENCES,
    ),
    "targets_of_a_part": Script(
        ((LOGITS, "targets = inputs.roll(-1, 1)\n            " + LOGITS),), "cp2", "V13", "gradient", base=SEQUENCES
    ),
    "adapter_in_each_part": Script(ADAPTER, "parts2", "V01", "samples", base=BARE),
    "two_passes_of_one_graph": Script(
        ((BACKWARD, "accelerator.backward(loss, retain_graph=True)\n            accelerator.backward(loss * 0.5)"),),
        "ranks2",
        "V05",
        "gradient",
    ),
}
