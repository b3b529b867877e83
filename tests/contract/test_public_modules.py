"""The boundary: what public_modules.txt lists is importable, whole and documented, and holds all documented names."""

from __future__ import annotations

import inspect

import pytest

from tests.contract.public_modules import PUBLIC_MODULES, public_module, public_names
from tests.contract.test_old_names import OLD_NAMES

#: Packages that only hold public modules.
HOLDS_MODULES = {"accelerate.test_utils.scripts.external_deps"}


def test_the_list_is_sorted_and_names_nothing_twice() -> None:
    assert sorted(set(PUBLIC_MODULES)) == PUBLIC_MODULES


@pytest.mark.parametrize("address", PUBLIC_MODULES)
def test_a_public_module_says_what_it_holds_and_holds_it(address: str) -> None:
    module = public_module(address)
    names = public_names(module)
    assert inspect.getdoc(module)
    assert names or address in HOLDS_MODULES
    assert len(names) == len(set(names))
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing


@pytest.mark.parametrize("address", PUBLIC_MODULES)
def test_public_classes_and_functions_are_documented(address: str) -> None:
    module = public_module(address)
    silent = [
        name
        for name in public_names(module)
        for value in [getattr(module, name)]
        if (isinstance(value, type) or inspect.isroutine(value))
        and str(getattr(value, "__module__", "")).startswith("accelerate")
        and not inspect.getdoc(value)
    ]
    assert not silent


def test_every_documented_name_of_the_peer_is_at_a_public_module() -> None:
    assert {name.partition(":")[0] for name in OLD_NAMES} <= set(PUBLIC_MODULES)
