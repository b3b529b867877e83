"""Random values of options, for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from accelerate.settings.option import OptionGroup, OptionInfo, options_of

_WORDS = st.text(alphabet="abcXYZ019_-./ ", min_size=1, max_size=12).filter(lambda text: text.strip() == text)


def values(option: OptionInfo) -> st.SearchStrategy[Any]:
    """Values that the option can have in a finished group; None where nobody gave one and there is no default."""
    strategy: st.SearchStrategy[Any]
    low, high = option.minimum, option.maximum
    if option.kind == "bool":
        strategy = st.booleans()
    elif option.choices is not None:
        words = [int(choice) if option.kind == "int" else choice for choice in option.choices]
        words = [option.aliases.get(str(word).lower(), word) for word in words]
        strategy = st.sampled_from(words)
    elif option.kind == "int":
        strategy = st.integers(int(low or 0), int(high or 10**9))
    elif option.kind == "float":
        strategy = st.floats(low, high, allow_nan=False, allow_infinity=False)
    elif option.kind == "list":
        strategy = st.lists(st.text(alphabet="abcXYZ09_", min_size=1, max_size=8), min_size=1, max_size=3)
    elif option.kind == "switches":
        strategy = st.tuples(st.booleans(), st.booleans(), st.booleans())
    elif option.kind == "mapping":
        strategy = st.dictionaries(_WORDS, st.integers(), min_size=1, max_size=3)
    elif option.kind == "document":
        strategy = st.one_of(_WORDS, st.dictionaries(_WORDS, st.integers(), min_size=1, max_size=3))
    else:
        strategy = _WORDS
    strategy = strategy.filter(lambda value: str(value).lower() not in option.unset)
    literal = [value for word, value in option.aliases.items() if word == value]
    if literal:
        strategy = st.one_of(strategy, st.sampled_from(literal))
    return strategy


def groups(cls: type[OptionGroup], *, through: str = "env") -> st.SearchStrategy[Any]:
    """Groups whose options that travel `through` "env" or "key" have any values; the others their defaults."""
    given = {
        option.name: st.one_of(st.none(), values(option))
        for option in options_of(cls)
        if getattr(option, through) and option.kind != "object"
    }
    return st.fixed_dictionaries(given).map(lambda chosen: cls(**{k: v for k, v in chosen.items() if v is not None}))
