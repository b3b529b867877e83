"""Scripts written in many ways train to the same numbers after ``accelerate migrate``, on one process and on two."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from accelerate.guests.scripts.doctor import examine
from accelerate.guests.scripts.migrate import Migration, Refused, migrate
from tests.ranks import free_port, run_on_ranks
from tests.slow import slow_for

HERE = Path(__file__).resolve().parent
SCRIPTS = {path.stem: path for path in sorted((HERE / "scripts").glob("*.py"))}
LISTINGS = HERE.parent / "seeds" / "listings"
DIFFS = HERE / "diffs"
BY_HAND = (
    "ddp_gather", "ddp_metric", "ddp_torchrun", "gpt2_by_hand", "imagenet_main", "nanogpt_style", "nanogpt_train",
    "no_sync_ddp", "timm_style", "torchrun_trainer", "torchvision_style",
)  # fmt: skip
SPAWNED = ("ddp_series_spawn", "ddp_spawn")
#: What can't be converted right: the line that is the reason, and the reason. `cured_NAME` follows its advice.
REFUSED = {
    "fine_tune": (66, "`optimizer` is made again after training with the one of line 62"),
    "fsdp_t5": (9, "it shards with FSDP by hand; start from the version for one device"),
    "learner": (62, "doesn't visibly go through the loader of line 84"),
    "lightning_like": (46, "`model.training_step()` runs the model without its forward()"),
    "lstm_state": (59, "weights are changed by hand here"),
    "mnist_hogwild": (37, "it starts its training processes one by one"),
    "neural_style": (15, "the optimizer doesn't visibly get a module's parameters()"),
    "nn_tutorial": (70, "`train_dl` is an object of WrappedDataLoader here"),
    "ppo_agent": (47, "`agent.get_action_and_value()` runs the model without its forward()"),
    "torch_func": (21, "gradients come from a function here"),
    "word_language_model": (77, "weights are changed by hand here"),
}
CONVERTED = [name for name in SCRIPTS if name not in REFUSED]
#: Each step of two processes takes the samples of one step of one process with twice the batch.
SAME_ON_TWO = (
    "cifar_tutorial", "cuda_calls", "cured_fsdp_t5", "cured_learner", "cured_lightning_like", "cured_mnist_hogwild",
    "cured_nn_tutorial", "dataparallel", "ema", "flat_notebook", "helpers", "hf_no_trainer", "many_switches",
    "mingpt_trainer", "mnist_style", "param_groups", "quickstart_tutorial", "siamese_main", "super_resolution_main",
    "swa_recipe", "teacher", "trainer_class", "translation_tutorial",
)  # fmt: skip
#: With --keep_batch, the steps of two processes are those of one.
SAME_WITH_KEPT_BATCHES = (
    "cifar_tutorial", "cuda_calls", "cured_learner", "ema", "hf_no_trainer", "iterable_stream", "mingpt_trainer",
    "mnist_style", "multitask", "quickstart_tutorial", "swa_recipe", "tqdm_batches", "translation_tutorial",
)  # fmt: skip
#: Without a loader, every process does what one does.
SAME_ALONE = (
    "actor_critic", "amp_recipe", "cured_neural_style", "cured_ppo_agent", "cured_word_language_model", "dqn_tutorial",
    "graph_attention", "reinforce",
)  # fmt: skip
#: Numbers that every process draws in training: the line, and the seed's.
DRAWN = {"dcgan_main": (98, 25), "vae_main": (41, 18), "wgan_gp": (21, 9)}
#: Those that train in `make test`, one of each kind. `make slow` trains with all; both convert and read all.
QUICK = (
    "amp_recipe", "checkpoint_resume", "closures", "cured_learner", "dqn_tutorial", "gan", "hf_no_trainer",
    "imagenet_main", "iterable_stream", "many_switches", "mingpt_trainer", "mnist_style", "no_sync_ddp",
    "swa_recipe", "torchrun_trainer", "translation_tutorial", "vae_main",
)  # fmt: skip
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
_BATCH = re.compile(r"^(BATCH) = (\d+)$", re.MULTILINE)


def trained(names: Iterable[str]) -> list[Any]:
    """Return parameters for the tests that train with each script."""
    slow = slow_for("several runs of a script")
    return [pytest.param(name, marks=() if name in QUICK else slow) for name in names]


@functools.cache
def migrated(name: str) -> Migration:
    return migrate(SCRIPTS[name].read_text(), SCRIPTS[name].name)


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts save files by names alone."""
    monkeypatch.chdir(tmp_path)


def run(text: str, **names: Any) -> str:
    """What the program prints."""
    printed = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", ["script.py"]):
        try:
            exec(compile(text, "script.py", "exec"), {"__name__": "__main__", **names})
        finally:
            torch.set_default_device(None)  # some scripts set it
    return printed.getvalue()


def numbers(printed: str, only: str = "") -> list[list[float]]:
    """The numbers of each line, or of the lines that begin with a word."""
    return [[float(each) for each in _NUMBER.findall(line)] for line in printed.splitlines() if line.startswith(only)]


def assert_same(before: str, after: str, only: str = "", rel: float = 1e-6, absolute: float = 1e-7) -> None:
    old, new = numbers(before, only), numbers(after, only)
    assert len(old) == len(new) >= 1 and any(old)
    for one, other in zip(old, new, strict=True):
        assert one == pytest.approx(other, rel=rel, abs=absolute)


def test_there_are_many_scripts() -> None:
    assert len(SCRIPTS) >= 80


@pytest.mark.parametrize("name", CONVERTED)
def test_the_changes_are_those_that_were_read(name: str) -> None:
    """A diff that changed is to be read, then written again: ``python -m tests.migrate.test_migrated_scripts``."""
    assert migrated(name).diff() == (DIFFS / f"{name}.diff").read_text()
    assert sorted(path.stem for path in DIFFS.glob("*.diff")) == CONVERTED


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_with_its_line(name: str) -> None:
    line, reason = REFUSED[name]
    with pytest.raises(Refused, match=re.escape(reason)) as refused:
        migrated(name)
    assert str(refused.value).startswith(f"{name}.py:{line}: ")


def test_what_counted_the_processes_of_one_machine_is_said() -> None:
    """A batch size divided by it is another one on several machines, which a run on one machine doesn't show."""
    said = {name: [note.text for note in migrated(name).notes] for name in ("imagenet_spawn", "ddp_spawn")}
    assert sum("`ngpus_per_node` was the processes of one machine" in text for text in said["imagenet_spawn"]) == 1
    assert not any("one machine" in text for text in said["ddp_spawn"])


#: Noise that is the same on all ranks, and a writer on each of them: both are the script's own.
LEFT: Final = {"gan": ["D406"], "dcgan_main": ["D406"], "wgan_gp": ["D406"], "tensorboard_log": ["D703"]}


@pytest.mark.parametrize("name", CONVERTED)
def test_the_doctor_has_no_objections(name: str) -> None:
    found = migrated(name)
    left = [each.code for each in examine(found.after, found.name) if each.severity != "note"]
    assert left == LEFT.get(name, [])


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_doctor_sends_raw_scripts_to_the_migration(name: str) -> None:
    with pytest.raises(Refused, match=rf"accelerate migrate {name}\.py"):
        examine(SCRIPTS[name].read_text(), f"{name}.py")


@pytest.mark.parametrize("name", trained(name for name in CONVERTED if name not in (*BY_HAND, *SPAWNED)))
def test_one_process_prints_the_same(name: str) -> None:
    assert_same(run(SCRIPTS[name].read_text()), run(migrated(name).after))


@pytest.mark.parametrize("name", trained(SAME_ON_TWO))
def test_two_processes_train_as_one_with_twice_the_batch(name: str) -> None:
    text = SCRIPTS[name].read_text()
    doubled = _BATCH.sub(lambda found: f"{found[1]} = {2 * int(found[2])}", text)
    assert doubled != text
    after, silent = run_on_ranks(run, 2, migrated(name).after)
    assert silent == "" or name == "many_switches"  # what is printed is printed once, unless the script says when
    assert_same(run(doubled), after, only="final", rel=1e-4)


@pytest.mark.parametrize("name", trained(SAME_WITH_KEPT_BATCHES))
def test_two_processes_share_the_batches_of_one(name: str) -> None:
    text = SCRIPTS[name].read_text()
    kept = migrate(text, SCRIPTS[name].name, keep_batch=True).after
    assert_same(run(text), run_on_ranks(run, 2, kept)[0], only="final", rel=1e-4, absolute=2e-6)


@pytest.mark.parametrize("name", SAME_ALONE)
def test_training_without_a_loader_is_said(name: str) -> None:
    assert any("every process would train on the same data" in note.text for note in migrated(name).notes)


@pytest.mark.parametrize("name", trained(SAME_ALONE))
def test_without_a_loader_every_process_does_the_same(name: str) -> None:
    after = run_on_ranks(run, 2, migrated(name).after)[0]
    assert_same(run(SCRIPTS[name].read_text()), after, only="final", rel=1e-4)


@pytest.mark.parametrize("name", DRAWN)
def test_drawing_the_same_on_all_processes_is_said(name: str) -> None:
    line, seed = DRAWN[name]
    text = f"line {seed} gives all processes the same seed"
    assert [note.line for note in migrated(name).notes if text in note.text] == [line]


@pytest.mark.parametrize("name", trained(DRAWN))
def test_what_draws_on_all_processes_trains_on_two(name: str) -> None:
    first, silent = run_on_ranks(run, 2, migrated(name).after)
    assert numbers(first, "final") and silent == ""


def test_what_is_refused_is_converted_after_its_cure() -> None:
    cured = {name.removeprefix("cured_") for name in CONVERTED if name.startswith("cured_")}
    assert cured == set(REFUSED) - {"fine_tune", "lstm_state", "torch_func"}


def test_an_evaluation_counts_each_sample_once() -> None:
    """301 samples in batches of 16: what prepare() would repeat, and a sampler with drop_last leaves to the end."""
    printed = run_on_ranks(run, 2, migrated("imagenet_main").after)[0]
    assert [each[0] for each in numbers(printed, "final")] == [301, 301]


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
@pytest.mark.parametrize("name", trained(BY_HAND))
def test_a_script_distributed_by_hand_gives_what_it_gave(name: str) -> None:
    text = migrated(name).after
    assert "init_process_group" not in text
    before = run_on_ranks(_run_by_hand, 2, SCRIPTS[name].read_text())[0]
    # Sums of weights are printed, in which large terms cancel: what is left of them has an absolute error.
    assert_same(before, run_on_ranks(run, 2, text)[0], only="final", rel=1e-5, absolute=2e-6)
    run(text)  # and it runs on one process, too


def _run_by_hand(text: str) -> str:
    """Run a script of plain torch.distributed, holding its process groups until its DDP models are gone.

    A DDP model that outlives `destroy_process_group`, as in most scripts, frees the group from C++ with the GIL held,
    and waits for gloo's threads, one of which may need the GIL to free a tensor. In a process of its own torch holds
    the group longer (torch.distributed.nn.functional, imported by the first DDP, has it as a default); a forked rank
    has imported that before.
    """
    groups: list[object] = []
    make = DistributedDataParallel.__init__

    def make_and_hold(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        groups.append(self.process_group)

    with mock.patch.object(DistributedDataParallel, "__init__", make_and_hold):
        printed = run(text)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    return printed


#: The same in processes that a script starts, which import its file.
HOLD_GROUPS = """
import torch.distributed.nn.functional
from torch.nn.parallel import DistributedDataParallel as Held

def make_and_hold(self, *args, make=Held.__init__, groups=[], **kwargs):
    make(self, *args, **kwargs)
    groups.append(self.process_group)

Held.__init__ = make_and_hold
"""


@pytest.mark.parametrize("name", trained(SPAWNED))
def test_a_script_that_spawned_its_processes_is_launched(name: str, tmp_path: Path) -> None:
    program = tmp_path / f"{name}.py"  # a file, which the processes that it starts can import
    program.write_text(HOLD_GROUPS + re.sub(r"2964\d", str(free_port()), SCRIPTS[name].read_text()))
    before = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100, check=False)
    assert before.returncode == 0, before.stderr
    text = migrated(name).after
    assert "spawn" not in text and "MASTER_ADDR" not in text and "def setup" not in text
    assert_same(before.stdout, run_on_ranks(run, 2, text)[0], only="final", rel=1e-5)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", ["mlp", "blog_base", "migrating_base", "blog_evaluation_base"])
def test_the_listings_of_the_documents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LISTINGS.parent / "stubs")
    from tests.seeds.run_listings import NAMES, summary

    text = (LISTINGS / f"{name}.py").read_text()
    results: list[dict[str, Any]] = []
    for program in (text, migrate(text, name).after):
        names: dict[str, Any] = {"__name__": "__main__", **NAMES.get(name, dict)()}
        names.pop("accelerator", None)
        torch.manual_seed(42)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(program, name, "exec"), names)
        results.append(summary(names))
    before, after = results
    assert before and {key: after[key] for key in before} == {
        key: pytest.approx(value, abs=1e-6) if isinstance(value, (float, list)) else value
        for key, value in before.items()
    }


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_the_listing_distributed_by_hand_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(LISTINGS.parent / "stubs")
    text = migrate((LISTINGS / "blog_ddp.py").read_text(), "blog_ddp.py").after + "\nprint(loss.item())\n"
    assert numbers(run_on_ranks(run, 2, text)[0])


if __name__ == "__main__":
    for each in CONVERTED:
        (DIFFS / f"{each}.diff").write_text(migrated(each).diff())
