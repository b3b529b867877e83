"""Every test runs offline, on one thread a process unless asked otherwise, on loopback; warnings fail it."""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

# Before torch is imported anywhere: it reads the thread count once. `make processors` asks for two.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    {
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "Agg",
    }
)
# Tests are of the CPU, also where there is a GPU; `tests.device.plugin` puts their ranks on a device.
if "TEST_DEVICE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# The server of torch's store looks up the name of every host that connects and serves nobody meanwhile: 5 s
# each where no name server answers.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Bytecode is kept whatever the caller asks: each worker, and each of the hundreds of interpreters that tests start,
# compiles the package and rewrites the tests' assertions anew otherwise.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).resolve().parent.parent
# A fresh clone tests its own source even where the package is not installed; `tests.ranks` is a shared tool.
for folder in (ROOT / "src", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from tests.python_path import QUICK_START  # noqa: E402

# Programs that tests start get it from the one or the other.
sys.path.append(str(QUICK_START))
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(QUICK_START)])

# Tests have more ranks than there are cores. A rank that wakes another by a message must not be interrupted for it
# while it holds a lock of gloo: a thread of gloo asks for that lock again and again. Child processes inherit this.
with suppress(AttributeError, OSError):  # a system without it, or one that refuses
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# A machine that does other work too is no failure.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

_RUN_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
_WORLD_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "FORK_LAUNCHED",
)


def pytest_configure(config: pytest.Config) -> None:
    """No run of the person who types `make test` leaks into the tests through the environment."""
    for name in list(os.environ):
        if name.startswith(_RUN_VARIABLES) or name in _WORLD_VARIABLES:
            del os.environ[name]


@pytest.fixture(scope="session")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes a new folder for a name. Pytest's own lists all earlier folders each time."""
    parent = tmp_path_factory.mktemp("tests")
    numbers = itertools.count()

    def make(name: str) -> Path:
        folder = parent / f"{next(numbers)}_{name}"
        folder.mkdir(mode=0o700)
        return folder

    return make


@pytest.fixture
def tmp_path(new_folder: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    """The test's own folder."""
    return new_folder(re.sub(r"\W", "_", request.node.name)[:30])


@pytest.fixture(autouse=True)
def environment_unchanged(new_folder: Callable[[str], Path]) -> Iterator[None]:
    """Each test starts with the same environment, and with a configuration home of its own."""
    before = dict(os.environ)
    os.environ["HF_HOME"] = str(new_folder("home"))
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def training_stays_finite(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test trains into NaN unnoticed, whatever processor it runs on."""
    if "nonfinite" in request.keywords or "torch" not in sys.modules:
        yield
        return
    from tests.finite import watch_steps

    watch = watch_steps()
    yield
    watch.remove()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What an old torch is refused for is no failure of the test that meets the refusal."""
    report = yield
    if report.failed:
        from tests.torch_needed import skip_refused

        skip_refused(report)
    return report


#: Of what a process has remarked on already, by module.
GIVEN_ONCE = {
    "accelerate.callers": "_warned",
    "accelerate.checkpointing.loading": "_minor_notes_of_run",
    "accelerate.logging": "_logged_once",
    "accelerate.data_loader.iterable": "_warned",
    "accelerate.tracking.choose": "_remarked_names",
}


@pytest.fixture(autouse=True)
def remarks_are_new() -> None:
    """No test, and no rank that is forked for it, inherits that a remark was given once."""
    for name, remarks in GIVEN_ONCE.items():
        if name in sys.modules:
            getattr(sys.modules[name], remarks).clear()


@pytest.fixture(autouse=True)
def world_left() -> Iterator[None]:
    """No test inherits the state views or the process group of the test before it."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    world = sys.modules.get("accelerate.distributed.world")
    if world is not None:
        world.leave_world()


def pytest_collection() -> None:
    """Imports and items stay: a fifth of the time of collecting tests would go into looking for garbage among them."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What has been imported by now stays: the collections that tests ask for needn't look at it each time."""
    from tests.huge_pages import use_huge_pages

    gc.collect()
    gc.freeze()
    gc.enable()
    if "tests.ranks" in sys.modules:
        use_huge_pages()


@pytest.fixture(autouse=True, scope="module")
def imports_of_earlier_modules_stay() -> None:
    """So does what modules before this one have imported and kept, a second of each collection after some hundred."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a network run only when asked for by mark."""
    if "online" in (config.getoption("-m") or ""):
        return
    skip = pytest.mark.skip(reason="needs a network: pytest -m online")
    for item in items:
        if "online" in item.keywords:
            item.add_marker(skip)
