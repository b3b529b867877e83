"""Clients run unmodified, on one process and on two, and come to the numbers that they come to on the peer.

The peer's numbers are in peer_results.json, as one processor computed them. Where this run differs from them, or
nothing is written down, the program runs on the peer as well, here: two processors differ in bf16, and in what trains
long enough. `RECORD_PEER=1` writes down the numbers of programs that aren't in the file.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
RECORDED = HERE / "peer_results.json"
PEER = Path(sys.prefix) / "peer"  # the peer's package alone, from PyPI

pytestmark = pytest.mark.timeout(1900)  # on both packages


@dataclass(frozen=True)
class Client:
    """A program that uses a library, and what must come out."""

    library: str
    what: str
    program: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    #: Exactly these results, whatever the peer comes to.
    expected: dict[str, Any] = field(default_factory=dict)
    #: Results that the peer can't be asked for, by how their paths begin: on a CPU it doesn't shard, for one.
    own: tuple[str, ...] = ()
    #: The peer's results are those of another client, under other names: on a CPU the peer doesn't shard.
    like: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    #: It resumes the run of this name, and must go on exactly as that one did.
    resumes: str | None = None

    @property
    def name(self) -> str:
        return " ".join([self.program, *self.arguments, f"{self.ranks}p"])


SHARDED_TRAINER = {f"fsdp{n}.{name}": f"train.{name}" for n in (1, 2) for name in ("losses", "evaluation")}
SHARDED_ADAPTERS = {name: name for name in ("losses", "accuracy", "weight", "adapters", "learning_rate")}
#: On a CPU the peer calculates fp16 runs in fp32; a loop that was left has no remainder here.
OWN_SETTINGS = ("fp16.", "attributes.remainder", "attributes_accumulating.remainder")
#: Averages over samples here (`average.*`), which the peer's aren't where ranks have unequal shares of the last batch;
#: an order of samples that is drawn from generators of the processes is an order of its own; and the peer's replicas
#: train apart once they have evaluated (`twice`).
OWN_ON_TWO = (
    *OWN_SETTINGS, "stream.final", "stream_dispatched.final", "stream_not_dispatched.final", "stream_split.final",
    "stream_workers.final", "stream_epochs.final", "split.final", "split_dispatched.final", "uneven.final",
    "not_seedable.", "twice.", "attributes.device", "attributes.wrapped", "attributes_accumulating.device",
    "attributes_accumulating.wrapped", "attributes_accumulating.ended", "evaluation_gather_object.eval_loss",
)  # fmt: skip
EXACT = {f"average.{way}": True for way in ("dispatched", "split_dispatched", "stream", "stream_split")}
EXACT["twice.undisturbed"] = True
#: The peer's first evaluation on two processes counts 4 of the 10 samples that were evaluated.
EXACT_ON_TWO = {**EXACT, "evaluation_gather_object.eval_seen": [10.0, 10.0]}
#: On a CPU the peer trains replicas where it is asked for FSDP's second generation, and refuses the first.
SHARDED_SETTINGS = {
    f"{setting}.{name}": f"fsdp2{replicas}.{name}"
    for replicas, settings in {
        "": ("fsdp1", "fsdp2", "fsdp1_grad_op", "fsdp2_kept", "fsdp2_offload", "fsdp2_compiled", "parallelism_shards"),
        "_accumulation": ("fsdp1_accumulation", "fsdp2_accumulation"),
        "_whole": ("fsdp1_whole", "fsdp2_whole"),
        "_checkpointing": ("fsdp1_checkpointing", "fsdp2_checkpointing"),
        "_clipping": ("fsdp1_clipping", "fsdp2_clipping"),
        "_bf16": ("fsdp1_bf16", "fsdp2_bf16"),
    }.items()
    for setting in settings
    for name in ("loss", "after", "final", "weight", "whole", "grad_norm")
    if (setting, name) not in (("fsdp1_bf16", "grad_norm"), ("fsdp2_bf16", "grad_norm"))  # weights are rounded here
} | {f"parallelism_replicas.{name}": f"fsdp2.{name}" for name in ("loss", "grad_norm", "final", "weight")}
PIPELINES = ("model_offload", "sequential_offload", "group_offload", "balanced", "on_cpu", "low_memory",
             "plain_loading", "unet_in_pieces", "parts_by_hand", "hooks_removed")  # fmt: skip
#: diffusers' training scripts, by the names of `scripts.py`.
SCRIPTS = {
    "text_to_image": "average of the weights",
    "dreambooth": "prior preservation, two models",
    "lora": "hooks that save adapters alone",
    "controlled": "a ControlNet beside a frozen model",
    "textual_inversion": "one embedding, no hooks",
    "consistency": "teacher, student and target",
}
RESUMED_ON_TWO = ("text_to_image", "lora", "textual_inversion")
#: Two processes see here, batch by batch, what one sees; the peer's order is another one there.
DENOISING = {f"denoising_diffusion.{name}": f"denoising_diffusion.{name}" for name in ("pictures", "files")}
TRAINER = ("train", "accumulation", "bf16", "checkpointed_activations", "resume")
CLIENTS = (
    Client("transformers", "Trainer: train, evaluate, predict, accumulate, bf16, checkpointing, resume", "trainer",
           TRAINER, expected={"resume.same": True}, own=("resume.files",)),
    Client("transformers", "Trainer: the same", "trainer", TRAINER, 2,
           expected={"resume.same": True, "train.processes": 2}, own=("resume.files",)),
    Client("transformers", "Trainer: FSDP, first and second generation", "trainer", ("fsdp1", "fsdp2"), 2,
           expected={"fsdp1.kind": "FSDP", "fsdp2.kind": "FSDP"},
           like=f"trainer {' '.join(TRAINER)} 2p", names=SHARDED_TRAINER),
    Client("transformers", "Trainer: a run for each of 78 settings of TrainingArguments", "settings", ("trainer",),
           own=OWN_SETTINGS, expected=EXACT),
    Client("transformers", "Trainer: the same", "settings", ("trainer",), 2, own=OWN_ON_TWO,
           expected=EXACT_ON_TWO),
    Client("transformers", "Trainer: 18 settings of FSDP and ParallelismConfig, each resumed", "settings",
           ("sharded",), 2, like="settings sharded 2p", names=SHARDED_SETTINGS,
           expected={"fsdp1.kind": "FSDP", "fsdp2.kind": "FSDP"}),
    Client("transformers", "Trainer of a ViT, with an image processor; a timm network in a loop", "images"),
    Client("transformers", "the same", "images", (), 2),
    Client("transformers", "`device_map`, offload to disk, generate, save; PEFT on top", "device_map",
           expected={"automatic": True, "split": True, "offloaded_device": "meta", "generates": True, "saves": True,
                     "adapter_offloaded": True}),
    Client("diffusers", "unconditional image generation: EMA, hooks, accumulation", "diffusion"),
    Client("diffusers", "the same, resumed", "diffusion", ("resume",), resumes="diffusion 1p"),
    Client("diffusers", "the same", "diffusion", (), 2),
    Client("diffusers", "pipelines: `enable_model_cpu_offload`, sequential and group offload, `device_map`, hooks",
           "pipelines", expected=dict.fromkeys(PIPELINES, True)),
    *(Client("diffusers", f"training script, {name}: {what}", "scripts", (name,), ranks)
      for name, what in SCRIPTS.items() for ranks in (1, 2)),
    *(Client("diffusers", f"training script, {name}: resumed from the latest", "scripts", (name, "resume"), ranks,
             resumes=f"scripts {name} {ranks}p")
      for name in SCRIPTS for ranks in (1, 2) if ranks == 1 or name in RESUMED_ON_TWO),
    Client("denoising-diffusion-pytorch", "Trainer: the main process averages, samples, saves", "image_trainers",
           ("denoising_diffusion",)),
    Client("denoising-diffusion-pytorch", "the same, resumed", "image_trainers", ("denoising_diffusion_resumed",)),
    Client("denoising-diffusion-pytorch", "Trainer: the pictures that one process sees", "image_trainers",
           ("denoising_diffusion",), 2, like="image_trainers denoising_diffusion 1p", names=DENOISING),
    Client("rectified-flow-pytorch", "Trainer: accumulation, averages, samples", "image_trainers", ("rectified_flow",)),
    Client("rectified-flow-pytorch", "the same", "image_trainers", ("rectified_flow",), 2),
    Client("imagen-pytorch", "ImagenTrainer: scaler and schedules of its own", "image_trainers", ("imagen",)),
    Client("imagen-pytorch", "the same, resumed", "image_trainers", ("imagen_resumed",)),
    Client("imagen-pytorch", "ImagenTrainer: scaler and schedules of its own", "image_trainers", ("imagen",), 2),
    Client("skorch", "AccelerateMixin: schedules, stops early, predicts, saves", "fitted", ("skorch",)),
    Client("skorch", "the same", "fitted", ("skorch",), 2),
    Client("skorch", "AccelerateMixin: accumulation is one larger batch", "fitted", ("skorch_accumulating",),
           expected={"skorch_accumulating.as_one_batch": True}),
    Client("fastai", "Learner in `distrib_ctx` (on several processes it asks for CUDA)", "fitted", ("fastai",)),
    Client("peft", "LoRA: classification, checkpoints", "adapters", ("train",), expected={"seen": 37}),
    Client("peft", "the same, resumed", "adapters", ("resume",), resumes="adapters train 1p"),
    Client("peft", "LoRA: classification, checkpoints", "adapters", ("train",), 2, expected={"seen": 37},
           own=("model",)),
    Client("peft", "LoRA under FSDP, first generation", "adapters", ("fsdp1",), 2, expected={"seen": 37},
           like="adapters train 2p", names=SHARDED_ADAPTERS),
    Client("peft", "LoRA under FSDP, second generation", "adapters", ("fsdp2",), 2, expected={"seen": 37},
           like="adapters train 2p", names=SHARDED_ADAPTERS),
    Client("trl", "SFTTrainer", "sft"),
    Client("trl", "SFTTrainer", "sft", (), 2),
    Client("trl", "SFTTrainer with LoRA", "sft", ("lora",)),
    Client("trl", "trainers of DPO, KTO, rewards, GRPO, RLOO", "preferences", ("dpo", "kto", "reward", "grpo", "rloo")),
    Client("trl", "trainers of DPO, rewards, GRPO", "preferences", ("dpo", "reward", "grpo"), 2),
    Client("sentence-transformers", "SentenceTransformerTrainer, two data sets", "embeddings"),
    Client("sentence-transformers", "the same", "embeddings", (), 2),
    Client("sentence-transformers", "trainers of a cross encoder and a sparse encoder", "layers_on_top",
           ("cross_encoder", "sparse_encoder")),
    Client("setfit", "Trainer", "layers_on_top", ("setfit",)),
    Client("pytorch-accelerated", "Trainer", "layers_on_top", ("pytorch_accelerated",)),
    Client("pytorch-accelerated", "Trainer", "layers_on_top", ("pytorch_accelerated",), 2),
    Client("schedulefree", "AdamWScheduleFree in a loop and in transformers' Trainer", "schedule_free"),
    Client("schedulefree", "the same", "schedule_free", (), 2),
    Client("lm_eval", "`lm_eval --model hf`, a local task", "harness", expected={"samples": 40}),
    Client("lm_eval", "the same", "harness", (), 2, expected={"samples": 40}),
)  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the tiny models and data, and what the programs write."""
    folder = tmp_path_factory.mktemp("clients")
    made = subprocess.run(
        [sys.executable, str(HERE / "assets.py"), str(folder / "assets")],
        env=environment(folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return folder


def environment(folder: Path, package: Path = SOURCE, ranks: int = 1) -> dict[str, str]:
    """Everything offline, one thread, on the CPU, with the accelerate that lies in ``package``."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package), str(HERE / "programs")]),
        "CLIENT_ASSETS": str(folder / "assets"),
        # Of this number of ranks: a run goes on from the checkpoints that as many have written.
        "CLIENT_OUTPUT": str(folder / f"{'ours' if package == SOURCE else 'peer'}-{ranks}"),
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
    }


def results_of(client: Client, folder: Path, package: Path = SOURCE) -> dict[str, Any]:
    """What the program reported."""
    program = [str(HERE / "programs" / f"{client.program}.py"), *client.arguments]
    ranks = ["--nproc_per_node", str(client.ranks), "--master_port", str(29100 + os.getpid() % 800)]
    torchrun = ["-m", "torch.distributed.run", *ranks] if client.ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, *program],
        env=environment(folder, package, client.ranks), cwd=folder,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return flat(json.loads(line.removeprefix("RESULT ")))


def flat(results: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    found: dict[str, Any] = {}
    for name, value in results.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return found


def peer_results(client: Client, folder: Path, *, here: bool = False) -> dict[str, Any]:
    """What the peer comes to, under the names of ``client``: as it is written down, or ``here``, now."""
    recorded: dict[str, Any] = json.loads(RECORDED.read_text())
    source = client if client.like is None else next(one for one in CLIENTS if one.name == client.like)
    if here or source.name not in recorded:
        recorded[source.name] = results_of(source, folder, PEER)
        if os.environ.get("RECORD_PEER") and not here:
            RECORDED.write_text(by_line(recorded))
    found: dict[str, Any] = recorded[source.name]
    return found if client.like is None else {name: found[peers] for name, peers in client.names.items()}


def by_line(recorded: dict[str, dict[str, Any]]) -> str:
    """JSON with a line for each result."""
    clients = []
    for client, results in sorted(recorded.items()):
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(results.items()))
        clients.append(f" {json.dumps(client)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(clients) + "\n}\n"


OUTCOMES: dict[str, str] = {}
RESULTS: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_a_client_comes_to_the_results_of_the_peer(client: Client, folder: Path) -> None:
    OUTCOMES[client.name] = "fails"
    ours = results_of(client, folder)
    for name, value in client.expected.items():
        assert ours[name] == value, name
    numbers = [
        number for value in ours.values() for number in (value if isinstance(value, list) else [value])
        if isinstance(number, float)
    ]  # fmt: skip
    assert all(math.isfinite(number) for number in numbers)
    if client.resumes is not None:
        whole = RESULTS[client.resumes]
        assert ours == {**whole, "losses": whole["losses"][-len(ours["losses"]) :]}
        OUTCOMES[client.name] = "passes: bitwise the run that wasn't interrupted"
        return
    RESULTS[client.name] = ours
    peers = compared(client, peer_results(client, folder))
    different = differences(ours, peers)
    if different:
        peers = compared(client, peer_results(client, folder, here=True))
        different = differences(ours, peers)
    assert not different, json.dumps(different, indent=1)
    OUTCOMES[client.name] = f"passes, {len(peers)} results as the peer's" if peers else "passes"


def compared(client: Client, peers: dict[str, Any]) -> dict[str, Any]:
    """Those of the peer's results that ours have to equal."""
    return {
        name: value for name, value in peers.items() if name not in client.expected and not name.startswith(client.own)
    }


def differences(ours: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
    """By name what is another result than the peer's."""
    return {
        name: {"ours": ours.get(name), "the peer's": value}
        for name, value in peers.items()
        if ours.get(name) != (value if isinstance(value, (str, bool)) else close(value))
    }


def close(value: Any) -> Any:
    """``value`` up to the order in which floats are summed."""
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(each, (int, float)) for each in numbers):
        return value
    return pytest.approx(value, rel=2e-4, abs=1e-6)


@pytest.fixture(scope="session", autouse=True)
def record(request: pytest.FixtureRequest) -> Iterator[None]:
    """The page of the docs lists what ran, when all of it did."""
    yield
    path = request.config.getoption("--record")
    if path is not None and len(OUTCOMES) == len(CLIENTS):
        Path(path).write_text(page())


def page() -> str:
    """Clients, versions and outcomes, as Markdown."""
    lines = [
        "# Libraries that run on this one",
        "",
        "`make clients` installs them beside `.venv` (versions in `tests/clients/constraints.txt`) and runs the "
        "programs of `tests/clients/programs`, offline, with tiny models made from their configurations; the libraries "
        "are as they were released. The results are compared with those that the same programs come to on the peer, "
        "Hugging Face's accelerate 1.15.0 (`tests/clients/peer_results.json`). This page is written by that run.",
        "",
        "| library | version | what runs | processes | outcome |",
        "|---|---|---|---|---|",
    ]
    for client in CLIENTS:
        version = metadata.version(client.library)
        cells = [client.library.replace("_", "-"), version, client.what, str(client.ranks), OUTCOMES[client.name]]
        lines.append(f"| {' | '.join(cells)} |")
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}, torch {metadata.version('torch')}"
    lines += [
        "",
        f"Run on {datetime.now(timezone.utc):%Y-%m-%d} with {python}, on the CPU; two "
        "processes talk by gloo. On a CPU the peer trains FSDP runs with plain data parallelism, so those numbers are "
        "compared with replicas that aren't sharded; and it calculates fp16 runs in fp32, so those aren't compared.",
        "",
        "`tests/clients/programs/settings.py` lists the settings of the Trainer: accumulation, precisions, resuming in "
        "the middle of an epoch with workers, streams, dispatched, split and uneven batches, grouping by length, "
        "evaluation and metrics while training, the best model and early stopping, schedules, optimizers, label "
        "smoothing, NEFTune, compiling, smaller batches after an out-of-memory error, sequences by beam search, and "
        "others. Every loss, gradient norm, learning rate and metric that is logged is compared, but for those that "
        "`test_clients.py` names, each with its reason.",
        "",
        "Beside these programs, the run starts commands that the libraries ship under `accelerate launch` (trl's "
        "scripts, `lm_eval`), and this package's own tests on models of transformers, PEFT's adapters, and "
        "bitsandbytes' and torchao's quantization.",
        "",
    ]
    return "\n".join(lines)
