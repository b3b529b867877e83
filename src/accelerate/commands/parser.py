"""The parsers of all commands; for the launcher: flags from the option declarations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, final

from ..errors import AccelerateError, SettingError
from ..launch.arguments import PER_DEVICE
from ..settings import file
from ..settings.option import OptionInfo, Source, nearest, spellings
from .help_text import command_help, full_help, own_options, short_help


def unknown_option(parser: argparse.ArgumentParser, text: str) -> str:
    """Return the message for an unknown option, with the name that was probably meant."""
    name = text.split("=", 1)[0]
    known = [option for option in parser._option_string_actions if len(option) > 2]
    near = nearest(name.replace("-", "_"), known)
    hint = f" Did you mean {near}?" if near else f" `{parser.prog} --help` lists the options."
    return f"there is no option {name}.{hint}"


def complain_and_exit(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Print the message in one line and exit with code 2."""
    marker = "unrecognized arguments: "
    if message.startswith(marker):
        message = unknown_option(parser, message.removeprefix(marker).split()[0])
    elif message.startswith("argument ") and ": `" in message:  # this package's own messages name the option themselves
        message = message.partition(": ")[2]
    parser.exit(2, f"{parser.prog}: {message}\n")


@final
class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations, whose error messages fit in a line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def format_help(self) -> str:
        """Return the help in the style of all commands."""
        return command_help(self)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        complain_and_exit(self, message)


#: What is said of the option that names a configuration file.
WHICH_FILE: Final = "[the one that `accelerate config` writes]"


class Subparsers(Protocol):
    """The result of ``add_subparsers``, of this package or of a program that takes a command in."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        """Create the parser of one subcommand."""
        ...


def command_parser(
    name: str, description: str, subparsers: Subparsers | None = None, **options: Any
) -> argparse.ArgumentParser:
    """Create the parser of ``accelerate name``, alone or as one of ``subparsers``; ``options`` are argparse's."""
    if subparsers is not None:
        return subparsers.add_parser(name.split()[-1], description=description, allow_abbrev=False, **options)
    return Parser(prog=f"accelerate {name}", description=description, **options)


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run the parser's command and return its exit code: 2, with the reason in a few lines, where it is refused.

    A parser with a default for `script_args` gets what follows ``--`` there; one with a default for `launch_flags`, the
    options that it doesn't know.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if parser.get_default("script_args") is not None and "--" in given:
        end = given.index("--")
        parser.set_defaults(script_args=given[end + 1 :])
        given = given[:end]
    args, unknown = parser.parse_known_args(given)
    if parser.get_default("launch_flags") is not None:
        args.launch_flags = unknown
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: object = args.func(args)
    except BrokenPipeError:  # as main() does
        raise
    except (AccelerateError, OSError) as error:
        return complain(parser.prog, error)
    return code if isinstance(code, int) else 0


def complain(command: str, error: Exception) -> int:
    """Print at most five lines about the error, the first one and the last ones, and return the exit code 2."""
    first, *others = f"{command}: {str(error).strip() or type(error).__name__}".splitlines()
    print("\n".join([first, *others[-4:]]), file=sys.stderr)
    return 2


def configuration_path(given: str | Path | None, *, must_exist: bool = False) -> Path:
    """Return the given configuration file, or the one that ``accelerate config`` writes.

    Raises:
        FileNotFoundError: there is no such file, and it must exist.
    """
    path = Path(file.default_config_file() if given is None else given).expanduser()
    if must_exist and not path.is_file():
        raise FileNotFoundError(f"There is no configuration at {path}. `accelerate config` writes one.")
    return path


class CustomArgumentParser(argparse.ArgumentParser):
    """A parser whose options can be spelled with ``_`` and with ``-``, for commands of one's own."""

    def add_argument(self, *args: Any, **kwargs: Any) -> argparse.Action:
        """Add the option under all its spellings."""
        return super().add_argument(*_all_spellings(args), **kwargs)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Any:
        """Add a group whose options have all their spellings too."""
        group = super().add_argument_group(*args, **kwargs)
        add = group.add_argument

        def add_argument(*names: str, **options: Any) -> argparse.Action:
            return add(*_all_spellings(names), **options)

        setattr(group, "add_argument", add_argument)  # noqa: B010
        return group


def _all_spellings(names: Sequence[str]) -> tuple[str, ...]:
    """Return the spellings of an option, ``_`` first, under which argparse stores it."""
    short = tuple(name for name in names if not name.startswith("--"))
    long = [name[:2] + name[2:].replace("-", "_") for name in names if name.startswith("--")]
    return (*short, *spellings(*long))


@final
class LaunchParser(argparse.ArgumentParser):
    """A parser of options, then the program, then the program's own arguments, which stay exactly as given."""

    rows: Sequence[OptionInfo] = ()

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        complain_and_exit(self, message)

    def format_help(self) -> str:
        """Return the short help."""
        return short_help(self.rows) + "\n"

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the options before the program, and leave what follows it unparsed."""
        argv = list(sys.argv[1:] if args is None else args)
        given = {"training_script", "training_script_args"}
        index = self._program_index(argv, given)
        parsed, unknown = super().parse_known_args(argv[:index], namespace or argparse.Namespace())
        if unknown:
            self.error(unknown_option(self, unknown[0]))
        rest = argv[index:]
        if rest[:1] == ["--"]:
            rest = rest[1:]
        if not rest and getattr(parsed, "preflight", None):
            rest = [""]  # the check of the machines is the program
        if not rest:
            self.error("there is no script to launch. Usage: accelerate launch [options] script.py [its arguments]")
        parsed.training_script, parsed.training_script_args = rest[0], rest[1:]
        parsed.nondefault = given  # the documented name of what the command line gave, the rest being defaults
        return parsed, []

    def _program_index(self, argv: Sequence[str], given: set[str]) -> int:
        """Return the index of the first argument that is no option nor its value; ``given`` gets the options."""
        index = 0
        while index < len(argv):
            argument = argv[index]
            if argument == "--" or not argument.startswith("-") or argument == "-":
                return index
            name, has_value = argument.split("=", 1)[0], "=" in argument
            action = self._option_string_actions.get(name)
            if action is None and not argument.startswith("--"):  # -q, -t3
                action, has_value = self._option_string_actions.get(argument[:2]), len(argument) > 2
            if action is None:
                self.error(unknown_option(self, argument))
            given.add(action.dest)
            index += 1 if action.nargs in (0, "?") or has_value else 2
        return len(argv)


@final
class _Help(argparse.Action):
    """An option that prints one of the two help texts and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, show: Callable[[], str], **kwargs: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, **kwargs)
        self._show = show

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(self._show())
        parser.exit()


def reader_of(option: OptionInfo) -> Callable[[str], object]:
    """Return the ``type`` function of an option for argparse, which checks and converts the text."""

    def read(text: str) -> object:
        try:
            value = option.read(text, Source("flag", option.flag or ""))
            return text if option.parses_to_text else value
        except SettingError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _processes_per_machine(text: str) -> int | str:
    """Read torchrun's count of processes: a number, or a word for one process per device."""
    if text in PER_DEVICE or (text.isdecimal() and int(text) > 0):
        return text if text in PER_DEVICE else int(text)
    raise argparse.ArgumentTypeError(
        f"`{text}` (flag --nproc_per_node) is no number of processes. Give 1 or more, or {' or '.join(PER_DEVICE)} for "
        "one per device."
    )


def add_option(parser: argparse.ArgumentParser, option: OptionInfo) -> None:
    """Add the option to the parser under all its spellings, with the documented default of its Namespace."""
    assert option.dest is not None
    default = option.flag_default
    if option.switch:
        parser.add_argument(*option.flags, dest=option.dest, action="store_const", const=True, default=default)
        if option.off_flag is not None:
            off = spellings(option.off_flag)
            parser.add_argument(*off, dest=option.dest, action="store_const", const=False, default=default)
    elif option.repeat:
        parser.add_argument(*option.flags, dest=option.dest, action="append", default=default)
    else:
        parser.add_argument(*option.flags, dest=option.dest, type=reader_of(option), default=default)


def build_launch_parser(options: Iterable[OptionInfo], *, prog: str = "accelerate launch") -> LaunchParser:
    """Create a parser of these options and those of the command itself."""
    rows = list(options)
    parser = LaunchParser(prog=prog, add_help=False, allow_abbrev=False)
    parser.rows = rows
    add_launch_options(parser, rows)
    return parser


def add_launch_options(parser: argparse.ArgumentParser, options: Iterable[OptionInfo]) -> None:
    """Add these options and those of the command itself to any parser."""
    rows = list(options)
    parser.add_argument(
        "-h", "--help", action=_Help, dest="help", show=lambda: short_help(rows), help=argparse.SUPPRESS
    )
    parser.add_argument(*spellings("--help-all"), action=_Help, dest="help_all", show=lambda: full_help(rows))
    for name, value, _ in own_options():
        if name == "--config_file":
            parser.add_argument(*spellings(name), dest="config_file", default=None)
        elif name == "--nproc_per_node":
            parser.add_argument(*spellings(name), dest="processes_per_machine", type=_processes_per_machine)
        elif name not in ("--help-all", "--fp16"):
            takes: Any = {"nargs": "?"} if value and isinstance(parser, LaunchParser) else {"action": "store_const"}
            parser.add_argument(*spellings(name), dest=name[2:].replace("-", "_"), const=True, default=False, **takes)
    for option in rows:
        add_option(parser, option)
    parser.add_argument("--fp16", dest="fp16", action="store_const", const=True, default=None)


def count(text: str) -> int:
    """Read a whole number from 1 on, for the parser of the command line."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return number
