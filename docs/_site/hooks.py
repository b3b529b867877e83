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
from reference import generated


def on_files(files: Any, config: Any) -> Any:
    """The made pages stand beside the written ones."""
    for address, content in generated():
        files.append(File.generated(config, address, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """``<!-- drawing: name -->`` is the drawing; an option class gets the table of its arguments."""
    drawn = re.sub(
        r"^<!-- drawing: ([\w-]+) -->$",
        lambda found: f'<figure markdown="0">{DRAWINGS[found[1]]()}</figure>',
        markdown,
        flags=re.MULTILINE,
    )
    return with_tables(drawn)


def on_page_content(html: str, **_: Any) -> str:
    """Show a default that the callee decides as ``...``, whatever it is called inside."""
    return html.replace("_NOT_GIVEN", "...")
