"""The blog post that introduced the library: what the objects do."""

from __future__ import annotations

import copy
import warnings
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from accelerate import Accelerator
from accelerate.utils import set_seed, synchronize_rng_states
from tests.ranks import run_on_ranks
from tests.seeds.tools import ROOT

row = pytest.mark.row


def numbers(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), **options)


def seen(loader: Any) -> list[list[int]]:
    """The samples of each batch."""
    return [batch[0].tolist() for batch in loader]


# ------------------------------------------------------------------------------------------- the five lines


@row("001-01", "001-59")
def test_the_loop_stays_the_users_with_any_loss() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(8, 3), torch.randint(0, 4, (8,))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(inputs, targets), 4))
    losses = []
    for _ in range(10):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), labels) + nn.functional.l1_loss(
                model(batch).mean(), labels.float().mean()
            )
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


@row("001-09", "003-02", "003-03", "002-05", "003-07")
def test_the_device_is_a_torch_device_and_does_not_change() -> None:
    accelerator = Accelerator(cpu=True)
    device = accelerator.device
    assert isinstance(device, torch.device)
    assert torch.zeros(1, device=accelerator.device).device == device
    assert torch.ones(2).to(accelerator.device).device == device
    accelerator.prepare(nn.Linear(1, 1).to(device))
    assert accelerator.device == device


@row("001-10")
def test_a_transformer_is_prepared_on_two_processes() -> None:
    def step() -> tuple[bool, bool, float]:
        accelerator = Accelerator(cpu=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own remark on nested tensors
            model = nn.Transformer(8, 2, 1, 1, 16)
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        model.train()
        source = torch.randn(2, 3, 8)
        loss = model(source, source).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        total = sum(parameter.detach().sum() for parameter in model.parameters())
        return isinstance(model, DistributedDataParallel), model.training, float(total)

    first, second = run_on_ranks(step, 2)
    assert first[:2] == (True, True)
    assert first[2] == second[2]


@row("001-11")
def test_the_loop_works_with_either_name_of_the_optimizer() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optim)
    for either in (optim, optimizer):  # the bare one moves the same parameters
        before = [p.detach().clone() for p in model.parameters()]
        either.zero_grad()
        accelerator.backward(model(torch.ones(1, 2)).sum())
        either.step()
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    documents = [ROOT / "README.md", *(ROOT / "examples").glob("*.py")]
    assert not [path for path in documents if "optim." in path.read_text().replace("torch.optim.", "")]


@row("001-12")
def test_batches_of_one_are_sharded_and_completed() -> None:
    first, second = run_on_ranks(lambda: seen(Accelerator(cpu=True).prepare(numbers(7))), 2)
    assert [len(first), len(second)] == [4, 4]
    assert {i for batch in first + second for i in batch} == set(range(7))


@row("001-13", "001-16", "002-06", "004-11")
def test_the_model_is_placed_and_placing_it_again_is_harmless() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    assert {parameter.device for parameter in model.parameters()} == {accelerator.device}
    (loader,) = (accelerator.prepare(numbers(4)),)
    for (batch,) in loader:
        assert batch.to(accelerator.device) is batch


@row("001-14", "001-25")
def test_prepare_takes_any_order_and_leaves_foreign_objects_alone() -> None:
    import itertools

    model = nn.Linear(1, 1)
    objects = [model, torch.optim.SGD(model.parameters(), lr=1.0), numbers(3)]
    kinds = [nn.Module, torch.optim.Optimizer, DataLoader]
    for order in itertools.permutations(range(3)):
        accelerator = Accelerator(cpu=True)
        out = accelerator.prepare(*[objects[i] for i in order])
        assert all(isinstance(out[place], kinds[i]) for place, i in enumerate(order))
    foreign = object()
    assert Accelerator(cpu=True).prepare(foreign) is foreign


@row("001-20")
def test_the_same_functions_work_in_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True)
    tensor = torch.arange(3)
    assert torch.equal(accelerator.gather(tensor), tensor)
    assert torch.equal(accelerator.gather_for_metrics(tensor), tensor)
    assert torch.equal(accelerator.reduce(tensor, reduction="sum"), tensor)
    assert torch.equal(accelerator.pad_across_processes(tensor), tensor)
    accelerator.print("said once")
    assert capsys.readouterr().out == "said once\n"
    accelerator.save({"weight": tensor}, tmp_path / "file")
    assert (tmp_path / "file").exists()
    accelerator.wait_for_everyone()
    with accelerator.main_process_first(), accelerator.split_between_processes([1, 2]) as mine:
        assert mine == [1, 2]


# ------------------------------------------------------------------------------------------- the constructor


@row("001-22")
def test_cpu_can_be_forced() -> None:
    def facts() -> tuple[str, str, int]:
        accelerator = Accelerator(cpu=True)
        return accelerator.device.type, str(accelerator.distributed_type).split(".")[-1], accelerator.num_processes

    assert run_on_ranks(facts, 2) == [("cpu", "MULTI_CPU", 2)] * 2
    assert facts() == ("cpu", "NO", 1)


@row("001-23")
def test_the_old_word_for_fp16_is_understood_with_a_note() -> None:
    with pytest.warns(FutureWarning, match="fp16"):
        accelerator = Accelerator(cpu=True, fp16=True)
    assert accelerator.mixed_precision == "fp16"
    # fp16 on a CPU is the real thing where torch has it: the forward pass computes in half precision.
    model = nn.Sequential(nn.Linear(2, 2))
    inside = []
    model[0].register_forward_hook(lambda module, inputs, output: inside.append(output.dtype))
    model = accelerator.prepare(model)
    output = model(torch.ones(1, 2))
    assert inside == [torch.float16] and output.dtype == torch.float32


@row("001-60")
def test_the_precision_is_a_switch_of_the_constructor() -> None:
    def loss(precision: str) -> float:
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        torch.manual_seed(0)
        model = accelerator.prepare(nn.Linear(16, 1))
        return model(torch.ones(4, 16)).mean().item()

    from accelerate.state import AcceleratorState

    plain = loss("no")
    AcceleratorState._reset_state(True)
    assert loss("bf16") == pytest.approx(plain, rel=0.05, abs=0.02)


@row("001-21")
@pytest.mark.parametrize(
    ("variables", "rank", "size"),
    [
        ({}, 0, 1),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 1, 4),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
            },
            2,
            3,
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, 1, 2),
        (
            {
                "MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
            1,
            2,
        ),
        (
            {
                "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0", "SLURM_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]",
                "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS_PER_NODE": "2",
            },
            3,
            4,
        ),
    ],
)  # fmt: skip
def test_the_environment_says_who_i_am(variables: dict[str, str], rank: int, size: int) -> None:
    from accelerate.distributed.environment import detect

    identity = detect(variables)
    assert (identity.rank, identity.size) == (rank, size) if identity is not None else size == 1


# ------------------------------------------------------------------------------------------- the wrappers


@row("001-26", "004-01")
def test_the_model_is_in_the_proper_container() -> None:
    def is_wrapped() -> bool:
        return isinstance(Accelerator(cpu=True).prepare(nn.Linear(1, 1)), DistributedDataParallel)

    assert run_on_ranks(is_wrapped, 2) == [True, True]
    assert type(Accelerator(cpu=True).prepare(nn.Linear(1, 1))) is nn.Linear


class Greeter(nn.Linear):
    def greet(self) -> str:
        return "hello"


@row("001-27")
def test_unwrap_model_gives_the_original_back() -> None:
    def check() -> tuple[bool, str]:
        accelerator = Accelerator(cpu=True)
        model = Greeter(1, 1)
        unwrapped = accelerator.unwrap_model(accelerator.prepare(model))
        return unwrapped is model, unwrapped.greet()

    assert run_on_ranks(check, 2) == [(True, "hello")] * 2
    assert check() == (True, "hello")


@row("001-28")
def test_the_prepared_optimizer_is_an_optimizer_that_schedulers_accept() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@row("001-30")
def test_the_optimizers_state_can_be_loaded_after_prepare() -> None:
    def trained() -> Any:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        return accelerator, *accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))

    accelerator, model, optimizer = trained()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    _, _, fresh = trained()
    fresh.load_state_dict(saved)
    again = fresh.state_dict()
    assert again["param_groups"] == saved["param_groups"]
    assert torch.equal(again["state"][0]["exp_avg"], saved["state"][0]["exp_avg"])


# ------------------------------------------------------------------------------------------- the dataloader


@row("001-18")
def test_a_loader_that_is_already_distributed_is_not_sharded_twice() -> None:
    def mine() -> tuple[list[int], bool]:
        accelerator = Accelerator(cpu=True)
        dataset = TensorDataset(torch.arange(12))
        sampler = DistributedSampler(dataset, shuffle=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loader = accelerator.prepare(DataLoader(dataset, batch_size=3, sampler=sampler))
        loader.set_epoch(3)
        return [i for batch in seen(loader) for i in batch], sampler.epoch == 3 and len(said) <= 1

    (first, epoch_first), (second, epoch_second) = run_on_ranks(mine, 2)
    assert sorted(first + second) == list(range(12))
    assert epoch_first and epoch_second


@row("001-31")
def test_no_distributed_sampler_is_involved() -> None:
    def kinds() -> list[str]:
        loader = Accelerator(cpu=True).prepare(numbers(8, batch_size=2, shuffle=True))
        found, waiting = [], [loader.batch_sampler]
        while waiting:
            one = waiting.pop()
            found.append(type(one).__name__)
            waiting += [value for value in vars(one).values() if isinstance(value, Sampler)]
        return found

    for names in run_on_ranks(kinds, 2):
        assert "DistributedSampler" not in names
        assert len(names) > 1


class Backwards(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1, -1, -1))

    def __len__(self) -> int:
        return self.length


class Growing(Sampler[list[int]]):
    """Batches of 1, 2, 3 and 4: a batch sampler without a batch size."""

    batch_size = None

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]])

    def __len__(self) -> int:
        return 4


def loaders() -> dict[str, DataLoader[Any]]:
    draw = torch.Generator()
    draw.manual_seed(1)
    twelve = TensorDataset(torch.arange(12))
    return {
        "random": DataLoader(twelve, 2, sampler=RandomSampler(twelve, generator=draw)),
        "weighted": DataLoader(
            twelve, 2, sampler=WeightedRandomSampler([1.0] * 12, 12, replacement=False, generator=draw)
        ),
        "subset": DataLoader(twelve, 2, sampler=SubsetRandomSampler(range(12), generator=draw)),
        "custom": DataLoader(twelve, 2, sampler=Backwards(12)),
        "batch sampler": DataLoader(twelve, batch_sampler=BatchSampler(SequentialSampler(twelve), 2, False)),
        "sampler of batches": DataLoader(
            twelve, sampler=BatchSampler(SequentialSampler(twelve), 2, False), batch_size=None
        ),
    }


@row("001-32", "001-33", "004-12")
@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("name", list(loaders()))
def test_any_sampler_is_shared_out(name: str, num_processes: int) -> None:
    def mine() -> list[int]:
        loader = Accelerator(cpu=True).prepare(loaders()[name])
        return [int(i) for batch in loader for i in batch[0].flatten()]

    shares = run_on_ranks(mine, num_processes)
    assert sorted(i for share in shares for i in share) == list(range(12))
    assert len({len(share) for share in shares}) == 1


@row("001-32")
def test_batches_of_varying_size_are_shared_out() -> None:
    def mine() -> list[list[int]]:
        loader = DataLoader(TensorDataset(torch.arange(10)), batch_sampler=Growing())
        from accelerate.utils import DataLoaderConfiguration

        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
        return seen(accelerator.prepare(loader))

    first, second = run_on_ranks(mine, 2)
    assert first == [[0], [3, 4, 5]]
    assert second == [[1, 2], [6, 7, 8, 9]]


class Counted(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return torch.tensor(index)


@row("001-33")
def test_each_rank_reads_only_its_own_samples() -> None:
    def asked() -> list[int]:
        dataset = Counted()
        for _ in Accelerator(cpu=True).prepare(DataLoader(dataset, batch_size=3)):
            pass
        return dataset.asked

    assert run_on_ranks(asked, 2) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(12))


@row("001-34")
def test_an_iterable_is_shared_out_without_dispatching() -> None:
    def mine() -> list[int]:
        from accelerate.utils import DataLoaderConfiguration

        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
        loader = accelerator.prepare(DataLoader(Stream(), batch_size=3))
        return [int(i) for batch in loader for i in batch]

    first, second = run_on_ranks(mine, 2)
    assert not set(first) & set(second)
    assert sorted(first + second) == list(range(12))


Pair = namedtuple("Pair", ["left", "right"])


class Encoding(dict[str, Any]):
    """What tokenizers give: a mapping that knows how to move itself."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Encoding:
        return Encoding({name: value.to(device) for name, value in self.items()})


def nest(_: Any) -> dict[str, Any]:
    tensor = torch.ones(1)
    return {
        "list": [tensor],
        "tuple": (tensor, tensor),
        "pair": Pair(tensor, tensor),
        "coded": Encoding(ids=tensor),
        "word": "w",
    }


@row("001-35", "002-07", "003-09")
@pytest.mark.usefixtures("fake_device")
def test_nested_batches_are_placed_and_keep_their_shape() -> None:
    accelerator = Accelerator()
    (batch,) = accelerator.prepare(DataLoader([0], collate_fn=nest))
    assert type(batch["list"]) is list and batch["list"][0].device.type == "meta"
    assert type(batch["tuple"]) is tuple and batch["tuple"][1].device.type == "meta"
    assert type(batch["pair"]) is Pair and batch["pair"].right.device.type == "meta"
    assert type(batch["coded"]) is Encoding and batch["coded"]["ids"].device.type == "meta"
    assert batch["word"] == "w"


# ------------------------------------------------------------------------------------------- random numbers


@row("001-36")
def test_named_generators_are_synchronised() -> None:
    def states() -> tuple[list[int], list[int]]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(accelerator.process_index)
        generator = torch.Generator()
        generator.manual_seed(accelerator.process_index)
        synchronize_rng_states(["torch", "generator"], generator)
        return torch.get_rng_state().tolist(), generator.get_state().tolist()

    first, second = run_on_ranks(states, 2)
    assert first == second


@row("001-37", "001-38")
def test_by_default_only_the_samplers_generator_is_synchronised() -> None:
    def facts() -> tuple[Any, list[list[int]], float]:
        accelerator = Accelerator(cpu=True)
        set_seed(1, device_specific=True)
        loader = accelerator.prepare(numbers(8, batch_size=2, shuffle=True))
        batches = seen(loader)
        return accelerator.rng_types, batches, torch.rand(1).item()

    (types, first, noise_first), (_, second, noise_second) = run_on_ranks(facts, 2)
    assert [str(kind).split(".")[-1].lower() for kind in types] == ["generator"]
    assert sorted(i for batch in first + second for i in batch) == list(range(8))
    assert noise_first != noise_second


@row("001-39")
def test_more_generators_are_synchronised_when_asked_for() -> None:
    def noise() -> float:
        accelerator = Accelerator(cpu=True, rng_types=["torch", "generator"])
        set_seed(1, device_specific=True)
        for _ in accelerator.prepare(numbers(4, shuffle=True)):
            return torch.rand(1).item()
        raise AssertionError

    first, second = run_on_ranks(noise, 2)
    assert first == second


@row("001-40")
def test_backward_divides_by_the_accumulation_steps() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 8.0)).sum())
    assert model.weight.grad.item() == 2.0


# ------------------------------------------------------------------------------------------- evaluation


@row("001-41")
def test_the_process_questions_are_answered_in_both_spellings() -> None:
    def answers() -> list[bool]:
        accelerator = Accelerator(cpu=True)
        return [
            bool(accelerator.is_main_process), bool(accelerator.is_main_process()),
            bool(accelerator.is_local_main_process), bool(accelerator.is_local_main_process()),
            bool(accelerator.is_last_process), bool(accelerator.is_last_process()),
        ]  # fmt: skip

    assert run_on_ranks(answers, 2) == [
        [True, True, True, True, False, False],
        [False, False, False, False, True, True],
    ]


@row("001-42", "001-43")
def test_evaluation_on_all_or_on_the_main_process_does_not_hang() -> None:
    def evaluate() -> tuple[int, int]:
        accelerator = Accelerator(cpu=True)
        plain, with_buffers = accelerator.prepare(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
        with_buffers.eval()
        everywhere = main_only = 0
        for (batch,) in numbers(6, batch_size=2):
            everywhere += len(with_buffers(batch.float().unsqueeze(1)))
        if accelerator.is_main_process():
            # Replicas share their buffers at each forward, so one process alone evaluates the model itself.
            alone = accelerator.unwrap_model(with_buffers)
            with torch.no_grad():
                for (batch,) in numbers(6, batch_size=2):
                    main_only += len(alone(plain(batch.float().unsqueeze(1))))
        accelerator.wait_for_everyone()
        return everywhere, main_only

    assert run_on_ranks(evaluate, 2, timeout_seconds=30) == [(6, 6), (6, 0)]


@row("001-44")
def test_one_argument_gives_one_object() -> None:
    loader = Accelerator(cpu=True).prepare(numbers(3))
    assert isinstance(loader, DataLoader)


@row("001-45", "004-15")
def test_gather_concatenates_in_rank_order_on_all_ranks() -> None:
    def gathered() -> list[int]:
        accelerator = Accelerator(cpu=True)
        return accelerator.gather(torch.tensor([10, 11]) + 2 * accelerator.process_index).cpu().numpy().tolist()

    assert run_on_ranks(gathered, 2) == [[10, 11, 12, 13]] * 2


@row("001-46", "001-47", "001-48")
def test_the_truncation_recipe_and_its_modern_form_agree() -> None:
    def evaluate() -> tuple[list[list[int]], list[int], list[int]]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(numbers(11, batch_size=4))
        own, by_recipe, modern = [], [], []
        for (batch,) in loader:
            own.append(batch.tolist())
            by_recipe.append(accelerator.gather(batch).cpu().numpy())
            modern.append(accelerator.gather_for_metrics(batch))
        cut = numpy.concatenate(by_recipe)[: len(loader.dataset)]
        return own, cut.tolist(), torch.cat(modern).tolist()

    first, second = run_on_ranks(evaluate, 2)
    assert first[0] == [[0, 1, 2, 3], [8, 9, 10, 0]]
    assert second[0] == [[4, 5, 6, 7], [1, 2, 3, 4]]
    for _, recipe, modern in (first, second):
        assert recipe == modern == list(range(11))


# ------------------------------------------------------------------------------------------- the examples


@row("001-57", "002-09")
def test_the_examples_are_there() -> None:
    names = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {"nlp_example.py", "cv_example.py", "cifar10_mlp.py", "language_model.py", "before.py", "after.py"} <= names


@row("001-58")
def test_what_the_no_trainer_scripts_call_is_there(tmp_path: Path) -> None:
    from accelerate.logging import get_logger
    from accelerate.utils import ProjectConfiguration

    logger = get_logger(__name__, log_level="INFO")  # at import, as they do
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, project_config=ProjectConfiguration(project_dir=str(tmp_path))
    )
    logger.info(accelerator.state, main_process_only=False)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = TensorDataset(torch.randn(12, 2), torch.randint(0, 2, (12,)))
    with accelerator.main_process_first():
        loader, held_out = DataLoader(data, 2), DataLoader(data, 2)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    accelerator.register_for_checkpointing(scheduler)
    accelerator.init_trackers("no_trainer", {"lr": 0.1})
    model.train()
    for step, (inputs, labels) in enumerate(accelerator.skip_first_batches(loader, 2)):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
    assert step == 3
    accelerator.save_state(str(tmp_path / "epoch_0"))
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "epoch_0"))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    gathered = [accelerator.gather_for_metrics((model(inputs).argmax(-1), labels)) for inputs, labels in held_out]
    assert sum(len(labels) for _, labels in gathered) == 12
    assert str(accelerator.project_configuration.project_dir) == str(tmp_path)
    accelerator.wait_for_everyone()
    accelerator.end_training()
