"""What the builder of the site calls: pages made from declarations are added, drawings are put in their places."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from drawings import DRAWINGS
from mkdocs.structure.files import File
from options import with_tables
from reference import ROOT, generated
from repository import origin, web_address

import accelerate


def on_config(config: Any) -> Any:
    """The header names the version, and links the repository that this clone came from."""
    config.site_name = f"{config.site_name} {accelerate.__version__}"
    config.repo_url = web_address(origin(ROOT))
    return config


def on_files(files: Any, config: Any) -> Any:
    """The made pages stand beside the written ones."""
    for address, content in generated():
        files.append(File.generated(config, address, content=content))
    return files


#: Records rank below the pages on a subject in the search.
RECORDS = ("decisions/", "architecture.md", "benchmarks.md", "changelog.md", "clients.md", "contributing.md", "gpu.md")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Markers for drawings and examples become what they name; an option class gets the table of its arguments."""
    if page.file.src_uri.startswith(RECORDS):
        page.meta.setdefault("search", {"boost": 0.2})
    drawn = re.sub(
        r"^<!-- drawing: ([\w-]+) -->$",
        lambda found: f'<figure markdown="0">{DRAWINGS[found[1]]()}</figure>',
        markdown,
        flags=re.MULTILINE,
    )
    return with_tables(re.sub(r"^<!-- example: (\S+) -->$", lambda found: _source(found[1]), drawn, flags=re.MULTILINE))


def _source(script: str) -> str:
    """A folded block with the source of an example."""
    lines = ["```python", *(ROOT / "examples" / script).read_text().splitlines(), "```"]
    return "\n".join([f'??? example "examples/{script}"', *(f"    {line}".rstrip() for line in lines)])


def on_page_content(html: str, **_: Any) -> str:
    """Show a default that the callee decides as ``...``, whatever it is called inside."""
    return html.replace("_NOT_GIVEN", "...")
