from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.test_utils.examples import clean_lines, compare_against_test, get_function_contents_by_name

BASE = """import torch


def training_function(config, args):
    # a comment
    accelerator = Accelerator()

    model = Model()


def main():
    parser = Parser()
    training_function(config, parser)


if __name__ == "__main__":
    main()
"""


def test_the_lines_of_one_function_are_found() -> None:
    lines = BASE.splitlines(keepends=True)
    found = clean_lines(get_function_contents_by_name(lines, "training_function"))
    assert found == [
        "def training_function(config, args):\n",
        "    accelerator = Accelerator()\n",
        "    model = Model()\n",
    ]
    assert get_function_contents_by_name(lines, "main")[1] == "    parser = Parser()\n"
    with pytest.raises(ValueError, match="training_function"):
        get_function_contents_by_name(lines, "other")


def test_what_the_feature_example_lacks_is_reported_unless_shown_elsewhere(tmp_path: Path) -> None:
    base, feature, shown = tmp_path / "base.py", tmp_path / "feature.py", tmp_path / "shown.py"
    base.write_text(BASE)
    feature.write_text(BASE.replace("    accelerator = Accelerator()\n", "    accelerator = Accelerator(steps=2)\n"))
    shown.write_text(BASE)
    assert compare_against_test(str(base), str(feature), parser_only=False) == ["    accelerator = Accelerator()\n"]
    assert compare_against_test(str(base), str(feature), parser_only=True) == []
    assert compare_against_test(str(base), str(feature), False, str(shown)) == []
