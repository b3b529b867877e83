"""What the site is made of: its navigation, its reference pages and its drawings."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import accelerate
from accelerate.commands.main import commands
from accelerate.settings.document import options_with_groups
from accelerate.settings.tree import ROWS
from accelerate.utils import AutocastKwargs, FullyShardedDataParallelPlugin, MegatronLMPlugin, PreemptionPolicy
from tests.contract.public_modules import PUBLIC_MODULES, public_module, public_names
from tests.docs.pages import DOCUMENTS, ROOT

MADE = {
    "changelog.md",
    "contributing.md",
    "reference/commands.md",
    "reference/public_names.md",
    "reference/settings.md",
}

#: Modules that examples import; they aren't examples.
HELPERS = {"curves.py", "offline_data.py", "watch_option.py"}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of docs/_site by its name."""
    monkeypatch.syspath_prepend(str(DOCUMENTS / "_site"))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in {"drawings", "options", "reference", "repository"} & (set(sys.modules) - before):
        del sys.modules[name]


def navigation() -> list[str]:
    class Loader(yaml.SafeLoader):
        """Knows no tags but those of YAML; the builder's own are left as text."""

    entries: list[Any] = [yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]]
    found: list[str] = []
    while entries:
        entry = entries.pop()
        if isinstance(entry, str):
            found.append(entry)
        else:
            entries += list(entry.values()) if isinstance(entry, dict) else entry
    return found


def test_every_page_can_be_reached_and_every_entry_is_a_page() -> None:
    pages = {str(page.relative_to(DOCUMENTS)) for page in DOCUMENTS.rglob("*.md")} | MADE
    assert sorted(navigation()) == sorted(pages)


def test_the_site_works_without_a_network_and_without_a_server() -> None:
    """The plugin `offline` would have pages fetch a worker for file:// from elsewhere, unless one is named."""
    configuration = (ROOT / "mkdocs.yml").read_text()
    assert "\n  - offline" in configuration and "font: false" in configuration
    (script,) = re.findall(r"polyfills: \[(.*iframe-worker.*)\]", configuration)
    assert "window.Worker = class" in (DOCUMENTS / script).read_text()


def test_a_page_that_is_no_reference_has_at_most_1500_words() -> None:
    """Records, measurements and lists of what was tested are looked things up in, and not read from top to bottom."""
    looked_up = {"architecture.md", "benchmarks.md", "clients.md", "gpu.md"}
    long = {}
    for page in DOCUMENTS.rglob("*.md"):
        address = page.relative_to(DOCUMENTS)
        if address.parts[0] not in ("reference", "decisions") and str(address) not in looked_up:
            num_words = len(page.read_text().split())
            long |= {str(address): num_words} if num_words > 1500 else {}
    assert not long


def test_the_options_of_a_page_are_not_shown_as_text() -> None:
    for page in DOCUMENTS.rglob("*.md"):
        _, *options = page.read_text().split("---\n", 2)
        if page.read_text().startswith("---"):
            assert isinstance(yaml.safe_load(options[0]), dict) and len(options) == 2, page


def test_each_example_is_in_the_gallery(site: Any) -> None:
    shown = re.findall(r"^<!-- example: (\S+) -->$", (DOCUMENTS / "examples.md").read_text(), re.MULTILINE)
    scripts = {str(path.relative_to(ROOT / "examples")) for path in (ROOT / "examples").rglob("*.py")}
    assert sorted(shown) == sorted(scripts - HELPERS)


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://user:secret@github.com/someone/accelerate.git", "https://github.com/someone/accelerate"),
        ("git@github.com:someone/accelerate.git", "https://github.com/someone/accelerate"),
        ("ssh://git@example.org:2222/group/accelerate", "https://example.org/group/accelerate"),
        ("/srv/git/accelerate", None),
        ("file:///srv/git/accelerate", None),
        ("", None),
    ],
)
def test_the_header_links_the_repository_that_a_clone_came_from(site: Any, remote: str, address: str | None) -> None:
    assert site("repository").web_address(remote) == address


def test_each_example_begins_with_a_sentence_and_its_commands() -> None:
    wrong = []
    for path in (ROOT / "examples").rglob("*.py"):
        if path.name in HELPERS:
            continue
        sentence, _, rest = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")
        if "\n" in sentence or not sentence.endswith(".") or f"{path.relative_to(ROOT)}" not in rest:
            wrong.append(f"{path.relative_to(ROOT)}: {sentence}")
    assert not wrong


def test_the_page_of_the_accelerator_has_each_keyword_of_a_guest() -> None:
    page = (DOCUMENTS / "reference" / "accelerator.md").read_text()
    keywords = [row.keyword for row in ROWS if row.keyword]
    assert keywords
    assert [name for name in keywords if f"\n- `{name}` (" not in page] == []


def test_documents_of_the_root_link_pages_of_the_site(site: Any) -> None:
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", site("reference").document_page(name)):
            assert "://" in target or (DOCUMENTS / target).is_file() or target in MADE, f"{name}: {target}"


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in DOCUMENTS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" in target:
                continue
            address = (page.parent / target).resolve()
            made = address.is_relative_to(DOCUMENTS) and str(address.relative_to(DOCUMENTS)) in MADE
            if not made and not address.is_file():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def documented() -> set[str]:
    """Every dotted name that a reference page shows, members that it lists included."""
    names: set[str] = set()
    for page in (DOCUMENTS / "reference").glob("*.md"):
        for block in re.split(r"^(?=::: )", page.read_text(), flags=re.MULTILINE)[1:]:
            home = block.split()[1]
            members = re.search(r"members:\s*(\[[^\]]*\]|(?:\n\s+- \w+)+)", block)
            names |= {f"{home}.{name}" for name in re.findall(r"\w+", members[1])} if members else {home}
    return names


def _named(name: str) -> object:
    home, _, member = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(home), member)


def test_no_line_that_begins_with_the_number_of_an_issue_becomes_a_heading() -> None:
    headings = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in DOCUMENTS.rglob("*.md")
        for line in re.findall(r"^\s*(?:[-*] |\d+\. )?#\d.*", page.read_text(), re.MULTILINE)
    ]
    assert not headings


def test_every_name_of_the_front_door_is_documented() -> None:
    shown = [_named(name) for name in documented()]
    assert len(shown) > 50
    inside = {id(member) for module in shown if isinstance(module, ModuleType) for member in vars(module).values()}
    known = {id(value) for value in shown} | inside
    missing = [name for name in accelerate.__all__ if id(getattr(accelerate, name)) not in known]
    assert not missing


def test_the_page_of_settings_has_every_flag_key_and_variable(site: Any) -> None:
    page = site("reference").settings_page()
    missing = [
        name
        for _, option in options_with_groups()
        for name in (option.flag, *option.env, option.key)
        if name and name not in page
    ]
    assert not missing


def test_the_page_of_commands_has_every_command(site: Any) -> None:
    page = site("reference").commands_page()
    for name in commands():
        assert re.search(rf"^## accelerate {name}\n.*?```text\nusage:", page, re.MULTILINE | re.DOTALL | re.IGNORECASE)


def test_the_page_of_public_names_has_each_of_them_and_no_other_module(site: Any) -> None:
    page = site("reference").public_names_page()
    parts = dict(re.findall(r"^## (accelerate[\w.]*)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(parts) == PUBLIC_MODULES
    for address, part in parts.items():
        assert re.findall(r"^\| `(\w+)` \| \S", part, re.MULTILINE) == public_names(public_module(address)), address


def test_reference_pages_name_public_addresses() -> None:
    internal = []
    for name in sorted(documented()):
        home, _, member = name.rpartition(".")
        if name not in PUBLIC_MODULES and not (home in PUBLIC_MODULES and member in public_names(public_module(home))):
            internal.append(name)
    assert not internal


def test_pages_import_from_public_modules() -> None:
    internal = []
    for page in [ROOT / "README.md", *DOCUMENTS.rglob("*.md")]:
        for home in re.findall(r"^\s*(?:from|import) (accelerate(?:\.\w+)*)", page.read_text(), re.MULTILINE):
            if home not in PUBLIC_MODULES:
                internal.append(f"{page.relative_to(ROOT)}: {home}")
    assert not internal


def test_drawings_are_well_formed_and_each_is_used(site: Any) -> None:
    pages = "\n".join(page.read_text() for page in DOCUMENTS.rglob("*.md"))
    used = set(re.findall(r"^<!-- drawing: ([\w-]+) -->$", pages, re.MULTILINE))
    drawings = site("drawings").DRAWINGS
    assert used == set(drawings)
    for draw in drawings.values():
        root = ElementTree.fromstring(draw())
        assert root.attrib["aria-label"]
        assert len(list(root.iter())) > 10


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, [[[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]], [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 0, 1]]]),
        ({"drop": True}, [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]]),
    ],
)
def test_the_drawing_of_shares_shows_what_loaders_do(
    site: Any, policy: dict[str, bool], expected: list[list[list[int]]]
) -> None:
    drawings = site("drawings")
    assert drawings.shares(22, 4, 2, **policy) == expected
    cells = [
        cell.text for cell in ElementTree.fromstring(drawings.who_gets_what(22, 4, 2, **policy)).iter() if cell.text
    ]
    numbers = [int(cell) for cell in cells if cell.isdigit()]
    assert sorted(numbers) == sorted(sample for rank in expected for batch in rank for sample in batch)


def test_an_option_class_is_shown_as_a_table_of_its_arguments(site: Any) -> None:
    options = site("options")
    page = options.with_tables((DOCUMENTS / "reference" / "options.md").read_text())
    for cls in (FullyShardedDataParallelPlugin, MegatronLMPlugin, AutocastKwargs, PreemptionPolicy):
        section = page.partition(f"::: accelerate.utils.{cls.__name__}\n")[2]
        rows = re.findall(r"^\| `(\w+)`<br>", section.partition(":::")[0], re.MULTILINE)
        assert rows == [field.name for field in dataclasses.fields(cls)]
    assert "| `fsdp_version`<br>`Literal[1, 2]`<br>by default `1` | The version of FSDP: 2 is the current one." in page
    assert "flag `--fsdp_version`<br>key `fsdp_config.fsdp_version`<br>variable `FSDP_VERSION` |" in page
    assert "::: accelerate.utils.FullyShardedDataParallelPlugin.set_auto_wrap_policy\n" in page


def test_a_name_that_is_no_option_class_is_left_to_the_docstrings(site: Any) -> None:
    for line in ("::: accelerate.Accelerator\n", "::: accelerate.hooks\n    options:\n      members: [ModelHook]\n"):
        assert site("options").with_tables(line).rstrip() == line.rstrip()
