"""Parts of a save and a load in one call each, for tests of the checkpoint store and of files of weights."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.checkpointing.manifest import Manifest
from accelerate.checkpointing.store import CheckpointStore, StagingDirectory
from accelerate.checkpointing.weights import LoadTarget, loader_of, open_weights


@contextmanager
def transaction(store: CheckpointStore, description: Manifest | None = None) -> Generator[StagingDirectory]:
    """Enter a context with a staging directory, and commit it if the block succeeds on every rank."""
    staging = store.begin(description)
    with store.committing(staging):
        yield staging


def load_weights(model: LoadTarget, folder: Path, *, map_location: str = "cpu", **options: Any) -> None:
    """Load the weights in ``folder`` into ``model``, as ``load_state`` does."""
    with open_weights(folder, map_location=map_location) as weights:
        loader_of(model, weights.state_dict(), f"{', '.join(weights.files)} in {folder}", **options)()
