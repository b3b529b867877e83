"""Hardware that computes wrong: flipped bits of each kind are named by rank, and a sound run isn't accused."""

from __future__ import annotations

import io
import random
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.errors import HardwareError, HardwareWarning, SettingError
from accelerate.guests.checks.hardware_check import (
    _AGAIN,
    _FOR_ANOTHER,
    _MEMORY,
    _NEIGHBOUR,
    _UPDATE,
    _Finding,
    _verdict,
)
from accelerate.utils import GradScalerKwargs
from tests.ranks import run_on_ranks
from tests.slow import slow_for

SLOW = slow_for("minutes of updates", "kills")

#: What the hardware does is no state of the program, which a check would put back.
HARDWARE: Any = types.ModuleType("hardware")

KINDS = ("weight", "optimizer state", "activation", "gradient", "update")


class Net(nn.Module):
    """Dropout, batch statistics, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.twice = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        return self.last(self.drop(self.twice(self.twice(hidden).relu()).relu()))


def flip(tensor: torch.Tensor, chosen: random.Random) -> None:
    """Flip one bit of one element of ``tensor``, without any operation that autograd sees."""
    whole = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    bits = whole.data.view(-1).view(torch.uint8)
    bits[chosen.randrange(len(bits))] ^= 1 << chosen.randrange(8)


class Faults:
    """One flipped bit of a kind, at a place and an update that are drawn."""

    def __init__(self, kind: str, seed: int, model: nn.Module, optimizer: Any, at: int, *, recurs: bool) -> None:
        self.chosen, self.kind, self.at, self.recurs = random.Random(seed), kind, at, recurs
        self.update, self.done = 0, False
        self.model, self.optimizer = model, optimizer
        self.parameters = [parameter for parameter in model.parameters() if self.part(parameter).numel()]
        if kind == "activation":
            layers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.BatchNorm1d))]
            HARDWARE.faults = self
            self.chosen.choice(layers).register_forward_hook(lambda _, __, output: HARDWARE.faults.damage(output))
        elif kind == "gradient":
            self.number, self.hooked = self.chosen.randrange(len(self.parameters)), set[int]()
            HARDWARE.faults = self
            model.register_forward_pre_hook(lambda model, given: HARDWARE.faults.hook_gradient(model, given))

    def hook_gradient(self, model: nn.Module, _: object) -> None:
        parameter = list(model.parameters())[self.number]  # whole, also under FSDP2
        if id(parameter) not in self.hooked:
            self.hooked.add(id(parameter))
            parameter.register_hook(lambda gradient: HARDWARE.faults.damage(gradient))

    def is_due(self) -> bool:
        return self.update >= self.at if self.recurs else self.update == self.at and not self.done

    def damage(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None and self.is_due():
            self.done = True
            flip(tensor, self.chosen)

    def in_memory(self, kind: str) -> None:
        """Flip a bit of a parameter, or of a state, where this fault is one of that kind."""
        if kind != self.kind or not self.is_due():
            return
        self.done = True
        parameter = self.chosen.choice(self.parameters)
        if kind == "optimizer state":
            parameter = self.optimizer.optimizer.state[parameter][self.chosen.choice(["exp_avg", "exp_avg_sq"])]
        flip(parameter, self.chosen)

    @staticmethod
    def part(tensor: Any) -> torch.Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def made(strategy: str, **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP") if strategy == "fsdp2" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def train(
    strategy: str,
    every: int,
    updates: int,
    kind: str = "",
    rank: int = 0,
    seed: int = 0,
    at: int = 0,
    recurs: bool = False,
) -> tuple[str, int]:
    """Return what the check raised, and in which update."""
    accelerator, model, optimizer = made(strategy)
    faults = None
    if accelerator.process_index == rank and kind:
        faults = Faults(kind, seed, model, optimizer, at, recurs=recurs)
        optimizer.optimizer.register_step_post_hook(lambda *_: faults.in_memory("update"))
    accelerator.watch_run(log=False, rules=None, sdc_check=every)
    torch.manual_seed(accelerator.process_index)
    for update in range(1, updates + 1):
        if faults is not None:
            faults.update = update
        optimizer.zero_grad()
        loss = model(torch.randn(16, 6)).square().mean()
        if faults is not None and update > 1:
            faults.in_memory("weight")
            faults.in_memory("optimizer state")
        try:
            accelerator.backward(loss)
            optimizer.step()
        except HardwareError as error:
            return str(error), update
    return "", updates


@pytest.mark.nonfinite  # a bit of the exponent
@pytest.mark.parametrize("strategy", [pytest.param("single", marks=SLOW), "ddp", pytest.param("fsdp2", marks=SLOW)])
def test_a_flipped_bit_is_named_by_rank(strategy: str) -> None:
    ranks = 1 if strategy == "single" else 2

    def on_rank() -> list[tuple[str, int]]:
        sound = train(strategy, 2, 7)
        recurs = train(strategy, 4, 9, "weight", rank=ranks - 1, seed=5, at=6, recurs=True)
        return [sound, recurs, *(train(strategy, 1, 6, kind, rank=ranks - 1, seed=5, at=4) for kind in KINDS)]

    said = run_on_ranks(on_rank, ranks)
    assert said == said[:1] * ranks
    assert said[0] is not None and said[0][0] == ("", 7)
    # In updates that aren't checked, and within the next one that is: of a shard, the passes of all ranks differ then.
    assert f"update 8: rank {ranks - 1}: " in said[0][1][0] and _MEMORY in said[0][1][0], said[0][1]
    words = {
        "weight": _MEMORY,
        "optimizer state": _MEMORY,
        "activation": "the output of",
        "gradient": "the gradient of",
    }
    for kind, (text, update) in zip(KINDS, said[0][2:], strict=True):
        assert text.startswith("Hardware computes or remembers wrong"), kind
        assert f": rank {ranks - 1}: " in text and words.get(kind, _UPDATE) in text and update == 4, (kind, text)


def test_a_rank_that_is_wrong_each_time_is_found_by_its_neighbours() -> None:
    """One that gives the same wrong numbers again agrees with itself."""

    def on_rank() -> str:
        accelerator, model, optimizer = made("ddp")
        accelerator.watch_run(log=False, sdc_check=2)
        HARDWARE.is_broken = False
        model.module.last.register_forward_hook(lambda _, __, output: output * 1.0001 if HARDWARE.is_broken else output)
        try:
            for update in range(1, 7):
                HARDWARE.is_broken = update > 2 and accelerator.process_index == 1
                optimizer.zero_grad()
                accelerator.backward(model(torch.randn(16, 6)).square().mean())
                optimizer.step()
        except HardwareError as error:
            return str(error)
        return ""

    said = run_on_ranks(on_rank, 3)
    assert said == said[:1] * 3
    assert "found at update 4: rank 1: " in str(said[0]) and "computed again by the next rank" in str(said[0])


def test_of_two_ranks_the_one_that_does_not_agree_with_itself_is_named() -> None:
    """One that is wrong now and then, here while it computes what the other has computed."""

    def on_rank() -> str:
        accelerator, model, optimizer = made("ddp")
        accelerator.watch_run(log=False, sdc_check=2)
        HARDWARE.is_broken = False

        def damage(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
            HARDWARE.forwards += 1  # since the last update: the program's, the same again, the other rank's
            return output + 1 if HARDWARE.is_broken and HARDWARE.forwards == 3 else output

        model.module.last.register_forward_hook(damage)
        try:
            for update in range(1, 5):
                HARDWARE.forwards, HARDWARE.is_broken = 0, update > 2 and accelerator.process_index == 1
                optimizer.zero_grad()
                accelerator.backward(model(torch.randn(16, 6)).square().mean())
                optimizer.step()
        except HardwareError as error:
            return str(error)
        return ""

    said = run_on_ranks(on_rank, 2)
    assert said == said[:1] * 2
    assert f"found at update 4: rank 1: the output of `last`{_FOR_ANOTHER}" in str(said[0])


def test_what_no_collective_brought_decides_before_what_one_may_have() -> None:
    """Ranks whose passes differ since another rank's weights or statistics were wrong aren't named."""

    def found(what: str, place: int, *ranks: int) -> _Finding:
        return _Finding(what, place, ranks, is_proven=True)

    passes = [found(f"output{_AGAIN}", place, rank) for rank, place in ((0, 4), (1, 2), (2, 4))]
    pairs = [found(f"output{_NEIGHBOUR}", 0, 0, 1), found(f"output{_NEIGHBOUR}", 0, 1, 2)]
    assert _verdict([*pairs, *passes, found(f"`w`{_MEMORY}", 9, 2)]) == f"rank 2: `w`{_MEMORY}"
    assert _verdict([*passes, found(f"`w`{_UPDATE}", 9, 0)]) == f"rank 0: `w`{_UPDATE}"
    assert _verdict([*pairs, *passes]).startswith("rank 1: output")  # it came first there
    assert _verdict([passes[0], passes[2]]).startswith("one of ranks 0 and 2: output")
    assert _verdict(pairs).startswith("rank 1: output") and _verdict(pairs[:1]).startswith("one of ranks 0 and 1: ")


def test_a_program_that_cant_be_repeated_is_left_in_peace_and_told_once() -> None:
    class Noisy(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator()
            generator.seed()
            return super().forward(inputs + torch.rand(inputs.shape, generator=generator))

    accelerator = Accelerator(cpu=True)
    model = Noisy()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator.watch_run(log=False, sdc_check=1)
        for _ in range(4):
            optimizer.zero_grad()
            penalty = model.first.weight.square().sum()  # a gradient that no pass through the model gives
            accelerator.backward(model(torch.randn(16, 6)).square().mean() + penalty)
            optimizer.step()
    texts = [str(one.message) for one in said if one.category is HardwareWarning]
    assert texts and all(text.startswith("The hardware check leaves something out: ") for text in texts)
    assert len(texts) == len(set(texts)) <= 2


def test_a_warning_lets_the_run_go_on_and_what_cant_be_checked_is_refused() -> None:
    accelerator, model, optimizer = made("single", gradient_accumulation_steps=2)
    with pytest.raises(SettingError, match=r"sdc_check=-1, on_sdc='raise'.*every n updates"):
        accelerator.watch_run(log=False, sdc_check=-1)
    with pytest.raises(SettingError, match="'raise' or 'warn'"):
        accelerator.watch_run(log=False, sdc_check=1, on_sdc="stop")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="nothing to check yet"):
        Accelerator(cpu=True).watch_run(log=False, sdc_check=1)
    accelerator.watch_run(log=False, sdc_check=1, on_sdc="warn")
    with pytest.warns(HardwareWarning, match="found at update 3: rank 0: `first.weight` changed between two updates"):
        for number in range(8):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.randn(16, 6)).square().mean())
                if number == 4:
                    flip(model.first.weight, random.Random(1))
                optimizer.step()
                optimizer.zero_grad()
    assert optimizer.num_updates == 4


def test_other_strategies_are_refused_by_name() -> None:
    def on_rank() -> str:
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
        with pytest.raises(SettingError) as error:
            accelerator.watch_run(log=False, sdc_check=10)
        return str(error.value)

    assert "sdc_check=10" in run_on_ranks(on_rank, 2)[0] and "under FlatShard" in run_on_ranks(on_rank, 2)[0]


class Around(torch.optim.Optimizer):
    """An optimizer that steps another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


class Together(torch.optim.SGD):
    """An optimizer whose rate is that of all parameters together, and says nothing in the first updates."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [each.grad for group in self.param_groups for each in group["params"]]
        norm = torch.stack([each.square().sum() for each in gradients if each is not None]).sum().sqrt()
        for group in self.param_groups:
            group["lr"] = 0.01 * float((1 / norm).clamp(max=1))
        super().step(closure)


class Same(torch.optim.AdamW):
    """AdamW by another name."""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda parameters: Around(torch.optim.SGD(parameters, lr=0.1)), ["Around"]),
        (lambda parameters: Together(parameters, lr=0.01), ["Together"]),
        (lambda parameters: Same(parameters), []),
    ],
)
def test_no_step_is_called_again_that_does_more_than_update_each_parameter(make: Any, said: list[str]) -> None:
    weights, texts = [], list[str]()
    for every in (0, 2):
        torch.manual_seed(3)
        model = nn.Linear(4, 3)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, make(model.parameters()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.watch_run(log=False, rules=None, sdc_check=every)
            for update in range(5):
                optimizer.zero_grad()
                accelerator.backward(model(torch.ones(2, 4)).square().mean() * (0.01 if update < 3 else 100))
                optimizer.step()
        texts += [str(one.message) for one in caught if one.category is HardwareWarning]
        weights.append(model.weight.detach())
    assert torch.equal(*weights)
    assert [f"the update of {name}, " in text for name, text in zip(said, texts, strict=True)] == [True] * len(said)


def test_a_check_ends_where_another_begins_or_none_is_wanted() -> None:
    accelerator, model, optimizer = made("single")

    def hooks() -> int:
        of_step = len(optimizer.optimizer._optimizer_step_pre_hooks)
        return of_step + sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())

    without, asked = hooks(), {"log": False, "rules": None}
    accelerator.watch_run(sdc_check=5, **asked)
    once = hooks()
    accelerator.watch_run(sdc_check=1, **asked)
    assert hooks() == once > without
    model(torch.randn(16, 6))
    torch.save(accelerator.unwrap_model(model), io.BytesIO())  # as ever
    accelerator.watch_run(**asked)
    assert hooks() == without
    accelerator.watch_run(sdc_check=5, **asked)
    accelerator.free_memory()
    assert hooks() == without


def test_only_forwards_that_are_trained_are_computed_again() -> None:
    """Not those of an evaluation with gradients; a mask that was made in inference mode does no harm."""

    class Masked(nn.Linear):
        def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            HARDWARE.calls += 1
            return super().forward(inputs) + mask

    accelerator = Accelerator(cpu=True)
    model = Masked(4, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    HARDWARE.calls = 0
    accelerator.watch_run(log=False, rules=None, sdc_check=1)
    with torch.inference_mode():
        mask = torch.ones(3)
    inputs = torch.ones(2, 4)
    for _ in range(10):
        model(inputs, mask)
    first, second = model(inputs, mask), model(inputs + 1, mask)
    accelerator.backward((first + second).square().mean())
    HARDWARE.calls = 0
    optimizer.step()
    assert HARDWARE.calls == 4  # two, twice since it is the first update


def test_passes_of_updates_that_the_scaler_left_out_are_forgotten() -> None:
    """A scaler begins so high that several updates are left out, each with all that its passes were given."""
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**40, backoff_factor=2.0**-8)]
    )
    model = nn.Linear(4, 3)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.watch_run(log=False, rules=None, sdc_check=1)
    given: list[weakref.ref[torch.Tensor]] = []
    for number in range(6):
        inputs = torch.ones(2, 4)
        given.append(weakref.ref(inputs))
        accelerator.backward(model(inputs).square().mean())
        del inputs
        assert sum(each() is not None for each in given) == 1
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.num_updates == max(0, number - 3)  # 2^40, 2^32, 2^24 and 2^16 times the gradient is too much


def test_what_cant_be_recorded_is_refused() -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:  # torch's own isn't called
            self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state

    model = Net()
    bare = Bare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, bare)
    with pytest.raises(SettingError, match=r"sdc_check=2.*Bare takes no hooks of its step"):
        accelerator.watch_run(log=False, sdc_check=2)
    model.first.compile(backend="eager")
    with pytest.raises(SettingError, match="a compiled model isn't recorded"):
        accelerator.watch_run(log=False, sdc_check=2)


class Deep:
    """What recursion doesn't get to the end of."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_no_rank_waits_for_one_that_cant_compute_its_passes_again(strategy: str) -> None:
    """Whose inputs have changed since (FSDP2), or can't be sent to its neighbour (DDP)."""

    class WithMore(Net):
        def forward(self, inputs: torch.Tensor, more: Any = None) -> torch.Tensor:  # type: ignore[override]
            return super().forward(inputs)

    def on_rank() -> list[str]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if strategy == "fsdp2" else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = WithMore()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        more: Any = None
        for _ in range(100_000 if strategy == "ddp" and accelerator.process_index == 0 else 0):
            more = Deep(more)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            accelerator.watch_run(log=False, rules=None, sdc_check=1)
            inputs = torch.randn(16, 6)
            accelerator.backward(model(inputs, more).square().mean())
            if accelerator.process_index == 0 and strategy == "fsdp2":
                inputs.zero_()
            optimizer.step()
        while more is not None:  # one by one
            more = more.inside
        return [str(one.message) for one in said if one.category is HardwareWarning]

    said = run_on_ranks(on_rank, 2)
    if strategy == "fsdp2":
        assert all("not all ranks can compute theirs again" in str(texts) for texts in said)
    else:
        assert "be sent to another rank (RecursionError" in str(said[0]) and said[1] == []


@SLOW
@pytest.mark.timeout(3600)
@pytest.mark.nonfinite
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp2", 2)])
def test_a_hundred_flips_are_named_within_k_updates(strategy: str, ranks: int) -> None:
    """A flip in an update that is checked; where only each third is, one that happens again (bad hardware)."""
    drawn = random.Random(0)
    cases = [
        (drawn.choice(KINDS), drawn.randrange(ranks), number, drawn.randrange(4, 9), number % 2)
        for number in range(100)
    ]

    def on_rank() -> list[tuple[str, int]]:
        return [
            train(strategy, 3 if recurs else 1, 14, kind, rank, seed, at, recurs=bool(recurs))
            for kind, rank, seed, at, recurs in cases
        ]

    said = run_on_ranks(on_rank, ranks, timeout_seconds=1800)
    missed = [
        (case, text, update)
        for case, (text, update) in zip(cases, said[0], strict=True)
        if f": rank {case[1]}: " not in text or update > case[3] + (3 if case[4] else 1)
    ]
    assert not missed, (len(missed), missed)


@SLOW
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("strategy", "every"), [("single", 1), ("ddp", 10), ("fsdp2", 10)])
def test_ten_thousand_sound_updates_raise_no_alarm(strategy: str, every: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", HardwareWarning)
        said = run_on_ranks(train, 1 if strategy == "single" else 2, strategy, every, 10_000, timeout_seconds=3500)
    assert said == [("", 10_000)] * len(said)
