"""Questions in a terminal: menus and lines drawn in place, and keys read one by one."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TextIO, TypeVar, final

from ...settings import env
from .choices import Choice, first_that_begins, match

Value = TypeVar("Value")

_UP: Final = ("\x1b[A", "\x1bOA")
_DOWN: Final = ("\x1b[B", "\x1bOB")
_FIRST: Final = ("\x1b[H", "\x1bOH", "\x1b[1~")
_LAST: Final = ("\x1b[F", "\x1bOF", "\x1b[4~")
_ENTER: Final = ("\r", "\n")
_ESCAPE: Final = "\x1b"
_BACKSPACE: Final = ("\x7f", "\b")
_ERASE_LINE: Final = "\x15"  # Ctrl-U
_END_OF_INPUT: Final = ("\x04", "\x03", "")
#: Seconds within which the rest of an arrow key's sequence arrives; without a rest, it is the key Esc.
_REST_OF_SEQUENCE: Final = 0.05
_DIM: Final = "\x1b[2m"
_BOLD: Final = "\x1b[1m"
_NORMAL: Final = "\x1b[0m"
_HINT: Final = "arrows, j and k, or a number, then Enter; Esc: a question back; Ctrl-C: leave"

#: A line of text with the style in which it is drawn.
_Line = tuple[str, str]


class StepBack(Exception):
    """The wish to answer the question before once more."""


def is_usable(input: TextIO, output: TextIO) -> bool:
    """Return whether questions can be drawn in place, and keys be read one by one."""
    return input.isatty() and output.isatty() and env.read("TERM", "dumb") != "dumb" and _has_termios()


@final
class Terminal:
    """A terminal that shows one open question, with its help below it, and the previous answers."""

    def __init__(self, input: TextIO, output: TextIO) -> None:
        self._input, self._output = input, output
        #: Rows between the first one of what is drawn and the cursor.
        self._rows_above: int = 0
        #: Rows of each answered question.
        self._answered: list[int] = []

    def choose(self, question: str, choices: Sequence[Choice[Value]], marked: int, why: str) -> Value:
        """Let the user choose by keys or typed text; what this machine has comes first, Enter takes the marked line.

        Raises:
            StepBack: the user wants to go a question back.
        """
        order = sorted(range(len(choices)), key=lambda index: not choices[index].is_here)
        typed = note = ""
        with self._open(question) as read_key:
            while True:
                self._draw_menu(question, why, choices, order, marked, typed or note)
                key = read_key()
                place, note = order.index(marked), ""
                if key in _ENTER:
                    value = match(typed, choices) if typed else choices[marked].value
                    if value is not None:
                        break
                    typed, note = "", f"{typed!r} is none of them"
                elif key in _BACKSPACE:
                    typed = typed[:-1]
                elif key in _UP or (key == "k" and not typed):
                    typed, marked = "", order[place - 1]
                elif key in _DOWN or (key == "j" and not typed):
                    typed, marked = "", order[(place + 1) % len(order)]
                elif key in _FIRST or key in _LAST:
                    typed, marked = "", order[0 if key in _FIRST else -1]
                elif key.isprintable():
                    typed += key
                    found = first_that_begins(typed, choices)
                    marked = marked if found is None else found
        self._close(question, next(choice.label for choice in choices if choice.value == value))
        return value

    def line(self, question: str, shown: str, read: Callable[[str], tuple[Value, str]], why: str) -> Value:
        """Let the user type a line; ``read`` gives its value and the text to show, or raises ValueError with a reason.

        Raises:
            StepBack: the user wants to go a question back.
        """
        typed = note = ""
        with self._open(question) as read_key:
            while True:
                prompt = f"{question} [{shown}]: {typed}" if shown else f"{question} {typed}"
                self._draw([("", prompt), *self._help(why), *([("", f"  {note}")] if note else [])], 0)
                key = read_key()
                if key in _ENTER:
                    try:
                        value, answer = read(typed.strip())
                    except ValueError as reason:
                        typed, note = "", str(reason)
                        continue
                    break
                if key in _BACKSPACE:
                    typed = typed[:-1]
                elif key == _ERASE_LINE:
                    typed = ""
                elif key.isprintable():
                    typed += key
        self._close(question, answer)
        return value

    def explain(self, text: str) -> None:
        """Show why the last answer has to be given again."""
        rows = [row for line in text.splitlines() for row in self._rows(line)]
        self._output.write("\n".join(rows) + "\n")
        last = self._answered.pop() + len(rows)
        if self._answered:
            self._answered[-1] += last  # a step back removes both

    # ------------------------------------------------------------------------------------------------- drawing

    @contextlib.contextmanager
    def _open(self, question: str) -> Iterator[Callable[[], str]]:
        """Yield a function that reads one key; a step back shows the question before as it was, unanswered."""
        self._rows_above = 0
        try:
            with _keys(self._input) as read_key:
                yield read_key
        except StepBack:
            self._erase()
            if self._answered:
                self._output.write(f"\x1b[{self._answered.pop()}A\r\x1b[J")
            self._output.flush()
            raise
        except KeyboardInterrupt:
            self._close(question, "")
            raise

    def _close(self, question: str, answer: str) -> None:
        """Replace the open question by its answer, in bold after it."""
        self._erase()
        plain, styled = len(question) + 1, list[str]()
        rows = self._rows(f"{question} {answer}")
        for row in rows:
            head = row[: max(0, plain)]
            plain -= len(head) + 1  # the space at which the row was cut
            styled.append(f"{head}{_BOLD}{row[len(head) :]}{_NORMAL}")
        self._output.write("\r\n".join(styled) + "\r\n")
        self._output.flush()
        self._answered.append(len(rows))

    def _help(self, why: str) -> list[_Line]:
        lines = ([why] if why else []) + ([] if self._answered else [_HINT])
        return [(_DIM, f"  {line}") for line in lines]

    def _draw_menu(
        self,
        question: str,
        why: str,
        choices: Sequence[Choice[Value]],
        order: Sequence[int],
        marked: int,
        note: str,
    ) -> None:
        """Draw the question, its help, and as many of the choices around the marked one as the terminal has rows."""
        help = self._help(why)
        room = max(3, self._size().lines - len(help) - 4)
        start = min(max(0, order.index(marked) - room // 2), max(0, len(order) - room))
        lines = [("", question), *help]
        for index in order[start : start + room]:
            choice = choices[index]
            style = _BOLD if index == marked else "" if choice.is_here else _DIM
            lines.append((style, f"{'>' if index == marked else ' '} [{index}] {choice.label}"))
        self._draw([*lines, ("", f"  {note}")] if note else lines, len(lines) - 1 + bool(note))

    def _draw(self, lines: Sequence[_Line], at: int) -> None:
        """Draw the lines in the place of what was drawn before, with the cursor at the end of line ``at``."""
        self._erase()
        rows = [self._rows(text) for _, text in lines]
        styled = (style + "\r\n".join(each) + _NORMAL for (style, _), each in zip(lines, rows, strict=True))
        self._output.write("\r\n".join(styled))
        rows_below = sum(len(each) for each in rows[at + 1 :])
        if rows_below:
            self._output.write(f"\x1b[{rows_below}A\r\x1b[{max(1, len(rows[at][-1]))}C")
        self._output.flush()
        self._rows_above = sum(len(each) for each in rows[: at + 1]) - 1

    def _rows(self, text: str) -> list[str]:
        """Return the text in rows of the terminal's width, cut between words and indented alike."""
        width = self._size().columns
        body = text.rstrip()
        indent = text[: len(text) - len(text.lstrip())] if body else ""
        *rows, last = textwrap.wrap(body, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
        last += text[len(body) :]  # the space before what is typed
        return [*rows, last[:width], *([last[width:]] if len(last) > width else [])]

    def _erase(self) -> None:
        up = f"\x1b[{self._rows_above}A" if self._rows_above else ""
        self._output.write(f"{up}\r\x1b[J")
        self._rows_above = 0

    def _size(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._output.fileno())
        except OSError:
            size = os.terminal_size((0, 0))
        return os.terminal_size((size.columns or 80, size.lines or 24))  # 0 where nobody told the terminal


# ------------------------------------------------------------------------------------------------------------ keys


def _has_termios() -> bool:
    try:
        import termios  # noqa: F401  (absent on Windows: lines of text there)
    except ImportError:
        return False
    return True


@contextlib.contextmanager
def _keys(stream: TextIO) -> Iterator[Callable[[], str]]:
    """Switch the terminal to single keys in this block and yield a function that reads one key.

    That function raises StepBack for Esc, and KeyboardInterrupt for Ctrl-C and where the input ends. Ctrl-C is a key
    here, read in its turn: a signal that arrives just before the program waits for a key wouldn't wake it.
    """
    import termios
    import tty

    descriptor = stream.fileno()
    before, single = termios.tcgetattr(descriptor), termios.tcgetattr(descriptor)
    single[tty.LFLAG] &= ~(termios.ECHO | termios.ICANON)
    no_key = bytes([os.fpathconf(descriptor, "PC_VDISABLE")])
    keys: list[Any] = single[tty.CC]
    keys[termios.VMIN], keys[termios.VTIME], keys[termios.VINTR] = 1, 0, no_key
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read_character() -> str:
        while not (character := decoder.decode(data := os.read(descriptor, 1), final=not data)):
            if not data:
                return ""
        return character

    def read_key() -> str:
        key = read_character()
        if key in _END_OF_INPUT:
            raise KeyboardInterrupt
        if key == _ESCAPE:
            if not select.select([descriptor], [], [], _REST_OF_SEQUENCE)[0]:
                raise StepBack
            key += read_character()
            while key[1:2] in ("[", "O") and not (len(key) > 2 and "@" <= key[-1] <= "~"):
                key += read_character()
        return key

    try:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, single)
        yield read_key
    finally:
        # TCSADRAIN keeps what was typed ahead for the next question
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
