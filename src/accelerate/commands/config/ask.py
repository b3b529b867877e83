"""Questions to a user, one line of text for each answer, in a terminal and on a pipe.

A choice is given by its number, its label, its value or text that only it contains. Every question shows its default
and, where there is one, an explanation. After an invalid answer the reason is printed and the question asked
again. The answer ``<`` asks the question before again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TextIO, TypeVar, cast, final

from ...errors import SettingError

Value = TypeVar("Value")

_BACK: Final = "<"


@final
@dataclass(frozen=True)
class Choice(Generic[Value]):
    """One entry of a menu: the value it stands for, how it is shown, and whether this machine has it."""

    value: Value
    label: str
    is_here: bool = True

    @property
    def shown(self) -> str:
        """The label, with a remark if this machine doesn't have it."""
        return self.label if self.is_here else f"{self.label} (not on this machine)"


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


class StepBack(Exception):
    """The wish to answer the question before once more."""


class InputEnded(SettingError):
    """The answers on the standard input ended before the questions did."""


@final
class Asker:
    """A dialogue that asks on ``output`` and reads the answers from ``input``."""

    def __init__(self, input: TextIO | None = None, output: TextIO | None = None) -> None:
        self._input = input if input is not None else sys.stdin
        self._output = output if output is not None else sys.stdout
        self.num_asked: int = 0
        #: The answers so far, each with its question.
        self._given: list[tuple[str, object]] = []
        #: Answers from before a step back, which are taken again without a question.
        self._repeated: list[object] = []
        #: Answers that steps back have taken back, by question: what is proposed there now.
        self._taken_back: dict[str, object] = {}

    def dialogue(self, questions: Callable[[], Value]) -> Value:
        """Return what ``questions`` returns; a step back calls it again, with all answers but the last one.

        In a terminal, answers that contradict each other are explained, and the last question is asked again.
        """
        while True:
            try:
                return questions()
            except StepBack:
                pass
            except SettingError as error:
                if not self._input.isatty() or not self._given:
                    raise
                self.write_line(f"{error} Answer < to go back to what is to be changed.")
            if self._given:
                question, answer = self._given.pop()
                self._taken_back[question] = answer
            self._repeated, self._given = [answer for _, answer in self._given], []

    # kinds of questions

    def choose(
        self, question: str, choices: Sequence[Choice[Value]], default: Value, *, why: str = "", brief: bool = False
    ) -> Value:
        """Ask for one of the choices and return its value; ``brief`` shows the values instead of numbered labels."""

        def ask(default: Value) -> Value:
            marked = next((index for index, choice in enumerate(choices) if choice.value == default), 0)
            if brief:
                labels = (choice.label.upper() if i == marked else choice.label for i, choice in enumerate(choices))
                prompt = f"{question} [{'/'.join(labels)}]: "
            else:
                lines = [f"  [{index}] {choice.shown}" for index, choice in enumerate(choices)]
                prompt = "\n".join([question, *lines, f"Number or name [{marked}]: "])
            return self._line(prompt, read, choices[marked].value, why)

        def read(text: str) -> Value:
            value = match(text, choices)
            if value is None:
                legal = ", ".join(f"{index} ({choice.label})" for index, choice in enumerate(choices))
                raise ValueError(f"{text!r} is none of them. Answer with a number or a name: {legal}.")
            return value

        return self._answer(question, ask, default)

    def yes(self, question: str, default: bool = False, *, why: str = "") -> bool:
        """Ask a yes/no question and return the answer."""

        def read(text: str) -> bool:
            answer = text.lower()
            if answer in ("yes", "y", "true", "1"):
                return True
            if answer in ("no", "n", "false", "0"):
                return False
            raise ValueError(f"{text!r} is neither: answer yes or no.")

        def ask(default: bool) -> bool:
            return self._line(f"{question} [{'YES/no' if default else 'yes/NO'}]: ", read, default, why)

        return self._answer(question, ask, default)

    def ask(
        self,
        question: str,
        read: Callable[[str], Value],
        default: Value,
        *,
        write: Callable[[Value], str | None] = str,
        why: str = "",
        required: bool = False,
    ) -> Value:
        """Ask, and return the answer as converted by ``read``, which raises ValueError with a reason if it can't.

        ``write`` is the opposite of ``read``; an empty answer is ``default``, unless there is none and one is
        ``required``.
        """

        def read_required(text: str) -> Value:
            if not text:
                raise ValueError("An answer is needed here.")
            return read(text)

        def ask(proposed: Value) -> Value:
            shown = "" if proposed is None else write(proposed) or ""
            needs_answer = required and not shown
            prompt = f"{question} [{shown}]: " if shown else f"{question}: "
            return self._line(prompt, read_required if needs_answer else read, proposed, why, needs_answer)

        return self._answer(question, ask, default)

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

        # what a step back has taken back may be less than is possible after the new answers
        taken_back = self._taken_back.get(question)
        if isinstance(taken_back, int):
            self._taken_back[question] = max(taken_back, at_least)
        return self.ask(question, read, max(default, at_least), why=why)

    def text(self, question: str, default: str = "", *, required: bool = False, why: str = "") -> str:
        """Ask for a text and return it as typed."""
        return self.ask(question, lambda text: text, default, why=why, required=required)

    def write_line(self, text: str) -> None:
        """Print a line."""
        self._output.write(f"{text}\n")
        self._output.flush()

    # one question

    def _answer(self, question: str, ask: Callable[[Value], Value], default: Value) -> Value:
        """Return the answer from before a step back where there is one, or else ask, and remember the answer."""
        if self._repeated:
            value = cast("Value", self._repeated.pop(0))
        else:
            value = ask(cast("Value", self._taken_back.get(question, default)))
            self.num_asked += 1
        self._given.append((question, value))
        return value

    def _line(
        self, prompt: str, read: Callable[[str], Value], default: Value, why: str, needs_answer: bool = False
    ) -> Value:
        """Ask until a line can be read; an empty one is ``default``."""
        if why:
            self.write_line(f"  ({why})")
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
            if answer == _BACK:
                raise StepBack
            if not answer and not needs_answer:
                return default
            try:
                return read(answer)
            except ValueError as reason:
                self.write_line(str(reason))


@final
class BulletMenu:
    """A menu of texts, chosen by number or name."""

    def __init__(self, prompt: str | None = None, choices: Sequence[str] = ()) -> None:
        self.prompt = prompt
        self.choices: list[str] = list(choices)

    def run(self, default_choice: int = 0) -> int:
        """Return the index of the choice that was made."""
        entries = [Choice(index, str(text)) for index, text in enumerate(self.choices)]
        asker = Asker()
        return asker.dialogue(lambda: asker.choose(self.prompt or "Which one?", entries, default_choice))
