from __future__ import annotations

import sys
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch

import accelerate
from accelerate.test_utils import testing
from accelerate.test_utils.testing import (
    SubprocessCallException,
    TempDirTestCase,
    assert_exception,
    capture_call_output,
    execute_subprocess_async,
    get_backend,
    get_launch_command,
    get_torch_dist_unique_port,
    path_in_accelerate_package,
    require_torch_min_version,
    run_command,
)

PYTHON = sys.executable


def test_the_launch_command_has_one_flag_for_each_keyword() -> None:
    command = get_launch_command(num_processes=2, use_fsdp=True, cpu=False, config_file=None)
    assert command == ["accelerate", "launch", "--num_processes=2", "--use_fsdp"]


def test_a_command_gives_what_it_printed_line_by_line(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('a\\nb'); print('c', file=sys.stderr)"
    result = execute_subprocess_async([PYTHON, "-c", program])
    assert (result.returncode, result.stdout, result.stderr) == (0, ["a", "b"], ["c"])
    shown = capfd.readouterr()
    assert "Running:" in shown.out and "stdout: a\nstdout: b\n" in shown.out and shown.err == "stderr: c\n"
    execute_subprocess_async([PYTHON, "-c", program], quiet=True)
    shown = capfd.readouterr()
    assert "Running:" in shown.out and "stdout:" not in shown.out and shown.err == ""
    execute_subprocess_async([PYTHON, "-c", program], echo=False)
    assert capfd.readouterr().out == "stdout: a\nstdout: b\n"


def test_a_failed_command_raises_with_what_it_wrote() -> None:
    program = "import sys; sys.exit('went wrong')"
    with pytest.raises(RuntimeError, match=r"failed with code 1(.|\n)*went wrong"):
        execute_subprocess_async([PYTHON, "-c", program], echo=False)
    with pytest.raises(SubprocessCallException, match="went wrong"):
        run_command([PYTHON, "-c", program])


def test_a_command_that_takes_too_long_is_killed() -> None:
    with pytest.raises(SubprocessCallException, match=r"more than 0\.5 s"):
        execute_subprocess_async([PYTHON, "-c", "import time; time.sleep(60)"], timeout=0.5, echo=False)


def test_the_output_of_a_command_comes_when_asked_for() -> None:
    assert run_command([PYTHON, "-c", "print(1)"]) is None
    assert run_command([PYTHON, "-c", "print(1)"], return_stdout=True) == "1\n"


def test_files_of_the_package_are_found() -> None:
    assert path_in_accelerate_package("test_utils", "scripts", "test_ops.py").is_file()
    assert path_in_accelerate_package() == Path(accelerate.__file__).parent


def test_each_worker_of_the_test_run_has_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert get_torch_dist_unique_port() == 29500
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    assert get_torch_dist_unique_port() == 29503


def test_an_expected_exception_passes_and_any_other_outcome_fails() -> None:
    with assert_exception(ValueError, "part"):
        raise ValueError("a part of the text")
    for error in (ValueError("another text"), KeyError("part"), None):
        with pytest.raises(AssertionError), assert_exception(ValueError, "part"):
            if error is not None:
                raise error


def test_what_a_call_prints_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    assert capture_call_output(print, "a", "b", sep="-") == "a-b\n"
    assert capsys.readouterr().out == ""


def test_the_backend_found_here_can_hold_a_tensor() -> None:
    device, count, memory_allocated = get_backend()
    torch.zeros(1, device=device)
    assert count >= 1 and memory_allocated() >= 0


class Cases(TempDirTestCase):
    def test_first(self) -> None:
        assert list(self.tmpdir.iterdir()) == []
        (self.tmpdir / "file").touch()

    def test_second(self) -> None:
        assert list(self.tmpdir.iterdir()) == []
        (self.tmpdir / "file").touch()


def test_a_folder_for_tests_is_emptied_between_them_and_removed_at_the_end() -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Cases).run(result)
    assert result.testsRun == 2 and result.wasSuccessful()
    assert not Cases.tmpdir.exists()


def test_mocks_last_for_one_test() -> None:
    class Mocked(testing.MockingTestCase):
        def test_it(self) -> None:
            self.add_mocks(mock.patch.dict("os.environ", {"A_MOCKED_VARIABLE": "1"}))
            import os

            assert os.environ["A_MOCKED_VARIABLE"] == "1"

    import os

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Mocked).run(result)
    assert result.wasSuccessful() and result.testsRun == 1
    assert "A_MOCKED_VARIABLE" not in os.environ


def is_skipped(decorated: object) -> bool:
    return getattr(decorated, "__unittest_skip__", False)


def test_requirements_skip_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def a_test() -> None: ...

    assert is_skipped(require_torch_min_version(version="99.0")(a_test))
    assert not is_skipped(require_torch_min_version(version="2.0")(lambda: None))
    assert is_skipped(testing.skip(lambda: None))
    assert is_skipped(testing.slow(lambda: None))
    monkeypatch.setenv("RUN_SLOW", "1")
    assert not is_skipped(testing.slow(lambda: None))


def test_requirements_of_devices_agree_with_the_device_found(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = get_backend()[0] == "cpu"
    assert is_skipped(testing.require_non_cpu(lambda: None)) is on_cpu
    assert is_skipped(testing.require_cpu(lambda: None)) is not on_cpu
