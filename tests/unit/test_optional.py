from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from accelerate import optional
from accelerate.errors import MissingDependency
from accelerate.optional import can_be_found, installed_version, is_installed, require

PROBES = [
    function for name, function in vars(optional).items() if name.startswith("is_") and name.endswith("_available")
]


@pytest.fixture(autouse=True)
def fresh_table() -> Iterator[None]:
    installed_version.cache_clear()
    yield
    installed_version.cache_clear()


def make_package(folder: Path, name: str, version: str | None, distribution: str | None = None) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if version is not None:
        information = folder / f"{(distribution or name).replace('-', '_')}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution or name}\nVersion: {version}\n"
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_package_with_metadata_is_installed_and_not_imported(site: Path) -> None:
    make_package(site, "acme_package", "1.2")
    assert is_installed("acme_package")
    assert installed_version("acme_package") == "1.2"
    assert "acme_package" not in sys.modules


def test_a_module_is_looked_for_without_being_imported(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(site, "acme_looked_for", None)
    assert can_be_found("acme_looked_for") and "acme_looked_for" not in sys.modules
    assert not can_be_found("acme_absent") and not can_be_found("acme_absent.part")
    monkeypatch.setitem(sys.modules, "acme_stand_in", ModuleType("acme_stand_in"))
    assert can_be_found("acme_stand_in")


def test_a_folder_of_the_same_name_is_not_a_package(site: Path) -> None:
    make_package(site, "acme_folder", None)
    (site / "acme_namespace").mkdir()
    assert not is_installed("acme_folder")
    assert not is_installed("acme_namespace")


def test_a_package_whose_distribution_is_called_otherwise_is_found(site: Path) -> None:
    make_package(site, "msamp", "0.4", "ms-amp")
    assert optional.is_msamp_available()


def test_versions_bound_what_counts_as_installed(site: Path) -> None:
    make_package(site, "acme_bounds", "3.29.1")
    assert is_installed("acme_bounds", at_least="3.29.1", below="4")
    assert not is_installed("acme_bounds", at_least="3.30")
    assert not is_installed("acme_bounds", below="3.29.1")


def test_aim_counts_below_version_four(site: Path) -> None:
    make_package(site, "aim", "4.0.0")
    assert not optional.is_aim_available()


def test_absence_is_cached_until_the_table_is_cleared(site: Path) -> None:
    assert not is_installed("acme_late")
    make_package(site, "acme_late", "1.0")
    assert not is_installed("acme_late")
    installed_version.cache_clear()
    assert is_installed("acme_late")


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.__name__)
def test_every_probe_answers_with_a_bool_and_without_arguments(probe) -> None:
    assert all(p.default is not p.empty for p in inspect.signature(probe).parameters.values())
    assert isinstance(probe(), bool)


def test_a_required_package_is_imported() -> None:
    assert require("json") is sys.modules["json"]


def test_a_missing_required_package_says_for_what_and_how_to_install_it() -> None:
    with pytest.raises(MissingDependency) as refusal:
        require("acme_missing", "progress", purpose="log_with='acme'")
    text = str(refusal.value)
    assert "log_with='acme' needs 'acme_missing'" in text
    assert 'pip install "acme_missing"' in text and "accelerate[progress]" in text
    assert isinstance(refusal.value, ImportError)


def test_a_package_that_is_too_old_is_refused_with_its_version(site: Path) -> None:
    make_package(site, "acme_old", "1.0")
    with pytest.raises(MissingDependency, match=r"acme_old>=2\.0.*version 1\.0 is installed"):
        require("acme_old", at_least="2.0")


def test_a_package_that_breaks_on_import_says_why(site: Path) -> None:
    make_package(site, "acme_broken", "1.0")
    (site / "acme_broken" / "__init__.py").write_text("import acme_dependency_of_it\n")
    with pytest.raises(MissingDependency, match=r"importing it failed.*acme_dependency_of_it"):
        require("acme_broken")


def test_functions_that_need_a_package_refuse_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @optional.torchao_required
    def launch_ship(speed: int) -> int:
        return speed

    monkeypatch.setattr(optional, "is_torchao_available", lambda: False)
    with pytest.raises(ImportError, match=r"`launch_ship` needs torchao.*pip install torchao"):
        launch_ship(9)
    monkeypatch.setattr(optional, "is_torchao_available", lambda: True)
    assert launch_ship(9) == 9
