"""What the builder of the site calls: pages made from declarations are added, drawings are put in their places."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from drawings import DRAWINGS
from mkdocs.structure.files import File
from reference import generated


def on_files(files: Any, config: Any) -> Any:
    """The made pages stand beside the written ones."""
    for address, content in generated():
        files.append(File.generated(config, address, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """``<!-- drawing: name -->`` is the drawing."""
    return re.sub(
        r"^<!-- drawing: ([\w-]+) -->$",
        lambda found: f'<figure markdown="0">{DRAWINGS[found[1]]()}</figure>',
        markdown,
        flags=re.MULTILINE,
    )
