"""Questions to a user: menus with arrow keys in a terminal, lines of text everywhere else, the same answers in both.

A choice is given by its number, its label, its value or text that only it contains. Every question shows its default
and, where there is one, an explanation. After an invalid answer the reason is printed and the question asked again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TextIO, TypeVar, final

from ...errors import SettingError
from ...settings import env

Value = TypeVar("Value")

_UP: Final = ("\x1b[A", "\x1bOA")
_DOWN: Final = ("\x1b[B", "\x1bOB")
_HOME: Final = "\x1b[H"
_END: Final = "\x1b[F"
_ERASE_BELOW: Final = "\x1b[J"
_DIM: Final = "\x1b[2m"
_BOLD: Final = "\x1b[1m"
_PLAIN: Final = "\x1b[0m"


@final
@dataclass(frozen=True)
class Choice(Generic[Value]):
    """One entry of a menu: the value it stands for and how it is shown."""

    value: Value
    label: str


class InputEnded(SettingError):
    """The answers on the standard input ended before the questions did."""


def match(text: str, choices: Sequence[Choice[Value]]) -> Value | None:
    """Return the value of the choice that ``text`` names, or None when it names none or several."""
    typed = text.strip().lower()
    if typed.isdigit() and int(typed) < len(choices) and typed not in {str(choice.value) for choice in choices}:
        return choices[int(typed)].value
    exact = [choice.value for choice in choices if typed in (choice.label.lower(), str(choice.value).lower())]
    if len(exact) == 1:
        return exact[0]
    found = [
        choice.value
        for choice in choices
        if len(typed) > 1 and (typed in choice.label.lower() or typed in str(choice.value).lower())
    ]
    return found[0] if len(found) == 1 else None


@final
class Asker:
    """A dialogue that asks on ``output`` and reads the answers from ``input``."""

    def __init__(self, input: TextIO | None = None, output: TextIO | None = None) -> None:
        self._input = input if input is not None else sys.stdin
        self._output = output if output is not None else sys.stdout
        self.num_asked: int = 0
        self._menus = (
            self._input.isatty() and self._output.isatty() and env.read("TERM", "dumb") != "dumb" and _has_termios()
        )

    # kinds of questions

    def choose(
        self, question: str, choices: Sequence[Choice[Value]], default: Value, *, why: str = "", brief: bool = False
    ) -> Value:
        """Ask for one of the choices and return its value; ``brief`` shows the values instead of numbered labels."""
        self._why(why)
        marked = next((index for index, choice in enumerate(choices) if choice.value == default), 0)
        if self._menus:
            self.num_asked += 1
            return self._menu(question, choices, marked)
        if brief:
            shown = "/".join(choice.label.upper() if i == marked else choice.label for i, choice in enumerate(choices))
            prompt = f"{question} [{shown}]: "
        else:
            shown = ", ".join(f"[{index}] {choice.label}" for index, choice in enumerate(choices))
            prompt = f"{question} ({shown}) [{marked}]: "
        legal = ", ".join(f"{index} ({choice.label})" for index, choice in enumerate(choices))

        def read(text: str) -> Value:
            value = match(text, choices)
            if value is None:
                raise ValueError(f"{text!r} is none of them. Answer with a number or a name: {legal}.")
            return value

        return self._line(prompt, read, default)

    def yes(self, question: str, default: bool = False, *, why: str = "") -> bool:
        """Ask a yes/no question and return the answer."""
        self._why(why)

        def read(text: str) -> bool:
            answer = text.lower()
            if answer in ("yes", "y", "true", "1"):
                return True
            if answer in ("no", "n", "false", "0"):
                return False
            raise ValueError(f"{text!r} is neither: answer yes or no.")

        return self._line(f"{question} [{'YES/no' if default else 'yes/NO'}]: ", read, default)

    def ask(
        self, question: str, read: Callable[[str], Value], default: Value, *, shown: str | None = None, why: str = ""
    ) -> Value:
        """Ask and return the answer as converted by ``read``, which raises ValueError with a reason where it can't."""
        self._why(why)
        text = shown if shown is not None else ("" if default is None else str(default))
        return self._line(f"{question} [{text}]: " if text else f"{question}: ", read, default)

    def whole_number(self, question: str, default: int, *, at_least: int = 0, why: str = "") -> int:
        """Ask for a whole number of at least ``at_least``."""

        def read(text: str) -> int:
            try:
                number = int(text)
            except ValueError:
                number = at_least - 1
            if number < at_least:
                raise ValueError(f"{text!r} won't do: give a whole number of at least {at_least}.")
            return number

        return self.ask(question, read, default, why=why)

    def text(self, question: str, default: str = "", *, required: bool = False, why: str = "") -> str:
        """Ask for a text and return it as typed."""

        def read(text: str) -> str:
            return text

        while True:
            answer = self.ask(question, read, default, why=why)
            if answer or not required:
                return answer
            self.write_line("An answer is needed here.")

    def write_line(self, text: str) -> None:
        """Print a line."""
        self._output.write(f"{text}\n")
        self._output.flush()

    # one line

    def _why(self, why: str) -> None:
        if why:
            self.write_line(f"{_DIM}{why}{_PLAIN}" if self._menus else f"  ({why})")

    def _line(self, prompt: str, read: Callable[[str], Value], default: Value) -> Value:
        self.num_asked += 1
        while True:
            self._output.write(prompt)
            self._output.flush()
            line = self._input.readline()
            if not line:
                self._output.write("\n")
                raise InputEnded(
                    f"The input ended before this question was answered: {prompt.strip()}\n"
                    "Give one answer a line; an empty line takes the default."
                )
            answer = line.strip()
            if not self._input.isatty():
                self.write_line(answer)  # piped input isn't echoed: a transcript has the answers too
            if not answer:
                return default
            try:
                return read(answer)
            except ValueError as reason:
                self.write_line(str(reason))

    # menus

    def _menu(self, question: str, choices: Sequence[Choice[Value]], marked: int) -> Value:
        """Let the user choose by arrow keys, digits or first letters; Enter takes the marked line."""
        self._output.write(f"{question}\n")
        typed, note = "", f"{_DIM}arrows or a number, then Enter{_PLAIN}"
        with _keys(self._input) as read_key:
            while True:
                self._draw(choices, marked, typed, note)
                key = read_key()
                if key in ("\r", "\n"):
                    value = match(typed, choices) if typed else choices[marked].value
                    if value is not None:
                        break
                    typed, note = "", f"{typed!r} is none of them"
                elif key in ("\x7f", "\b"):
                    typed = typed[:-1]
                elif key in _UP or key in _DOWN or key in (_HOME, _END):
                    typed, marked = "", _moved(marked, key, len(choices))
                elif key in ("\x03", ""):
                    raise KeyboardInterrupt
                elif key.isprintable():
                    typed += key
                    marked = _jump(typed, choices, marked)
                self._output.write(f"\x1b[{len(choices) + 1}A\r{_ERASE_BELOW}")
        chosen = next(choice.label for choice in choices if choice.value == value)
        self._output.write(f"\x1b[{len(choices) + 2}A\r{_ERASE_BELOW}{question} {_BOLD}{chosen}{_PLAIN}\n")
        self._output.flush()
        return value

    def _draw(self, choices: Sequence[Choice[Value]], marked: int, typed: str, note: str) -> None:
        lines = [
            f"{_BOLD}> [{index}] {choice.label}{_PLAIN}" if index == marked else f"  [{index}] {choice.label}"
            for index, choice in enumerate(choices)
        ]
        lines.append(f"  {typed}" if typed else f"  {note}")
        self._output.write("\r\n".join(lines) + "\r\n")
        self._output.flush()


@final
class BulletMenu:
    """A menu of texts: with arrow keys in a terminal, by number or name everywhere else."""

    def __init__(self, prompt: str | None = None, choices: Sequence[str] = ()) -> None:
        self.prompt = prompt
        self.choices: list[str] = list(choices)

    def run(self, default_choice: int = 0) -> int:
        """Return the index of the choice that was made."""
        entries = [Choice(index, str(text)) for index, text in enumerate(self.choices)]
        return Asker().choose(self.prompt or "Which one?", entries, default_choice)


def _moved(marked: int, key: str, count: int) -> int:
    if key == _HOME:
        return 0
    if key == _END:
        return count - 1
    return (marked + (1 if key in _DOWN else -1)) % count


def _jump(typed: str, choices: Sequence[Choice[Value]], marked: int) -> int:
    """Return the index of the line that the typed text marks: by number, or the first that begins with it."""
    value = match(typed, choices)
    for index, choice in enumerate(choices):
        if value is not None and choice.value == value:
            return index
    for index, choice in enumerate(choices):
        if choice.label.lower().startswith(typed.lower()):
            return index
    return marked


def _has_termios() -> bool:
    try:
        import termios  # noqa: F401  (absent on Windows: lines of text there)
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def _keys(stream: TextIO) -> Iterator[Callable[[], str]]:
    """Switch the terminal to single keys in this block and yield a function that reads one key."""
    import termios
    import tty

    descriptor = stream.fileno()
    before = termios.tcgetattr(descriptor)

    def read_key() -> str:
        key = os.read(descriptor, 1).decode(errors="replace")
        if key == "\x1b":
            key += os.read(descriptor, 2).decode(errors="replace")
        return key

    try:
        tty.setcbreak(descriptor, termios.TCSADRAIN)
        yield read_key
    finally:
        # TCSADRAIN keeps what was typed ahead for the next question
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
