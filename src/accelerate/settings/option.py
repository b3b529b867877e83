"""The declaration of options: variable, file key, flag, question and help follow from one declaration.

    @dataclass
    class FsdpOptions(OptionGroup, env="FSDP_", section="fsdp_config", key="fsdp_", flag="fsdp_"):
        cpu_offload: bool = option(False, "Keep parameters in CPU memory.", stem="offload_params")

gives the environment variable `FSDP_OFFLOAD_PARAMS`, the YAML key `fsdp_config.fsdp_offload_params`, the
flags `--fsdp_offload_params` and `--fsdp-offload-params`, the help text, the parser and the writer.
`options_of(FsdpOptions)` lists them as `OptionInfo` rows.

The kind of an option's value follows from its annotation (`bool`, `int`, `float`, `str`, `list[str]`,
`dict[str, ...]`) or from `kind=`. An option that can come from the environment is None in the constructor
until somebody gives a value, so that "not given" and "given the default" differ; once the object is built it
holds its value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from enum import Enum
from functools import cache
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar, cast, final

from ..errors import SettingError

Kind = Literal["bool", "int", "float", "str", "list", "mapping", "switches", "document", "object"]
#: By falling priority.
SourceKind = Literal["argument", "flag", "file", "environment", "default"]

TRUE_WORDS: Final = ("true", "1", "yes", "on", "y", "t")
FALSE_WORDS: Final = ("false", "0", "no", "off", "n", "f")

_KIND_OF_ANNOTATION: Final[dict[str, Kind]] = {
    "bool": "bool",
    "int": "int",
    "float": "float",
    "str": "str",
    "list[str]": "list",
    "tuple[bool, bool, bool]": "switches",
}
_SPEC: Final = "accelerate.option"

_Group = TypeVar("_Group")


@dataclass(frozen=True)
class Source:
    """The origin of a value, printed in words that a user can act on."""

    kind: SourceKind
    where: str = ""

    def __str__(self) -> str:
        if self.kind == "environment":
            return f"environment variable {self.where}"
        if self.kind == "argument":
            return f"argument {self.where}".strip()
        return f"{self.kind} {self.where}".strip()


DEFAULT: Final = Source("default")


@dataclass(frozen=True)
class OptionInfo:
    """The complete declaration of one option of one group."""

    name: str
    group: str  # title of its group, as the help shows it
    kind: Kind
    default: Any
    launch_default: Any  # passed on by `accelerate launch` when no value was given
    flag_default: Any  # in the parsed command line when the flag was left out
    env: tuple[str, ...]  # () when it has no variable; one name, or one per element
    section: str | None  # the file's sub-dictionary; None: top level
    key: str | None  # None: not in the file
    key_aliases: tuple[str, ...]
    flag: str | None  # "--fsdp_offload_params"; None: not a launch flag
    flag_aliases: tuple[str, ...]
    off_flag: str | None  # the flag that says false
    choices: tuple[str, ...] | None
    aliases: Mapping[str, Any]  # other accepted spellings -> value
    unset: tuple[str, ...]  # words that mean "not given"
    minimum: float | None
    maximum: float | None
    help: str
    question: str | None
    switch: bool  # the flag stands alone: `--cpu`, not `--cpu true`
    repeat: bool  # the flag may be given several times
    secret: bool  # never shown, never saved
    quiet: bool  # not exported while it has its default
    guest: str  # the folder of guests that does what it asks for; "": the core

    @property
    def flags(self) -> tuple[str, ...]:
        """All spellings of the flag: with `_`, with `-`, and the short ones."""
        return spellings(*filter(None, (self.flag, *self.flag_aliases)))

    @property
    def dest(self) -> str | None:
        """The name under which argparse stores the flag."""
        if self.flag is None:
            return None
        return self.name if self.off_flag else self.flag.lstrip("-").replace("-", "_")

    @property
    def parses_to_text(self) -> bool:
        """Whether the parsed command line holds the flag's text, as is documented for all but numbers and switches."""
        is_text = self.kind in ("str", "list", "document") or (self.kind == "bool" and self.flag_default is None)
        return not self.switch and (is_text or isinstance(self.flag_default, str))

    @property
    def launched(self) -> Any:
        """The value in a launched run when nobody gave one."""
        return self.default if self.launch_default is ... else self.launch_default

    def legal(self) -> str:
        """Describe the legal values for error messages and help."""
        if self.choices is not None:
            return ", ".join(self.choices)
        _, words = _KINDS[self.kind]
        if self.minimum is not None:
            words += f", at least {self.minimum:g}"
        if self.maximum is not None:
            words += f", at most {self.maximum:g}"
        own = [word for word, value in self.aliases.items() if value == word]
        unset = [f"{word} for the default" for word, value in self.aliases.items() if value is None]
        return " or ".join([words, *own, *unset])

    def read(self, raw: object, source: Source = DEFAULT) -> Any:
        """Convert `raw` (text, or a Python or YAML value) to the option's value; None for "not given".

        Raises SettingError, naming the value, its source and what is legal.
        """
        if raw is None:
            return None
        raw = plain(raw)
        if isinstance(raw, str):
            raw = raw.strip() if self.choices is not None or self.kind not in ("str", "document") else raw
            if raw == "" or raw.lower() in self.unset:
                return None
            if raw.lower() in self.aliases:
                return self.aliases[raw.lower()]
        elif str(raw).lower() in self.aliases:
            return self.aliases[str(raw).lower()]
        try:
            value = _KINDS[self.kind][0](raw)
        except (ValueError, TypeError, OverflowError):
            raise self.error_of(raw, source) from None
        if self.choices is not None:
            value = self._choice(raw, value, source)
        self._check_range(raw, value, source)
        return value

    def _check_range(self, raw: object, value: object, source: Source) -> None:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return
        too_small = self.minimum is not None and value < self.minimum
        too_large = self.maximum is not None and value > self.maximum
        if too_small or too_large:
            raise self.error_of(raw, source)

    def _choice(self, raw: object, value: object, source: Source) -> int | str:
        """Return the choice that is meant, in its canonical spelling."""
        assert self.choices is not None
        # YAML 1.1 reads a bare `no` as false.
        text = ("yes" if raw else "no") if isinstance(raw, bool) else str(value).lower()
        for choice in self.choices:
            if choice.lower() == text:
                return int(choice) if self.kind == "int" else choice
        raise self.error_of(raw, source)

    def error_of(self, raw: object, source: Source) -> SettingError:
        """Return the error with the given value, its source, and the legal values."""
        shown = "***" if self.secret else repr(raw)
        message = f"`{self.spelling(source)}` cannot be {shown} ({source}). Give {self.legal()}."
        if self.choices is not None:
            near = nearest(str(raw), self.choices)
            if near is not None:
                message += f" Did you mean {near!r}?"
        return SettingError(message)

    def spelling(self, source: Source) -> str:
        """Return the option's name as the source that gave it spells it."""
        if source.kind in ("environment", "flag") and source.where:
            return source.where
        if source.kind == "argument" and source.where:
            return source.where if "plugin" not in source.where else f"{source.where}.{self.name}"
        if source.kind == "file" and self.key:
            return f"{self.section}.{self.key}" if self.section else self.key
        return self.name

    def spell(self, value: str, source: Source) -> str:
        """Return the option with its value, as the source that gave it spells them."""
        name = self.spelling(source)
        if source.kind == "flag":
            return name if self.switch or not name.startswith("--") else f"{name} {value}"
        return f"{name}={value}" if source.kind in ("environment", "argument") else f"{name}: {value}"

    def write(self, value: object) -> str | None:
        """Return the text that `read` converts back to `value`; None for a Python object without one."""
        if value is None:
            return None
        value = plain(value)
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, (int, str)):
            return str(value)
        if isinstance(value, float):
            return repr(value)
        if self.kind in ("list", "switches") and isinstance(value, (list, tuple)):
            return ",".join(
                str(item).lower() if isinstance(item, bool) else str(item) for item in cast("Iterable[Any]", value)
            )
        if self.kind in ("mapping", "document") and isinstance(value, dict):
            return json.dumps(value)
        return None


@dataclass(frozen=True)
class GroupInfo:
    """The title and prefixes that the options of one class share."""

    title: str = ""
    env: str | None = None
    section: str | None = None
    key: str | None = None
    flag: str | None = None
    parses_defaults: bool = False  # the parsed command line holds the defaults of flags that were left out


def option(
    default: object = None,
    help: str = "",
    *,
    factory: Callable[[], object] | None = None,
    kind: Kind | None = None,
    stem: str | None = None,
    env: str | tuple[str, ...] | EllipsisType | None = ...,
    section: str | EllipsisType | None = ...,
    key: str | EllipsisType | None = ...,
    key_aliases: tuple[str, ...] = (),
    flag: str | EllipsisType | None = ...,
    flag_aliases: tuple[str, ...] = (),
    off_flag: str | None = None,
    choices: Iterable[object] | None = None,
    aliases: Mapping[str, object] | None = None,
    unset: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    launch_default: object = ...,
    flag_default: object = ...,
    question: str | None = None,
    switch: bool = False,
    repeat: bool = False,
    secret: bool = False,
    quiet: bool = False,
    guest: str = "",
) -> Any:
    """Declare a dataclass field with its environment name, file key, flag, question and help.

    Names that are left out are derived from the field's name (or `stem`) and the prefixes of its group; None means that
    there is none. `flag`, `key` and `env` given here are whole names, without the group's prefix.
    """
    declared = locals()  # all arguments, by name
    return field(default=None, metadata={_SPEC: declared})


if TYPE_CHECKING:
    from dataclasses import dataclass as option_group
else:

    def option_group(cls: type[_Group]) -> type[_Group]:
        """Make ``cls`` a dataclass with the methods of :class:`OptionGroup`.

        Those that ``dataclass`` would compile for each group take half of the time in which all groups are imported.
        """
        return dataclass(init=False, repr=False, eq=False)(cls)


@option_group
class OptionGroup:
    """A dataclass of options; the class keywords are what they share (`GroupInfo`)."""

    option_group: ClassVar[GroupInfo] = GroupInfo()
    own_options: ClassVar[dict[str, OptionInfo]] = {}

    def __init_subclass__(
        cls,
        *,
        title: str | None = None,
        env: str | None = None,
        section: str | None = None,
        key: str | None = None,
        flag: str | None = None,
        parses_defaults: bool = False,
        **other: object,
    ) -> None:
        super().__init_subclass__(**other)
        if title is not None:
            cls.option_group = GroupInfo(title, env, section, key, flag, parses_defaults)
        cls.own_options = {}
        # the dataclass decorator runs after this: the fields' defaults can still be decided here
        for name, value in list(vars(cls).items()):
            if isinstance(value, Field):
                declared = cast("Field[Any]", value)
                if _SPEC in declared.metadata:
                    annotation = str(cls.__annotations__[name])
                    info = _resolve(name, annotation, declared.metadata[_SPEC], cls.option_group)
                    cls.own_options[name] = info
                    if not info.env:
                        factory = declared.metadata[_SPEC]["factory"]
                        declared.default = MISSING if factory else info.default
                        declared.default_factory = factory or MISSING

    def __init__(self, *values: Any, **named: Any) -> None:
        names = [one.name for one in fields(self)]
        given = dict(zip(names, values, strict=False))
        if len(values) > len(names) or given.keys() & named.keys() or named.keys() - set(names):
            raise TypeError(f"{type(self).__qualname__} has the options {names}, and got {values} and {named}")
        given |= named
        for one in fields(self):
            if one.name not in given:
                given[one.name] = one.default if one.default_factory is MISSING else one.default_factory()
            setattr(self, one.name, given[one.name])
        self.__post_init__()

    def __repr__(self) -> str:
        shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        names = [one.name for one in fields(self) if one.compare]
        return [getattr(self, name) for name in names] == [getattr(other, name) for name in names]

    def __post_init__(self) -> None:
        """Set every option that nobody gave to its default."""
        for info in options_of(type(self)):
            if info.env and getattr(self, info.name, None) is None:
                setattr(self, info.name, info.default)


@final
@dataclass(frozen=True, slots=True)
class Group:
    """The row that describes one group of options, of the core or of a guest.

    The tables about groups are derived from these rows.

    Args:
        name: the attribute of Settings.
        options: the class that declares the options.
        condition: the option that turns the group on; empty if the group is always there.
        arguments: the Accelerator's arguments that are the whole group.
        keyword: the option of a guest that is a keyword argument of the Accelerator; empty if none is.
        plugin: the class that users construct for them.
        paradigm: the distributed type that the group stands for.
        exported: whether the ranks get its variables; only the launcher needs the others.
        decided: whether every launch decides its values.
        host_file: the option that names a file with the hosts of a launch.
        keys_of_file: the option of another group that lists the keys of this group in a file. Other keys of its section
            are kept, because another program reads them.
        check: raises SettingError if the settings contradict each other; called if the group is in use.
        missing: returns which package the group needs and how to install it; empty if it is installed.
        engine: ``module:function`` for an engine that trains instead of torch. It is called with the settings, the
            Accelerator's arguments and the state of the first Accelerator. It returns the plugin, or several by name,
            and the one in use, in the run's precision.
        questions: ``module:function`` that asks, for ``accelerate config``, whether the engine is used, and for its
            options. It is called with the questionnaire and the type of machine; it returns whether it is used.
    """

    name: str
    options: type[OptionGroup]
    condition: str = ""
    arguments: tuple[str, ...] = ()
    plugin: str = ""
    paradigm: str = ""
    exported: bool = True
    decided: bool = False
    host_file: str = ""
    keys_of_file: str = ""
    check: Callable[[Any], None] | None = None
    missing: Callable[[], str] | None = None
    engine: str = ""
    questions: str = ""
    keyword: str = ""


@cache
def options_of(cls: type[OptionGroup]) -> tuple[OptionInfo, ...]:
    """Return the options of a group, inherited ones first, in the order of declaration."""
    found: dict[str, OptionInfo] = {}
    for ancestor in reversed(cls.__mro__):
        found.update(cast("dict[str, OptionInfo]", vars(ancestor).get("own_options", {})))
    return tuple(found.values())


def option_of(cls: type[OptionGroup], name: str) -> OptionInfo:
    """Return the option called `name`; raise KeyError when the group has none."""
    for info in options_of(cls):
        if info.name == name:
            return info
    raise KeyError(name)


def spellings(*names: str) -> tuple[str, ...]:
    """Return each name with ``_`` and with ``-``."""
    each = ((name, name[:2] + name[2:].replace("_", "-"), name[:2] + name[2:].replace("-", "_")) for name in names)
    return tuple(dict.fromkeys(spelling for three in each for spelling in three))


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the candidate that somebody who typed `word` most likely meant; None when none is similar."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    if not found and len(word) > 2:
        found = [candidate for candidate in by_lower if candidate.startswith(word.lower())]
    return by_lower[found[0]] if found else None


def parse_bool(text: object) -> bool:
    """Return the boolean that `text` spells; raise ValueError when it spells none."""
    if isinstance(text, bool):
        return text
    word = str(text).strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(f"{text!r} is not a boolean: say one of {', '.join(TRUE_WORDS + FALSE_WORDS)}")


def plain(value: object) -> object:
    """Return the value; for a member of an enum its text: the value, or the name if the value is no text."""
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name
    return value


def _resolve(name: str, annotation: str, spec: Mapping[str, Any], group: GroupInfo) -> OptionInfo:
    """Complete a field's declaration by that of its group."""
    stem = spec["stem"] or name
    kind = spec["kind"] or _kind(annotation)
    outside = kind != "object"
    env, key, flag, section = spec["env"], spec["key"], spec["flag"], spec["section"]
    if env is ...:
        env = group.env + stem.upper() if group.env is not None and outside else None
    if key is ...:
        key = group.key + stem if group.key is not None and outside else None
    if flag is ...:
        flag = f"--{group.flag}{stem}" if group.flag is not None and outside else None
    default = spec["factory"]() if spec["factory"] else spec["default"]
    choices, flag_default = spec["choices"], spec["flag_default"]
    if flag_default is ...:
        flag_default = False if spec["switch"] else default if group.parses_defaults else None
    resolved: dict[str, Any] = {
        "name": name,
        "group": group.title,
        "kind": kind,
        "default": default,
        "env": () if env is None else (env,) if isinstance(env, str) else env,
        "section": group.section if section is ... else section,
        "key": key,
        "flag": flag,
        "flag_default": flag_default,
        "aliases": dict(spec["aliases"] or {}),
        "choices": None if choices is None else tuple(str(plain(choice)) for choice in choices),
    }
    declared = {each: value for each, value in spec.items() if each not in ("factory", "stem")}
    return OptionInfo(**(declared | resolved))


def _kind(annotation: str) -> Kind:
    bare = annotation.removesuffix(" | None")
    if bare.startswith("dict["):
        return "mapping"
    if bare.startswith("Literal["):
        return "str" if bare[len("Literal[")] in "\"'" else "int"
    return _KIND_OF_ANNOTATION.get(bare, "object")


def _read_int(raw: object) -> int:
    if isinstance(raw, bool):
        raise ValueError
    if isinstance(raw, int):
        return raw
    try:
        return int(str(raw).replace("_", ""))
    except ValueError:
        number = float(str(raw))  # 1e8 is a whole number too
        if number != int(number):
            raise
        return int(number)


def _read_float(raw: object) -> float:
    if isinstance(raw, bool):
        raise ValueError
    number = float(str(raw))
    if number != number:
        raise ValueError
    return number


def _read_text(raw: object) -> str:
    if isinstance(raw, (str, bool)):
        return raw if isinstance(raw, str) else str(raw).lower()
    if isinstance(raw, (int, float)):
        return str(raw)
    raise TypeError


def _read_list(raw: object) -> list[str]:
    if isinstance(raw, str):
        return [part.strip() for part in raw.split(",") if part.strip()]
    if isinstance(raw, (list, tuple, set, frozenset)):
        return [str(item) for item in cast("Iterable[object]", raw)]
    raise TypeError


def _read_mapping(raw: object) -> dict[str, Any]:
    value = json.loads(raw) if isinstance(raw, str) else raw
    if not isinstance(value, Mapping):
        raise TypeError
    return {str(key): item for key, item in cast("Mapping[object, Any]", value).items()}


def _read_switches(raw: object) -> tuple[bool, ...]:
    parts: Sequence[object] = raw.split(",") if isinstance(raw, str) else cast("Sequence[object]", raw)
    if not isinstance(parts, (list, tuple)) or len(parts) != 3:
        raise ValueError
    return tuple(parse_bool(part) for part in parts)


def _read_document(raw: object) -> object:
    if isinstance(raw, str) and raw.lstrip().startswith("{"):
        return json.loads(raw)
    return raw


#: By kind: the function that reads such a value, and what is legal.
_KINDS: Final[dict[Kind, tuple[Callable[[object], Any], str]]] = {
    "bool": (parse_bool, "true or false (also yes/no, on/off, 1/0)"),
    "int": (_read_int, "a whole number"),
    "float": (_read_float, "a number"),
    "str": (_read_text, "text"),
    "list": (_read_list, "a comma-separated list"),
    "mapping": (_read_mapping, "a mapping"),
    "switches": (_read_switches, "three comma-separated booleans, such as false,false,false"),
    "document": (_read_document, "a path, or the document itself"),
    "object": (lambda raw: raw, "a Python object"),
}
