"""Options of torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.settings.labels import DynamoBackend
from accelerate.settings.option import OptionGroup, option

TORCH_DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass
class DynamoOptions(
    OptionGroup,
    title="Compile",
    env="ACCELERATE_DYNAMO_",
    section="dynamo_config",
    key="dynamo_",
    flag="dynamo_",
):
    """Whether and how prepared models are compiled."""

    backend: str = option(
        "NO",
        "The compiler behind torch.compile; no leaves models as they are.",
        choices=DynamoBackend,
        question="Which dynamo backend would you like to use?",
    )
    mode: str = option(
        "default",
        "What the compiler optimizes for.",
        choices=TORCH_DYNAMO_MODES,
        question="Which mode do you want to use?",
        flag_default="default",
    )
    fullgraph: bool = option(
        False,
        "Fail instead of breaking the graph.",
        stem="use_fullgraph",
        switch=True,
        question="Do you want the fullgraph mode, or is it ok to break the model into several subgraphs?",
    )
    dynamic: bool | None = option(
        None,
        "Compile for dynamic shapes; not given: the compiler decides.",
        stem="use_dynamic",
        switch=True,
        question="Do you want to enable dynamic shape tracing?",
    )
    options: Any = option(None, "More options of the backend.", kind="object")
    disable: bool = option(False, "Make torch.compile a no-op.", env=None, key=None, flag=None)
    use_regional_compilation: bool = option(
        False,
        "Compile each repeated block instead of the whole model: much faster to compile.",
        switch=True,
        question="Do you want to enable regional compilation?",
    )
