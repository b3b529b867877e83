"""The article on several devices: the questionnaire, the two examples, the notebook."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import pexpect
import pytest
import torch
import yaml

from accelerate import Accelerator, notebook_launcher
from tests.python_path import python_path
from tests.ranks import run_on_ranks
from tests.seeds.test_001_commands import ARTICLE_ANSWERS, STATE, told, with_own_port
from tests.seeds.tools import ACCELERATE, ROOT, environment, launcher, run
from tests.slow import slow

row = pytest.mark.row
EXAMPLES = ROOT / "examples"


# ------------------------------------------------------------------------------------------- the questionnaire


def answered(folder: Path, answers: str) -> tuple[dict[str, object], str]:
    """The file that the answers gave, and what was said on the way."""
    said = run([*ACCELERATE, "config", "--config_file", folder / "answers.yaml"], typed=answers).stdout
    return yaml.safe_load((folder / "answers.yaml").read_text()), said


@row("002-19", "002-20", "002-21", "002-22", "002-23", "002-24", "002-25", "002-26", "002-35", "001-51", "004-16")
def test_the_articles_answers_give_the_articles_file(tmp_path: Path) -> None:
    config, said = answered(tmp_path, ARTICLE_ANSWERS)
    assert config["compute_environment"] == "LOCAL_MACHINE"
    assert config["distributed_type"] == "MULTI_GPU"
    assert config["num_machines"] == 1
    assert config["num_processes"] == 2
    assert config["mixed_precision"] == "no"
    assert "deepspeed_config" not in config and "fsdp_config" not in config
    questions = [
        "which compute environment", "type of machine", "How many different machines", "DeepSpeed",
        "FullyShardedDataParallel", r"How many GPU", "mixed precision",
    ]  # fmt: skip
    places = [re.search(question, said, re.IGNORECASE) for question in questions]
    assert all(places), [question for question, place in zip(questions, places, strict=True) if not place]
    assert [place.start() for place in places if place] == sorted(place.start() for place in places if place)
    (tmp_path / "script.py").write_text(STATE)
    # The machine of the article has two GPUs; where there are none, both processes run on the CPU, and that is said.
    file = with_own_port(tmp_path / "answers.yaml")
    launched = run([*ACCELERATE, "launch", "--config_file", file, tmp_path / "script.py"])
    assert [fact["ranks"] for fact in told(launched.stdout)] == [[0, 1], [0, 1]]
    if not torch.cuda.is_available():
        assert "CPU" in launched.stderr


@row("002-20", "002-25")
def test_answers_are_understood_as_numbers_labels_and_words(tmp_path: Path) -> None:
    config, _ = answered(tmp_path, "This machine\nmulti-GPU\n1\nNO\nno\n2\nFP16\n")
    assert (config["distributed_type"], config["mixed_precision"]) == ("MULTI_GPU", "fp16")


@row("002-21", "002-22", "002-23")
def test_an_empty_line_takes_the_default_and_yes_opens_more_questions(tmp_path: Path) -> None:
    config, _ = answered(tmp_path, "0\n2\n\n\n\n2\n\n")
    assert config["num_machines"] == 1
    assert "deepspeed_config" not in config and "fsdp_config" not in config
    config, said = answered(tmp_path, "0\n2\n1\nyes\n" + "\n" * 12)
    assert "deepspeed_config" in config and "zero" in said.lower()


@row("002-24")
def test_a_number_is_asked_again_after_a_text(tmp_path: Path) -> None:
    config, said = answered(tmp_path, "0\n2\n1\nno\nno\nmany\n2\nno\n")
    assert config["num_processes"] == 2
    assert "'many'" in said


@row("002-19", "002-26")
def test_the_questionnaire_works_in_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "typed.yaml"
    child = pexpect.spawn(
        ACCELERATE[0],
        [*ACCELERATE[1:], "config", "--config_file", str(path)],
        env={**environment(), "TERM": "xterm"},
        timeout=20,
        encoding="utf-8",
    )
    for question, answer in (
        ("compute environment", "\r"),
        ("type of machine", "2\r"),
        ("different machines", "1\r"),
        ("DeepSpeed", "no\r"),
        ("FullyShardedDataParallel", "no\r"),
        ("How many GPU", "2\r"),
        ("mixed precision", "\r"),
    ):
        child.expect(question)
        child.send(answer)
    child.expect(pexpect.EOF)
    config = yaml.safe_load(path.read_text())
    assert (config["distributed_type"], config["num_processes"]) == ("MULTI_GPU", 2)


@row("002-27")
def test_the_number_of_processes_is_the_total_over_machines(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    said = run(
        [
            *ACCELERATE, "launch", "--dry-run", "--cpu", "--num_machines", "2", "--num_processes", "4",
            "--machine_rank", "0",
            "--main_process_ip", "127.0.0.1", "--main_process_port", "29512", tmp_path / "script.py",
        ]
    ).stdout  # fmt: skip
    assert re.search(r"nproc.per.node\D+2\b|2 (here|of 4)|ranks\D*0\D+1\b", said), said


# ------------------------------------------------------------------------------------------- devices


@row("002-16")
def test_the_state_and_the_env_command_name_the_device() -> None:
    assert "Device: cpu" in str(Accelerator(cpu=True).state)
    said = run([*ACCELERATE, "env"]).stdout
    assert torch.__version__ in said and "Python" in said


@row("002-29", "004-07")
def test_each_local_rank_has_its_own_device() -> None:
    from accelerate.devices.table import kind_of

    cuda = kind_of("cuda")
    assert [cuda.device(index) for index in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]


@row("002-10")
def test_the_notebook_launcher_starts_one_world_of_two(tmp_path: Path) -> None:
    def cell(folder: str, word: str) -> None:
        accelerator = Accelerator(cpu=True)
        name = f"{accelerator.process_index}_of_{accelerator.num_processes}_{word}"
        (Path(folder) / name).touch()

    notebook_launcher(cell, (str(tmp_path), "hello"), num_processes=2, use_port="0")
    assert {path.name for path in tmp_path.iterdir()} == {"0_of_2_hello", "1_of_2_hello"}


# ------------------------------------------------------------------------------------------- the examples


def example(name: str) -> ModuleType:
    """The example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def pairs_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A small file in MRPC's format, where the same words mean a paraphrase."""
    folder = tmp_path_factory.mktemp("mrpc")
    words = [f"w{chr(97 + i)}{chr(97 + j)}" for i in range(4) for j in range(10)]
    draw = torch.Generator().manual_seed(0)
    files = []
    for name, count in (("train", 600), ("dev", 99)):
        lines = ["sentence1,sentence2,label"]
        for number in range(count):
            topics = [number % 4, (number + number % 2) % 4]  # an odd number: another topic
            texts = [
                " ".join(words[10 * t + int(k)] for k in torch.randint(0, 10, (8,), generator=draw)) for t in topics
            ]
            lines.append(f"{texts[0]},{texts[1]},{int(topics[0] == topics[1])}")
        files.append(folder / f"{name}.csv")
        files[-1].write_text("\n".join(lines) + "\n")
    return files


@row("002-12", "002-15", "002-18")
def test_the_text_example_learns_on_two_ranks(pairs_files: list[Path]) -> None:
    def run_main() -> str:
        sys.argv = ["nlp_example.py", "--cpu", "--train_file", str(pairs_files[0]), "--batch_size", "16"]
        sys.argv += ["--validation_file", str(pairs_files[1])]
        with redirect_stdout(io.StringIO()) as said:
            example("nlp_example").main()
        return said.getvalue()

    first, second = run_on_ranks(run_main, 2)
    accuracies = [float(a) for a in re.findall(r"accuracy (\d\.\d+), f1 \d\.\d+", first)]
    assert len(accuracies) >= 3 and accuracies[-1] >= 0.85
    assert "accuracy" not in second


@row("002-12", "002-15", "002-18")
@slow
def test_the_text_example_learns_and_reports_the_same_on_two_processes(pairs_files: list[Path]) -> None:
    script: list[str | Path] = [
        EXAMPLES / "nlp_example.py", "--cpu", "--train_file", pairs_files[0], "--validation_file", pairs_files[1],
    ]  # fmt: skip
    reports = []
    for words, batch_size in ((launcher("python"), "32"), (launcher("accelerate"), "16")):
        said = run([*words, *script, "--batch_size", batch_size], PYTHONPATH=python_path()).stdout
        reports.append([(float(a), float(f)) for a, f in re.findall(r"accuracy (\d\.\d+), f1 (\d\.\d+)", said)])
    one, two = reports
    assert len(one) == len(two) >= 3
    assert one[-1][0] >= 0.85 and two[-1][0] >= 0.85


@row("002-12")
@slow
@pytest.mark.timeout(300)  # 40 seconds of computing, on however busy a machine
def test_the_text_example_reaches_its_mark_on_real_text_without_arguments() -> None:
    said = run([sys.executable, EXAMPLES / "nlp_example.py"], PYTHONPATH=python_path(), timeout_seconds=280).stdout
    accuracies = [float(a) for a in re.findall(r"accuracy (\d\.\d+)", said)]
    assert accuracies[-1] >= 0.85


@row("002-13")
def test_the_documented_recipe_is_in_the_text_example() -> None:
    nlp = example("nlp_example")
    source = (EXAMPLES / "nlp_example.py").read_text()
    assert (nlp.EVALUATION_BATCH_SIZE, nlp.WARM_UP_STEPS) == (32, 100)
    for fact in (
        '"bert-base-cased"',
        '"mrpc"',
        "learning_rate=2e-5",
        "num_epochs=3",
        "batch_size=16",
        "default=42",
    ):
        assert fact in source, fact


@row("002-14")
def test_files_in_the_format_of_mrpc_are_read(tmp_path: Path) -> None:
    nlp = example("nlp_example")
    table = tmp_path / "dev.tsv"
    table.write_text('sentence1\tsentence2\tlabel\nHe said "no.\tHe refused.\t1\n')
    assert nlp.read_pairs(table) == [('He said "no.', "He refused.", 1)]
    wrong = tmp_path / "dev.csv"
    wrong.write_text("sentence1,sentence2,label\na,b,1\na,b,yes\n")
    with pytest.raises(ValueError, match=r"dev\.csv:3: label 'yes'"):
        nlp.read_pairs(wrong)


@row("002-15")
def test_accuracy_and_f1_equal_the_reference() -> None:
    from sklearn.metrics import accuracy_score, f1_score

    nlp = example("nlp_example")
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        guesses, truths = torch.randint(0, 2, (2, 37), generator=draw)
        metrics = nlp.accuracy_and_f1(guesses, truths)
        assert metrics["accuracy"] == pytest.approx(accuracy_score(truths, guesses))
        assert metrics["f1"] == pytest.approx(f1_score(truths, guesses))


@row("002-17")
@slow
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_the_examples_take_a_precision(precision: str, tmp_path: Path) -> None:
    said = run(
        [sys.executable, EXAMPLES / "cv_example.py", "--cpu", "--mixed_precision", precision, "--num_epochs", "1"],
        folder=tmp_path,
        PYTHONPATH=python_path(),
    ).stdout
    assert re.search(r"^epoch 0: \d+\.\d\d", said, re.MULTILINE)


@row("002-11", "002-17", "002-31", "002-32")
def test_missing_libraries_are_named_and_the_examples_run_without_them(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in ("timm", "torchvision", "datasets", "transformers"):
        (blocked / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name='{name}')\n")
    path = python_path(blocked)
    refused = run(
        [sys.executable, EXAMPLES / "cv_example.py", "--cpu", "--data_dir", "images"], expect=1, PYTHONPATH=path
    )
    assert "pip install timm torchvision" in refused.stderr and "--data_dir" in refused.stderr
    words = ["--cpu", "--mixed_precision", "bf16", "--num_epochs", "1"]
    said = run([sys.executable, EXAMPLES / "cv_example.py", *words], folder=tmp_path, PYTHONPATH=path).stdout
    assert "handwritten digits" in said
    assert re.search(r"^epoch 0: \d+\.\d\d", said, re.MULTILINE)


@row("002-30")
def test_the_image_example_reads_the_pets_and_trains_the_head(tmp_path: Path) -> None:
    from PIL import Image

    cv = example("cv_example")
    assert cv.label_of("images/great_pyrenees_173.jpg") == "great_pyrenees"
    with pytest.raises(ValueError, match=r"label_number\.jpg"):
        cv.label_of("cat.jpg")
    draw = torch.Generator().manual_seed(0)
    for number in range(20):
        colour = (220, 30, 30) if number % 2 else (30, 30, 220)
        noise = torch.randint(0, 30, (3,), generator=draw).tolist()
        image = Image.new("RGB", (40, 30), tuple(c + n for c, n in zip(colour, noise, strict=True)))
        image.save(tmp_path / f"{'beagle' if number % 2 else 'russian_blue'}_{number}.jpg")
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "timm.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    default_cfg = {'mean': (0.485, 0.456, 0.406), 'std': (0.229, 0.224, 0.225)}\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        nn = torch.nn\n"
        "        self.features = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 8))\n"
        "        self.fc = torch.nn.Linear(8, num_classes)\n"
        "    def get_classifier(self):\n"
        "        return self.fc\n"
        "    def forward(self, x):\n"
        "        return self.fc(self.features(x))\n"
        "def create_model(name, pretrained, num_classes):\n"
        "    assert (name, pretrained) == ('resnet50d', True)\n"
        "    torch.manual_seed(0)\n"
        "    return Net(num_classes)\n"
    )
    (stubs / "torchvision").mkdir()
    (stubs / "torchvision" / "__init__.py").write_text("")
    (stubs / "torchvision" / "transforms.py").write_text(
        "import numpy, torch\n"
        "class Compose:\n"
        "    def __init__(self, steps): self.steps = steps\n"
        "    def __call__(self, x):\n"
        "        for step in self.steps: x = step(x)\n"
        "        return x\n"
        "class _Resized:\n"
        "    def __init__(self, size, **options): self.size = size if isinstance(size, tuple) else (size, size)\n"
        "    def __call__(self, image): return image.resize(self.size)\n"
        "Resize = RandomResizedCrop = _Resized\n"
        "class RandomHorizontalFlip:\n"
        "    def __call__(self, image): return image\n"
        "class ToTensor:\n"
        "    def __call__(self, image): return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255\n"
        "class Normalize:\n"
        "    def __init__(self, mean, std): self.mean, self.std = torch.tensor(mean), torch.tensor(std)\n"
        "    def __call__(self, x): return (x - self.mean[:, None, None]) / self.std[:, None, None]\n"
    )
    said = run(
        [
            sys.executable, EXAMPLES / "cv_example.py", "--cpu", "--data_dir", tmp_path, "--batch_size", "4",
            "--image_size", "32",
        ],
        PYTHONPATH=python_path(stubs),
    ).stdout  # fmt: skip
    shares = [float(share) for share in re.findall(r"^epoch \d: (\d+\.\d\d)", said, re.MULTILINE)]
    assert len(shares) == 3 and shares[-1] == 100.0
    source = (EXAMPLES / "cv_example.py").read_text()
    for fact in (
        "OneCycleLR",
        "default=3e-2",
        "default=3)",
        "default=64",
        "default=224",
        "int(0.8 *",
        "requires_grad = False",
    ):
        assert fact in source, fact


@row("002-33")
def test_the_package_carries_its_own_licence() -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "The accelerate maintainers" in licence
    assert "HuggingFace" not in licence and "Hugging Face" not in licence
    assert "independent" in (ROOT / "README.md").read_text().lower()
