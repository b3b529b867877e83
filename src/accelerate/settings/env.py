"""The only module that reads and writes `os.environ` for settings.

The documented variable names are the wire format between the launcher and its workers, and other libraries
read and write them in-process; there is no second channel.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar, cast

from ..errors import SettingError
from .option import OptionGroup, OptionInfo, Source, options_of, parse_bool

Decorated = TypeVar("Decorated")

PREFIX = "ACCELERATE_"
_IS_HIDDEN: Final[ContextVar[bool]] = ContextVar("_IS_HIDDEN", default=False)
_NOTHING_SET: Final[Mapping[str, str]] = {}


# ----------------------------------------------------------------------------------------------- single variables


def read(name: str, default: str | None = None) -> str | None:
    """Return the variable's text, or `default` when it is not set."""
    return _environment().get(name, default)


def flag(name: str, default: bool = False) -> bool:
    """Return the variable as a boolean; `default` when it is unset or empty. Raises SettingError on other text."""
    text = _environment().get(name, "")
    try:
        return default if text.strip() == "" else parse_bool(text)
    except ValueError:
        raise SettingError(
            f"Environment variable {name} is {text!r}, but it is a switch. "
            "Say true or false (also yes/no, on/off, 1/0)."
        ) from None


def snapshot() -> dict[str, str]:
    """Return a copy of the environment as it is now."""
    return dict(_environment())


def _environment() -> Mapping[str, str]:
    return _NOTHING_SET if _IS_HIDDEN.get() else os.environ


@contextmanager
def hidden() -> Generator[None]:
    """Enter a context in which this module sees no variables, in this thread; the environment stays as it is."""
    token = _IS_HIDDEN.set(True)
    try:
        yield
    finally:
        _IS_HIDDEN.reset(token)


def set_variables(values: Mapping[str, object]) -> None:
    """Set the variables, for this process and for the libraries in it; None removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = _as_text(value)


def set_variables_for(owner: object, values: Mapping[str, object]) -> None:
    """Set the variables while `owner` lives, or until `restore_variables`, and restore their former values afterwards.

    A variable that other code has changed meanwhile keeps its value.
    """
    owned = {name: _as_text(value) for name, value in values.items()}
    for name, text in owned.items():
        _set_by_owners.setdefault(name, (os.environ.get(name), []))[1].append((id(owned), text))
        os.environ[name] = text
    weakref.finalize(owner, _restore, owned).atexit = False


def restore_variables() -> None:
    """Restore the former values of all variables that `set_variables_for` set."""
    for name, (before, given) in _set_by_owners.items():
        if given and os.environ.get(name) == given[-1][1]:
            set_variables({name: before})
    _set_by_owners.clear()


def _restore(owned: Mapping[str, str]) -> None:
    for name in owned:
        before, given = _set_by_owners.get(name, (None, []))
        mine = next((entry for entry in given if entry[0] == id(owned)), None)
        if mine is None:
            continue  # restored with all others
        is_unchanged = os.environ.get(name) == given[-1][1]
        given.remove(mine)
        if is_unchanged:
            set_variables({name: given[-1][1] if given else before})
        if not given:
            del _set_by_owners[name]


#: By variable: its value before the first owner set it, and the values of the owners that still live, in their order.
_set_by_owners: Final[dict[str, tuple[str | None, list[tuple[int, str]]]]] = {}


@contextmanager
def patched(**values: object) -> Generator[None]:
    """Enter a context in which the variables have these values (None: unset); restore the former ones afterwards."""
    before = {name: os.environ.get(name) for name in values}
    set_variables(values)
    try:
        yield
    finally:
        set_variables(before)


# ----------------------------------------------------------------------------------------------- groups of options


def decode(cls: type[OptionGroup], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the options that the environment gives, by field name. Raises SettingError on a bad value."""
    return {name: value for name, (value, _) in decode_with_sources(cls, environ).items()}


def decode_with_sources(cls: type[OptionGroup], environ: Mapping[str, str]) -> dict[str, tuple[Any, Source]]:
    """Decode as `decode` does, with the variable that gave each value."""
    given: dict[str, tuple[Any, Source]] = {}
    for name, option in _options_by_variable(cls).items():
        if name in environ and (found := _decode_option(option, environ)) is not None:
            given[option.name] = found
    return given


@functools.cache
def _options_by_variable(cls: type[OptionGroup]) -> Mapping[str, OptionInfo]:
    return {name: option for option in options_of(cls) for name in option.env}


def _decode_option(option: OptionInfo, environ: Mapping[str, str]) -> tuple[Any, Source] | None:
    present = [name for name in option.env if environ.get(name, "").strip()]
    if not present:
        return None
    source = Source("environment", ", ".join(present))
    text = environ[present[0]]
    if len(option.env) > 1:  # one variable per element
        text = ",".join(environ.get(name, "").strip() or "false" for name in option.env)
    value = option.read(text, source)
    return None if value is None else (value, source)


def encode(options: OptionGroup) -> dict[str, str]:
    """Return the variables of the group, which `decode` reads back. Python objects are left out."""
    variables: dict[str, str] = {}
    for option in options_of(type(options)):
        value = getattr(options, option.name, None)
        if value is None or (option.quiet and value == option.default):
            continue
        name, *others = option.env or ("",)
        if others:
            variables.update(zip(option.env, (_as_text(part) for part in cast("Iterable[object]", value)), strict=True))
        elif name:
            variables[name] = option.write(value) or ""
    return {name: text for name, text in variables.items() if text != ""}


def fill_unset(options: OptionGroup, environ: Mapping[str, str] | None = None) -> None:
    """Set every option that is None to the environment's value, or else to its default."""
    given = decode(type(options), _environment() if environ is None else environ)
    for option in options_of(type(options)):
        if option.env and getattr(options, option.name, None) is None:
            setattr(options, option.name, given.get(option.name, option.default))


# -------------------------------------------------------------------------------------------- documented functions


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 or 0 (True or False with `to_bool`) for y/yes/t/true/on/1 and n/no/f/false/off/0, in any case."""
    try:
        result = parse_bool(value)
    except ValueError:
        raise SettingError(
            f"{value!r} can't be read as a truth value. Say yes/no, true/false, on/off or 1/0."
        ) from None
    return result if to_bool else int(result)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of the variables that holds a number >= 0, or else `default`."""
    for name in env_keys:
        text = _environment().get(name, "").strip()
        if text == "":
            continue
        try:
            number = int(text)
        except ValueError:
            raise SettingError(f"Environment variable {name} is {text!r}, but it has to be a whole number.") from None
        if number >= 0:
            return number
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the variable as a boolean, or `default` when it is unset."""
    return flag(key, default)


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable's text, or `default` when it is unset."""
    return _environment().get(key, str(default))


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Format an environment file's `KEY=value\\n` lines, without what such a file can't hold (warned about)."""
    lines: list[str] = []
    for name, value in current_env.items():
        if name and value and not any(character in f"{name}{value}" for character in ";\n<> "):
            lines.append(f"{name}={value}\n")
        else:
            _warn_left_out(name, value)
    return lines


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the named libraries that this process has imported."""
    return [name for name in library_names if name in sys.modules]


@contextmanager
def patch_environment(**kwargs: object) -> Generator[None]:
    """Enter a context in which the variables (names upper-cased) have these values; restore the former ones after."""
    with patched(**{name.upper(): value for name, value in kwargs.items()}):
        yield


@contextmanager
def clear_environment() -> Generator[None]:
    """Enter a context in which the environment is empty; restore it afterwards, whatever the block did."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: Decorated) -> Decorated:
    """Restore the ACCELERATE_* variables after each call of a function (of a test class: of each test)."""
    if inspect.isclass(func_or_cls):
        return cast("Decorated", _purging_class(func_or_cls))
    return cast("Decorated", _purging(cast("Callable[..., Any]", func_or_cls)))


# --------------------------------------------------------------------------------------------------------- helpers


@contextmanager
def _purged() -> Generator[None]:
    before = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            del os.environ[name]
        os.environ.update(before)


def _purging(function: Callable[..., Any]) -> Callable[..., object]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def purged_coroutine(*args: object, **kwargs: object) -> object:
            with _purged():
                return await function(*args, **kwargs)

        return purged_coroutine
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def purged_generator(*args: object, **kwargs: object) -> Generator[object, object, object]:
            with _purged():
                steps: Generator[Any, Any, Any] = function(*args, **kwargs)
                return (yield from steps)

        return purged_generator

    return _purged()(function)


def _purge_tests(cls: type) -> None:
    for name, value in list(vars(cls).items()):
        if name.startswith("test") and callable(value):
            setattr(cls, name, _purging(value))


def _purging_class(cls: type) -> type:
    """Make every test method of the class purge, also those that subclasses add; return the class."""
    _purge_tests(cls)
    inherited = cls.__dict__.get("__init_subclass__")

    def purge_subclass(subclass: type, **kwargs: object) -> None:
        if inherited is not None:
            inherited.__func__(subclass, **kwargs)
        else:
            super(cls, subclass).__init_subclass__(**kwargs)
        _purge_tests(subclass)

    setattr(cls, "__init_subclass__", classmethod(purge_subclass))  # noqa: B010
    return cls


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _warn_left_out(name: str, value: str) -> None:
    warnings.warn(
        f"{name}={value!r} is left out of the environment file: it is empty or holds one of `; newline < > space`, "
        "which such a file can't carry. Set it on every machine by other means if the run needs it.",
        stacklevel=3,
    )
