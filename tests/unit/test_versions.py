from __future__ import annotations

import importlib.metadata
import logging
import platform
import sys

import pytest
from packaging.version import Version

from accelerate import versions
from accelerate.errors import MissingDependency
from accelerate.versions import check_os_kernel, compare_versions, is_torch_version


@pytest.mark.parametrize(
    ("operation", "older", "same", "newer"),
    [
        (">", True, False, False),
        (">=", True, True, False),
        ("==", False, True, False),
        ("!=", True, False, True),
        ("<=", False, True, True),
        ("<", False, False, True),
    ],
)
def test_each_comparison_of_a_version(operation: str, older: bool, same: bool, newer: bool) -> None:
    version = Version("2.6.1")
    assert compare_versions(version, operation, "2.5.9") is older
    assert compare_versions(version, operation, "2.6.1") is same
    assert compare_versions(version, operation, "2.10.0") is newer


def test_a_library_is_compared_by_its_installed_version() -> None:
    installed = importlib.metadata.version("pytest")
    assert compare_versions("pytest", "==", installed)
    assert compare_versions("pytest", ">", "0.1")


def test_the_local_part_of_a_version_does_not_take_part() -> None:
    assert compare_versions(Version("2.6.0+cpu"), "==", "2.6.0")
    assert compare_versions(Version("2.6.0+cpu"), "<=", "2.6.0")


def test_torch_is_compared_by_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would fail
    assert is_torch_version(">=", "2.6")
    assert not is_torch_version("<", "2.6")


def test_an_unknown_comparison_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'=>'.*>="):
        compare_versions("torch", "=>", "2.0")


def test_an_absent_library_is_refused_with_how_to_install_it() -> None:
    with pytest.raises(MissingDependency, match="pip install no-such-library"):
        compare_versions("no-such-library", ">=", "1")


@pytest.mark.parametrize(
    ("system", "release", "warns"),
    [
        ("Linux", "5.4.0-150-generic", True),
        ("Linux", "4.18.0-513.el8.x86_64", True),
        ("Linux", "5.5.0", False),
        ("Linux", "6.1.0-18-amd64", False),
        ("Linux", "5.15.167.4-microsoft-standard-WSL2", False),
        ("Linux", "strange", False),
        ("Darwin", "4.0.0", False),
    ],
)
def test_an_old_linux_kernel_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, system: str, release: str, warns: bool
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "release", lambda: release)
    with caplog.at_level(logging.WARNING):
        check_os_kernel()
    assert bool(caplog.records) is warns
    if warns:
        assert versions.OLDEST_GOOD_LINUX_KERNEL in caplog.text
