"""The questionnaire: a few questions on the common path, more where an answer calls for them, all with
``--advanced``.

The result are the settings of the configuration file. Texts, choices and defaults of single options come
from their declarations in ``settings/``; only the order and the conditions are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, final

from ...devices.table import CPU, KINDS, present
from ...seams import load
from ...settings.cluster_options import SageMakerOptions, TpuOptions
from ...settings.fp8 import Fp8Options
from ...settings.fsdp import FsdpOptions
from ...settings.launch_options import LaunchOptions, MpiOptions
from ...settings.option import OptionGroup, Source, option_of, options_of
from ...settings.parallelism import ContextParallelOptions, ParallelismOptions
from ...settings.run import collect
from ...settings.run_options import PRECISIONS, RunOptions
from ...settings.training import DynamoOptions
from ...settings.tree import ENGINES, GROUPS, PARADIGMS, Settings
from .ask import Asker, Choice

Answers = dict[str, Any]

_NAMES: Final = {cls: name for name, cls in GROUPS.items()}
_SOURCE: Final = Source("file", "the questionnaire")

COMPUTE_ENVIRONMENTS: Final = (
    Choice("LOCAL_MACHINE", "This machine"),
    Choice("AMAZON_SAGEMAKER", "AWS (Amazon SageMaker)"),
)


def machine_types(found: str = "") -> tuple[Choice[str], ...]:
    """Return the machine types, numbered as documented: none, CPUs, GPUs, TPUs, then the device table's other devices.

    ``found`` is the type of this machine's devices.
    """
    labels = {"NO": "No distributed training", "MULTI_CPU": "multi-CPU", "MULTI_GPU": "multi-GPU", "XLA": "TPU"}
    for kind in KINDS:
        if kind.label.startswith("MULTI_"):
            labels.setdefault(kind.label, f"multi-{kind.name.upper()}")
    here = ("NO", "MULTI_CPU", found)
    return tuple(Choice(label, text, is_here=label in here) for label, text in labels.items())


@final
@dataclass
class Questionnaire:
    """One dialogue; ``answers`` holds a value for each "group.option" asked so far, ``old`` the proposed values."""

    asker: Asker
    advanced: bool = False
    old: Settings = field(default_factory=Settings)
    answers: Answers = field(default_factory=dict)
    num_machines: int = 1

    def run(self, environment: str | None = None) -> Settings:
        """Ask the questions and return the checked settings; ``environment`` is asked for where it isn't given."""
        return self.asker.dialogue(lambda: self._all(environment))

    def _all(self, environment: str | None) -> Settings:
        """Ask all questions from the beginning and return the checked settings."""
        self.answers.clear()
        self.num_machines = 1
        if environment is None:
            environment = self.asker.choose(
                "In which compute environment are you running?",
                COMPUTE_ENVIRONMENTS,
                self.old.launch.compute_environment,
                why="where the training will run",
            )
        self.put(LaunchOptions, "compute_environment", environment)
        if environment == "AMAZON_SAGEMAKER":
            self._sagemaker()
        else:
            self._machine()
        return collect({}, {}, file=self.answers)

    # this machine

    def _machine(self) -> None:
        kind, num_devices = present()
        if kind is CPU:
            num_devices = 0
        found = f"{num_devices} {kind.name} device(s)" if num_devices else "no accelerator"
        choices = machine_types(kind.label)
        types = [choice.value for choice in choices]
        several = kind.label if kind.label in types and num_devices > 0 else "MULTI_GPU"  # under an engine's name
        proposed = str(self.proposal(LaunchOptions, "distributed_type", kind.label if num_devices > 1 else "NO"))
        if proposed in PARADIGMS:
            proposed = several
        chosen = self.asker.choose(
            "Which type of machine are you using?",
            choices,
            proposed if proposed in types else "NO",
            why=f"this machine has {found}",
        )
        self.put(LaunchOptions, "distributed_type", chosen)
        if chosen not in ("NO", "XLA"):
            self._machines()
        if chosen == "NO":
            self.one(RunOptions, "use_cpu", default=num_devices == 0)
        elif chosen == "MULTI_CPU":
            self.put(RunOptions, "use_cpu", True)
            self._mpi()
        self._compile()
        is_accelerated = chosen not in ("NO", "MULTI_CPU", "XLA")
        if is_accelerated:
            self._paradigm(chosen)
        self._processes(chosen, num_devices if chosen == kind.label else 0)
        if self.advanced:
            if chosen != "XLA":
                self.one(LaunchOptions, "gpu_ids", default="all")
            if chosen in ("NO", "MULTI_GPU"):
                self.one(RunOptions, "cpu_affinity")
        if chosen == "XLA":
            self._tpu()
        self._precision()

    def _machines(self) -> None:
        number = self.asker.whole_number(
            f"{option_of(LaunchOptions, 'num_machines').question}",
            int(self.proposal(LaunchOptions, "num_machines", 1)),
            at_least=1,
            why="machines that train together over the network",
        )
        self.put(LaunchOptions, "num_machines", number)
        self.num_machines = number
        if number > 1:
            rank = option_of(LaunchOptions, "machine_rank")

            def read_rank(text: str) -> int:
                if not text.isdigit() or int(text) >= number:
                    raise ValueError(f"{text!r} won't do: machines are counted from 0 to {number - 1}.")
                return int(text)

            earlier = int(self.proposal(LaunchOptions, "machine_rank", 0))
            proposed = earlier if earlier < number else 0
            machine_rank = self.asker.ask(f"{rank.question}", read_rank, proposed, why=rank.help)
            self.put(LaunchOptions, "machine_rank", machine_rank)
            self.one(LaunchOptions, "main_process_ip", required=True)
            self.one(LaunchOptions, "main_process_port", default=29500)
            if not self.one(LaunchOptions, "same_network", default=True):
                self.one(LaunchOptions, "rdzv_backend")
        if number > 1 or self.advanced:
            self.one(RunOptions, "debug")

    def _mpi(self) -> None:
        question = "Do you want accelerate to launch mpirun?"
        if self.advanced and self.wants(question, MpiOptions, "mpirun_hostfile"):
            self.one(MpiOptions, "mpirun_hostfile", default="~/hostfile")

    def _compile(self) -> None:
        compiles = self.proposal(DynamoOptions, "backend", "NO") != "NO"
        question = "Do you wish to optimize your script with torch dynamo?"
        if not self.advanced or not self.asker.yes(question, compiles):
            return
        self.one(DynamoOptions, "backend", default="INDUCTOR")
        customizes = self.had(DynamoOptions, "mode")
        if self.asker.yes("Do you want to customize the defaults sent to torch.compile?", customizes):
            self.several(DynamoOptions, ("mode", "fullgraph", "dynamic", "use_regional_compilation"))

    def _paradigm(self, machine: str) -> None:
        """Ask which engine is used, if any, and for its options."""
        for row in ENGINES.values():
            if load(row.questions)(self, machine) if row.questions else self._fsdp():
                return

    def uses(self, label: str, why: str = "") -> bool:
        """Ask whether the engine of the distributed type ``label`` is used."""
        group, _, name = PARADIGMS[label].partition(".")
        question = f"{option_of(GROUPS[group], name).question}"
        is_used = self.asker.yes(question, self.proposal(LaunchOptions, "distributed_type", None) == label, why=why)
        if is_used:
            self.put(LaunchOptions, "distributed_type", label)
        return is_used

    def parallelism(self, *degrees: str) -> None:
        """Ask for these degrees of parallelism."""
        question = "Do you want to use the parallelism config?"
        why = "copies, shards, and parts of layers and sequences; their product is the number of processes"
        if not self.advanced or not self.asker.yes(question, self.old.parallelism is not None, why=why):
            return
        self.several(ParallelismOptions, degrees)
        if self._degree("cp_size") > 1:
            self.one(ContextParallelOptions, "cp_comm_strategy")
        elif self._degree("sp_size") > 1:
            self.one(ParallelismOptions, "sp_backend")

    def _degree(self, name: str) -> int:
        return int(self.answers.get(f"parallelism.{name}", (1, _SOURCE))[0])

    def _processes(self, chosen: str, num_devices: int) -> None:
        """Ask for the number of processes; this machine has ``num_devices`` of the chosen type."""
        machines = self.num_machines
        if chosen == "NO":
            self.put(LaunchOptions, "num_processes", 1)
            return
        name = {"MULTI_CPU": "CPU(s)", "XLA": "TPU cores"}.get(chosen, f"{chosen.removeprefix('MULTI_')}(s)")
        is_engine = self.answers["launch.distributed_type"][0] in PARADIGMS
        fewest = machines if machines > 1 or chosen == "XLA" or is_engine else 2
        # one for each device of every machine; where this one has none of the type, the fewest that are several
        default = (num_devices or (8 if chosen == "XLA" else 2)) * machines
        degrees = prod(self._degree(option.name) for option in options_of(ParallelismOptions) if option.kind == "int")
        if degrees > 1:
            default = degrees
        over = f" over the {machines} machines" if machines > 1 else ""
        number = self.asker.whole_number(
            f"How many {name} should be used for distributed training?",
            int(self.proposal(LaunchOptions, "num_processes", default)),
            at_least=fewest,
            why=f"one process is started for each{over}",
        )
        self.put(LaunchOptions, "num_processes", number)

    def _precision(self) -> None:
        precision = self.asker.choose(
            "Do you wish to use FP16 or BF16 (mixed precision)?",
            [Choice(value, value) for value in PRECISIONS],
            str(self.proposal(RunOptions, "mixed_precision", "no")),
            why="half the memory of activations and faster arithmetic; weights stay fp32",
            brief=True,
        )
        self.put(RunOptions, "mixed_precision", precision)
        if precision == "fp8":
            self._fp8()

    # FSDP, fp8

    def _fsdp(self) -> bool:
        if not self.uses("FSDP", "torch's own sharding of models that one device can't hold"):
            return False
        version = int(self.one(FsdpOptions, "fsdp_version", default=2))
        if version == 1:
            self.one(FsdpOptions, "sharding_strategy", default="FULL_SHARD")
        else:
            reshard = option_of(FsdpOptions, "reshard_after_forward")
            proposed = bool(self.proposal(FsdpOptions, "reshard_after_forward", True))
            answer = self.asker.yes(f"{reshard.question}", proposed, why=reshard.help)
            self.put(FsdpOptions, "reshard_after_forward", answer)
        self.one(FsdpOptions, "cpu_offload")
        policy = self.one(FsdpOptions, "auto_wrap_policy", default="TRANSFORMER_BASED_WRAP")
        if policy == "TRANSFORMER_BASED_WRAP":
            question = "Do you want to use the model's `_no_split_modules` to wrap?"
            by_model = not self.had(FsdpOptions, "transformer_cls_names_to_wrap")
            if not self.asker.yes(question, by_model, why="only transformers' models name such layers"):
                self.one(FsdpOptions, "transformer_cls_names_to_wrap", required=True)
        elif policy == "SIZE_BASED_WRAP":
            self.one(FsdpOptions, "min_num_params", default=100_000_000)
        if version == 1:
            self.one(FsdpOptions, "backward_prefetch", default="BACKWARD_PRE")
        self.one(FsdpOptions, "state_dict_type", default="SHARDED_STATE_DICT" if version == 2 else "FULL_STATE_DICT")
        if version == 1:
            self.one(FsdpOptions, "forward_prefetch", default=False)
            self.one(FsdpOptions, "use_orig_params", default=True)
        if self.one(FsdpOptions, "cpu_ram_efficient_loading", default=True) and version == 1:
            self.put(FsdpOptions, "sync_module_states", True)
        elif version == 1:
            self.one(FsdpOptions, "sync_module_states", default=True)
        self.one(FsdpOptions, "activation_checkpointing")
        if version == 2:
            self.parallelism("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size", "pp_size")
        return True

    def _fp8(self) -> None:
        backend = self.one(Fp8Options, "backend", default="AO", choices=("AO", "TE"))
        names: Mapping[str, tuple[str, ...]] = {
            "AO": ("enable_fsdp_float8_all_gather", "pad_inner_dim"),
            "TE": (
                "use_autocast_during_eval",
                "margin",
                "interval",
                "fp8_format",
                "amax_history_len",
                "amax_compute_algo",
            ),
        }
        self.several(Fp8Options, names[backend])
        if backend == "TE" and self.asker.yes("Do you want to compute some matrix products in higher precision?"):
            products = ("fprop", "dgrad", "wgrad")
            higher = tuple(self.asker.yes(f"Should {product} be?") for product in products)
            self.put(Fp8Options, "override_linear_precision", higher)

    # TPUs and SageMaker

    def _tpu(self) -> None:
        self.one(LaunchOptions, "main_training_function", default="main")
        if self.advanced and self.one(TpuOptions, "tpu_use_cluster"):
            self.one(TpuOptions, "tpu_name", required=True)
            self.one(TpuOptions, "tpu_zone", required=True)
            self.one(TpuOptions, "tpu_use_sudo")
            has_file, has_commands = (self.had(TpuOptions, name) for name in ("command_file", "commands"))
            if self.asker.yes("Do you have code you wish to run on startup in each pod?", has_file or has_commands):
                if self.asker.yes("Is this code located in a bash script?", has_file):
                    self.one(TpuOptions, "command_file", required=True)
                else:
                    self.put(TpuOptions, "commands", self._list("What command should be run"))
        if self.advanced:
            self.one(RunOptions, "downcast_bf16")

    def _list(self, question: str) -> list[str]:
        found: list[str] = []
        while answer := self.asker.text(f"{question} as number {len(found) + 1}? (empty: no more)"):
            found.append(answer)
        return found

    def _sagemaker(self) -> None:
        self.one(SageMakerOptions, "profile", default="default")
        self.one(SageMakerOptions, "region", default="us-east-1")
        self.one(SageMakerOptions, "iam_role_name", default="accelerate_sagemaker_execution_role")
        for name, question in (
            ("image_uri", "Do you want to use a custom Docker image?"),
            ("sagemaker_inputs_file", "Do you want to provide SageMaker input channels with data locations?"),
            ("sagemaker_metrics_file", "Do you want to enable SageMaker metrics?"),
        ):
            if self.wants(question, SageMakerOptions, name):
                self.one(SageMakerOptions, name, required=True)
        mode = self.one(SageMakerOptions, "distributed_type", choices=("NO", "DATA_PARALLEL"))
        self._compile()
        parallel = mode == "DATA_PARALLEL"
        self.one(SageMakerOptions, "ec2_instance_type", default="ml.p3.16xlarge" if parallel else "ml.p3.2xlarge")
        self.one(RunOptions, "debug")
        if parallel:
            self.one(SageMakerOptions, "num_machines", default=1)
        self._precision()

    # one option

    def several(self, group: type[OptionGroup], names: Iterable[str]) -> Answers:
        return {name: self.one(group, name) for name in names}

    def one(
        self,
        group: type[OptionGroup],
        name: str,
        *,
        default: object = None,
        required: bool = False,
        choices: tuple[str, ...] | None = None,
    ) -> Any:
        """Ask an option's own question in the form of its kind of value, store the answer and return it."""
        option = option_of(group, name)
        proposed = self.proposal(group, name, option.launched if default is None else default)
        question = f"{option.question or option.help}"
        legal = choices or option.choices
        value: Any
        if option.kind == "bool":
            value = self.asker.yes(question, bool(proposed), why=option.help)
        elif legal is not None:
            rows = [Choice(choice, choice) for choice in legal]
            value = option.read(self.asker.choose(question, rows, str(option.write(proposed)), why=option.help))
        else:
            value = self.asker.ask(
                question,
                lambda text: option.read(text, Source("argument", name)),
                proposed,
                write=option.write,
                why="" if required else option.help,
                required=required,
            )
        self.put(group, name, value)
        return value

    def wants(self, question: str, group: type[OptionGroup], name: str) -> bool:
        """Ask a yes/no question before an option's own; yes is proposed where it had a value."""
        return self.asker.yes(question, self.had(group, name))

    def had(self, group: type[OptionGroup], name: str) -> bool:
        """Return whether the old answers have a value for the option."""
        return bool(self.proposal(group, name, None))

    def proposal(self, group: type[OptionGroup], name: str, default: object) -> Any:
        """Return the old answer, or ``default`` where there is none."""
        options = getattr(self.old, _NAMES[group])
        value = getattr(options, name, None) if self.old.was_given(f"{_NAMES[group]}.{name}") else None
        return default if value is None else value

    def put(self, group: type[OptionGroup], name: str, value: object) -> None:
        """Store the value as an answer unless it is None."""
        if value is not None:
            self.answers[f"{_NAMES[group]}.{name}"] = (value, _SOURCE)
