"""A DeepSpeed configuration document, read and changed by dotted names. Works without DeepSpeed."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Mapping
from typing import Any, cast

from ..errors import SettingError

_OFFLOADS = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")


class HfDeepSpeedConfig:
    """The document behind a path, a mapping, JSON text or base64-encoded JSON.

    Entries are named by the path to them, as in ``zero_optimization.stage``.
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        self.config: dict[str, Any] = _document(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """The ZeRO stage and whether anything is offloaded are those that the document says now."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        self._offload = self._stage in (2, 3) and any(self.get_value(name) in ("cpu", "nvme") for name in _OFFLOADS)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """The mapping that holds the entry (None when there is none) and the entry's own name in it."""
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for name in path:
            node = node.get(name)
            if not isinstance(node, dict):
                return None, last
        return cast("dict[str, Any]", node), last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """The entry's value, or ``default`` when there is no such entry."""
        node, name = self.find_config_node(ds_key_long)
        return default if node is None else node.get(name, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """The entry is gone, with all that was below it."""
        node, name = self.find_config_node(ds_key_long)
        if node is not None and name in node:
            del node[name]
        elif must_exist:
            raise SettingError(f"Can't find {ds_key_long} entry in the DeepSpeed config: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether the entry is there and true."""
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Whether the entry is there and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_zero2(self) -> bool:
        """Whether gradients and optimizer state are sharded, and parameters are not."""
        return self._stage == 2

    def is_zero3(self) -> bool:
        """Whether parameters are sharded too."""
        return self._stage == 3

    def is_offload(self) -> bool:
        """Whether parameters or optimizer state wait in CPU memory or on NVMe."""
        return self._offload


def _document(given: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    text = os.fspath(given)
    try:
        if os.path.exists(text):
            with open(text, encoding="utf-8") as file:
                document = json.load(file)
        elif text.lstrip().startswith("{"):
            document = json.loads(text)
        else:
            document = json.loads(base64.urlsafe_b64decode(text).decode("utf-8"))
    except json.JSONDecodeError as error:
        raise SettingError(f"The DeepSpeed config {text!r} is not valid JSON: {error}.") from error
    except (UnicodeDecodeError, binascii.Error, ValueError):
        raise SettingError(
            "Expected a path to an existing DeepSpeed config, a dictionary, JSON text or base64-encoded "
            "JSON. "
            f"Received: {text}"
        ) from None
    if not isinstance(document, dict):
        raise SettingError(f"The DeepSpeed config {text!r} must be a JSON object, not a {type(document).__name__}.")
    return cast("dict[str, Any]", document)
