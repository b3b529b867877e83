"""The questionnaire, on a pipe and in a terminal, and its subcommands."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

from accelerate.commands import config
from accelerate.commands.config import config_args
from accelerate.commands.config.ask import Asker, Choice, InputEnded, match
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig, load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.config.questions import Questionnaire, machine_types
from accelerate.commands.launch import launch_command_parser, plan_launch
from accelerate.launch.arguments import flags_of, settings_of
from accelerate.settings import file
from accelerate.settings.run import collect
from accelerate.settings.tree import Settings
from tests.python_path import python_path

ROOT = Path(__file__).resolve().parents[3]
SEED_ANSWERS = ["0", "2", "1", "no", "no", "2", "no"]
SEED_QUESTIONS = [
    "In which compute environment are you running?",
    "Which type of machine are you using?",
    "How many different machines will you use (use more than 1 for multi-node training)?",
    "Do you want to use DeepSpeed?",
    "Do you want to use FullyShardedDataParallel?",
    "How many GPU(s) should be used for distributed training?",
    "Do you wish to use FP16 or BF16 (mixed precision)?",
]


def dialogue(answers: list[str], *, advanced: bool = False) -> tuple[dict[str, object], str, int]:
    """(content of the file, what was shown, number of questions)."""
    output = io.StringIO()
    asker = Asker(io.StringIO("".join(f"{answer}\n" for answer in answers)), output)
    content = file.to_document(Questionnaire(asker, advanced=advanced).run())
    return content, output.getvalue(), asker.num_asked


def ask(answers: list[str], *, old: Settings | None = None) -> Settings:
    """The settings that the answers describe."""
    asker = Asker(io.StringIO("".join(f"{answer}\n" for answer in answers)), io.StringIO())
    return Questionnaire(asker, old=old or Settings()).run()


def test_the_common_path_asks_exactly_the_seven_questions_in_their_order() -> None:
    content, shown, num_asked = dialogue(SEED_ANSWERS)
    assert num_asked == 7
    places = [shown.index(question) for question in SEED_QUESTIONS]
    assert places == sorted(places)
    assert content["compute_environment"] == "LOCAL_MACHINE"
    assert content["distributed_type"] == "MULTI_GPU"
    assert content["num_machines"] == 1
    assert content["num_processes"] == 2
    assert content["mixed_precision"] == "no"
    assert not {"deepspeed_config", "fsdp_config"} & set(content)


def test_the_menu_starts_with_none_cpus_gpus_and_tpus() -> None:
    labels = [choice.label for choice in machine_types()]
    assert labels[:4] == ["No distributed training", "multi-CPU", "multi-GPU", "TPU"]
    assert {"multi-XPU", "multi-HPU", "multi-NPU", "multi-MLU", "multi-SDAA", "multi-MUSA", "multi-NEURON"} == set(
        labels[4:]
    )


@pytest.mark.parametrize("answer", ["2", "multi-GPU", "MULTI_GPU", "multi-gpu"])
def test_a_choice_is_made_by_number_label_or_value(answer: str) -> None:
    content, _, _ = dialogue(["This machine", answer, "", "", "No", "2", "NO"])
    assert content["distributed_type"] == "MULTI_GPU"


@pytest.mark.parametrize(("answer", "expected"), [("NO", "no"), ("fp16", "fp16"), ("BF16", "bf16"), ("2", "bf16")])
def test_the_precision_is_answered_by_word_or_number(answer: str, expected: str) -> None:
    content, _, _ = dialogue([*SEED_ANSWERS[:-1], answer])
    assert content["mixed_precision"] == expected


def test_nonsense_is_explained_and_asked_again() -> None:
    answers = ["9", "0", "multi", "2", "zero", "1", "perhaps", "no", "no", "1", "2", "fp61", "no"]
    content, shown, num_asked = dialogue(answers)
    assert num_asked == 7
    assert content["num_processes"] == 2
    for complaint in ("'9' is none of them", "'zero' won't do", "'perhaps' is neither", "'1' won't do"):
        assert complaint in shown


def test_empty_lines_take_the_shown_defaults() -> None:
    content, _, _ = dialogue(["", "", "", ""])
    assert (content["distributed_type"], content["mixed_precision"]) == ("NO", "no")


def test_input_that_ends_early_is_an_error_not_a_guess() -> None:
    with pytest.raises(InputEnded, match="How many GPU"):
        dialogue(SEED_ANSWERS[:5])


def test_several_machines_call_for_more_questions() -> None:
    answers = ["0", "2", "2", "1", "10.0.0.1", "", "no", "c10d", "no", "no", "no", "4", "bf16"]
    content, _, _ = dialogue(answers)
    expected = {
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "rdzv_backend": "c10d",
        "num_processes": 4,
    }
    assert expected.items() <= content.items()


def test_fsdp_calls_for_its_own_questions_and_every_answer_is_kept() -> None:
    answers = ["0", "2", "1", "no", "yes", "2", "no", "yes", "0", "no", "Block,Head", "2", "yes", "yes", "4", "bf16"]
    content, _, _ = dialogue(answers)
    assert content["distributed_type"] == "FSDP"
    section = content["fsdp_config"]
    assert isinstance(section, dict)
    assert section["fsdp_version"] == 2
    assert section["fsdp_reshard_after_forward"] is False
    assert section["fsdp_offload_params"] is True
    assert section["fsdp_transformer_layer_cls_to_wrap"] in (["Block", "Head"], "Block,Head")
    assert section["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    assert section["fsdp_activation_checkpointing"] is True


def test_deepspeed_calls_for_its_own_questions() -> None:
    answers = [
        "0",
        "2",
        "1",
        "yes",
        "no",
        "3",
        "cpu",
        "nvme",
        "/disk",
        "4",
        "yes",
        "0.5",
        "yes",
        "yes",
        "no",
        "2",
        "fp16",
    ]
    content, _, _ = dialogue(answers)
    assert content["distributed_type"] == "DEEPSPEED"
    section = content["deepspeed_config"]
    assert isinstance(section, dict)
    expected = {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "nvme",
        "offload_param_nvme_path": "/disk",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
    }
    assert expected.items() <= section.items()


def test_fp8_answers_are_written_under_names_that_are_read() -> None:
    answers = [*SEED_ANSWERS[:-1], "fp8", "TE", "yes", "1", "2", "E4M3", "16", "max", "no"]
    content, _, _ = dialogue(answers)
    section = content["fp8_config"]
    assert isinstance(section, dict)
    assert section["amax_history_len"] == 16
    assert section["amax_compute_algo"] == "max"


def test_cpus_and_sagemaker_have_their_own_paths() -> None:
    content, _, _ = dialogue(["0", "1", "1", "2", "no"])
    assert (content["distributed_type"], content["num_processes"], content["use_cpu"]) == ("MULTI_CPU", 2, True)
    content, _, _ = dialogue(["1", "", "", "role", "no", "no", "no", "0", "", "no", "no"])
    assert content["compute_environment"] == "AMAZON_SAGEMAKER"
    assert content["iam_role_name"] == "role"


def test_advanced_asks_more() -> None:
    answers = ["0", "2", "1", "no", "yes", "", "no", "no", "no", "no", "2", "0,1", "no", "no"]
    content, _, num_asked = dialogue(answers, advanced=True)
    assert num_asked > 7
    assert content["gpu_ids"] == "0,1"


@pytest.mark.parametrize("kind", ["0", "1"])  # one process, MULTI_CPU
@pytest.mark.parametrize("advanced", [False, True])
def test_what_is_written_for_a_run_on_the_cpu_has_no_remark_of_an_option_without_effect(
    tmp_path: Path, kind: str, advanced: bool
) -> None:
    content, _, num_asked = dialogue(["0", kind, "", *[""] * 30], advanced=advanced)
    assert content["use_cpu"] is True and num_asked > 3
    assert content.get("gpu_ids") == ("all" if advanced else None)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(content))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert collect({}, {}, flags={}, file=tmp_path / "c.yaml").run.use_cpu
        assert collect({}, {}, flags={"use_cpu": True}, file=tmp_path / "c.yaml").run.use_cpu


def test_a_word_that_several_choices_contain_names_none() -> None:
    choices = [Choice("a", "multi-CPU"), Choice("b", "multi-GPU")]
    assert match("multi", choices) is None
    assert match("gpu", choices) == "b"
    assert match("1", choices) == "b"
    assert match("7", choices) is None


# Going back, what was answered before, and what comes of it


def test_a_step_back_asks_again_with_the_answer_as_it_was() -> None:
    content, shown, num_asked = dialogue(["0", "2", "3", "<", "", "<", "1", "no", "no", "4", "bf16"])
    assert (content["num_machines"], content["num_processes"], content["mixed_precision"]) == (1, 4, "bf16")
    assert shown.count("How many different machines will you use (use more than 1 for multi-node training)? [3]: ") == 2
    assert shown.count(SEED_QUESTIONS[0]) == 1, "questions before it aren't asked again"
    assert num_asked == 9


def test_a_step_back_from_the_first_question_asks_it_again() -> None:
    content, shown, _ = dialogue(["<", *SEED_ANSWERS])
    assert content["num_processes"] == 2 and shown.count(SEED_QUESTIONS[0]) == 2


def test_a_number_that_a_step_back_made_too_small_is_raised() -> None:
    answers = ["0", "2", "1", "no", "no", "2", "<", "<", "<", "<", "4", "0", "10.0.0.1", "", "yes", "no"]
    content, _, _ = dialogue([*answers, "no", "no", "", "no"])
    assert (content["num_machines"], content["num_processes"]) == (4, 4)


@pytest.mark.parametrize(
    "answers",
    [
        SEED_ANSWERS,
        ["0", "1", "1", "2", "bf16"],
        ["0", "0", "yes", "no"],
        ["0", "2", "1", "no", "yes", "2", "no", "yes", "0", "no", "Block,Head", "2", "yes", "yes", "4", "bf16"],
        ["0", "2", "1", "no", "yes", "1", "1", "no", "1", "9", "0", "0", "no", "yes", "no", "no", "no", "4", "no"],
        ["0", "2", "1", "yes", "no", "3", "cpu", "nvme", "/disk", "4", "yes", "0.5", "yes", "yes", "no", "2", "fp16"],
        ["0", "2", "2", "1", "10.0.0.1", "", "no", "c10d", "no", "no", "no", "4", "bf16"],
        [*SEED_ANSWERS[:-1], "fp8", "TE", "yes", "1", "2", "E4M3", "16", "max", "no"],
        ["0", "3", "8", "train", "bf16"],
        ["1", "me", "eu-west-1", "role", "no", "yes", "inputs.tsv", "no", "1", "ml.p4d.24xlarge", "no", "3", "no"],
    ],
)
def test_old_answers_are_proposed_so_that_empty_lines_keep_them_and_flags_say_the_same(
    answers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(answers)
    assert ask([""] * len(answers), old=first) == first
    again = file.parse(file.to_document(first), "c.yaml")
    assert file.to_document(ask([""] * len(answers), old=again)) == file.to_document(first)
    if first.sagemaker is None:
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        launched = settings_of(launch_command_parser().parse_args([*flags_of(first), "script.py"]))
        launched.run.gradient_accumulation_steps = 1  # the flag of DeepSpeed's option is this one's too
        launched.run.gradient_clipping, launched.accumulation.num_steps = None, 1
        assert launched == first


def test_a_flag_that_is_shared_by_two_groups_reaches_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    answers = ["0", "2", "1", "yes", "no", "2", "", "", "4", "yes", "0.5", "no", "no", "2", "no"]
    launched = settings_of(launch_command_parser().parse_args([*flags_of(ask(answers)), "script.py"]))
    assert launched.deepspeed is not None
    assert (launched.deepspeed.gradient_accumulation_steps, launched.deepspeed.gradient_clipping) == (4, 0.5)


@pytest.mark.parametrize("kind", ["1", "2", "7"])
@pytest.mark.parametrize("engine", [[], ["no", "no"], ["no", "yes"], ["yes"]])
def test_one_number_of_processes_is_proposed_whatever_was_answered(kind: str, engine: list[str]) -> None:
    if (kind == "1") != (not engine):
        return
    asker = Asker(
        io.StringIO("".join(f"{answer}\n" for answer in ["0", kind, "1", *engine, *[""] * 20])), io.StringIO()
    )
    assert Questionnaire(asker).run().launch.num_processes == 2


def test_the_parallelism_config_is_asked_for_under_everything() -> None:
    fsdp = ["no", "yes", "2", "", "", "", "", "", "", ""]
    content, _, _ = dialogue(
        ["0", "2", "1", "no", "no", *fsdp, "yes", "2", "2", "", "", "", "", "", "all", "no", "no"], advanced=True
    )
    section = content["parallelism_config"]
    assert isinstance(section, dict)
    assert (section["parallelism_config_dp_replicate_size"], section["parallelism_config_dp_shard_size"]) == (2, 2)
    assert content["num_processes"] == 4, "their product is proposed"


def test_devices_of_this_machine_are_marked_and_keep_their_numbers() -> None:
    here = [choice.label for choice in machine_types("MULTI_NPU") if choice.is_here]
    assert here == ["No distributed training", "multi-CPU", "multi-NPU"]
    assert [choice.value for choice in machine_types("MULTI_NPU")] == [choice.value for choice in machine_types()]
    assert Choice("MULTI_GPU", "multi-GPU", is_here=False).shown == "multi-GPU (not on this machine)"


# As a command


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(), "HF_HOME": str(tmp_path), "TERM": "xterm"}


COMMAND = [sys.executable, "-m", "accelerate.commands.main", "config"]


def test_piped_answers_write_a_file_that_launch_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = "".join(f"{answer}\n" for answer in SEED_ANSWERS)
    run = subprocess.run(COMMAND, input=answers, capture_output=True, text=True, env=environment(tmp_path), timeout=60)
    assert run.returncode == 0, run.stderr
    path = tmp_path / "accelerate/default_config.yaml"
    assert yaml.safe_load(path.read_text())["distributed_type"] == "MULTI_GPU"
    assert str(path) in run.stdout and "accelerate launch script.py" in run.stdout
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "s.py").write_text("")
    _, _, plan = plan_launch(launch_command_parser().parse_args([str(tmp_path / "s.py")]))
    assert len(plan.ranks) == 2


def test_input_that_ends_is_reported_without_a_traceback_and_writes_nothing(tmp_path: Path) -> None:
    run = subprocess.run(COMMAND, input="0\n", capture_output=True, text=True, env=environment(tmp_path), timeout=60)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr and "The input ended" in run.stderr
    assert not (tmp_path / "accelerate").exists()


def test_the_same_answers_typed_in_a_terminal_write_the_same_file(tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    child = pexpect.spawn(COMMAND[0], COMMAND[1:], env=environment(tmp_path), timeout=20, encoding="utf-8")
    for question, answer in zip(SEED_QUESTIONS, SEED_ANSWERS, strict=True):
        child.expect_exact(question)
        child.send(f"{answer}\r")
    child.expect_exact("accelerate launch script.py")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    content = yaml.safe_load((tmp_path / "accelerate/default_config.yaml").read_text())
    assert content == yaml.safe_load(yaml.safe_dump(dialogue(SEED_ANSWERS)[0]))


def test_in_a_terminal_a_wrong_answer_is_explained_and_one_goes_back(tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    child = pexpect.spawn(COMMAND[0], COMMAND[1:], env=environment(tmp_path), timeout=20, encoding="utf-8")
    help = "machines that train together over the network"
    for expected, typed in (
        ("where the training will run", ""),
        (SEED_QUESTIONS[1], "multi-CPU"),
        (help, "<"),  # back to the type of machine, with multi-CPU proposed
        ("Number or name [1]: ", "2"),
        (help, "3\x7f1"),  # a digit is taken back
        (SEED_QUESTIONS[3], "maybe"),
        ("'maybe' is neither", "no"),
        (SEED_QUESTIONS[4], ""),
        (SEED_QUESTIONS[5], "9\x154"),  # a line is erased
        (SEED_QUESTIONS[6], "bf16"),
        ("accelerate launch --multi_gpu --mixed_precision bf16 --num_processes 4 script.py", None),
    ):
        child.expect_exact(expected)
        if typed is not None:
            child.send(f"{typed}\r")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    content = yaml.safe_load((tmp_path / "accelerate/default_config.yaml").read_text())
    assert (content["distributed_type"], content["num_machines"], content["num_processes"]) == ("MULTI_GPU", 1, 4)


def test_the_old_file_is_proposed_and_one_that_cant_be_read_is_not(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 6\nmixed_precision: bf16\n")
    command = [*COMMAND, "--config_file", str(path)]
    for typed, expected in (("\n" * 7, "is proposed"), ("0\n1\n\n\n\n", "aren't proposed, because")):
        run = subprocess.run(
            command, input=typed, capture_output=True, text=True, env=environment(tmp_path), timeout=60
        )
        assert run.returncode == 0, run.stderr
        assert expected in run.stdout
        content = yaml.safe_load(path.read_text())
        assert content["num_processes"] == (6 if expected == "is proposed" else 2)
        path.write_text("distributed_type: MULTI_GPU\nnum_proceses: 6\n")


def test_an_interrupted_dialogue_writes_nothing(tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    child = pexpect.spawn(
        COMMAND[0],
        COMMAND[1:],
        env=environment(tmp_path),
        timeout=20,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )
    child.expect_exact(SEED_QUESTIONS[0])
    child.expect_exact("[0]: ")
    for _ in range(5):  # Python sees a signal that comes as the read begins only with the next one
        child.sendintr()
        if child.expect_exact(["Nothing was written.", pexpect.TIMEOUT], timeout=10) == 0:
            break
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 130
    assert not (tmp_path / "accelerate").exists()


def test_config_default_writes_yaml_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    assert config.main(["default", "--config_file", str(path), "--mixed_precision", "bf16"]) == 0
    text = path.read_text()
    assert not text.startswith("{")
    assert yaml.safe_load(text)["mixed_precision"] == "bf16"
    assert write_basic_config("no", path) is False
    capsys.readouterr()
    assert config.main(["default", "--config_file", str(path)]) == 0  # a setup script can be run again
    assert "already" in capsys.readouterr().out
    assert path.read_text() == text


def test_write_basic_config_refuses_an_unknown_precision(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fp7"):
        write_basic_config("fp7", tmp_path / "c.yaml")
    assert write_basic_config(save_location=str(tmp_path / "d.yaml")) == tmp_path / "d.yaml"


def test_config_update_rewrites_old_spellings(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_GPU\nfp16: true\nnum_processes: 2\n")
    assert config.main(["update", "--config-file", str(path)]) == 0
    content = yaml.safe_load(path.read_text())
    assert content["mixed_precision"] == "fp16" and "fp16" not in content
    assert config.main(["update", "--config_file", str(tmp_path / "nowhere.yaml")]) == 2


def test_config_show_prints_the_file_and_its_meaning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: 'NO'\nmixed_precision: bf16\n")
    assert config.main(["show", "--config_file", str(path)]) == 0
    assert "c.yaml:2" in capsys.readouterr().out


# The objects that other programs know


def test_a_file_is_loaded_as_an_object_and_back(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nfp16: true\n")
    loaded = load_config_from_file(str(path))
    assert isinstance(loaded, ClusterConfig)
    assert loaded.num_processes == 2
    assert loaded.to_dict()["distributed_type"] == "MULTI_GPU"
    assert loaded.to_dict()["mixed_precision"] == "fp16"
    assert "fsdp_config" not in loaded.to_dict()
    for name in ("again.yaml", "again.json"):
        target = tmp_path / name
        getattr(loaded, f"to_{name[6:]}_file")(target)
        assert load_config_from_file(target) == loaded


def test_a_bare_no_in_yaml_is_the_type_no(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: no\n")
    loaded = load_config_from_file(path)
    assert isinstance(loaded, ClusterConfig)
    assert loaded.distributed_type == "NO" and loaded.num_processes == 1


def test_a_sagemaker_file_is_a_sagemaker_config(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: ml.p3\n")
    loaded = load_config_from_file(path)
    assert isinstance(loaded, SageMakerConfig) and loaded.region == "us-east-1"


def test_unknown_keys_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_proceses: 2\n")
    with pytest.raises(ValueError, match="num_proceses"):
        load_config_from_file(path)
    with pytest.raises(FileNotFoundError):
        load_config_from_file(tmp_path / "nowhere.yaml")


def test_the_default_paths_are_known() -> None:
    assert config_args.default_yaml_config_file.endswith("accelerate/default_config.yaml")
    assert config.default_config_file == config_args.default_config_file


@pytest.mark.parametrize("place", [".", "/dev/null/c.yaml"])
def test_a_place_that_cant_be_written_is_refused_before_any_question(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config.main(["--config_file", place]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "--config_file" in err and len(err.splitlines()) == 1


def test_a_default_file_that_cant_be_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert config.main(["default", "--config_file", "/dev/null/c.yaml"]) == 2
    assert "/dev/null/c.yaml can't be written: " in capsys.readouterr().err
