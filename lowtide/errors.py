"""The one exception type that users are meant to read.

Every user-facing mistake (a wrong key, a pattern that matches nothing, a tier that cannot be written) raises
`ConfigError` with a text that says where, what, and how to fix it. Programmer errors are `assert`s instead.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable


class ConfigError(ValueError):
    """A mistake in what the user asked for. The text is one message: where, what, how to fix.

    It is one line, whatever it quotes: control characters become escapes, and of a very long text the middle is left
    out, so that the place in front and the way out at the end stay.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


class BudgetError(ConfigError):
    """No plan fits the budget. `floor_bytes` is the smallest peak that can be reached; `suggestions` are the cheapest
    ways out, each one sentence, best first; `set_by` is the operator that sets the floor, where it is known."""

    def __init__(self, message: str, *, floor_bytes: int, suggestions: tuple[str, ...] = (), set_by: str = "") -> None:
        ValueError.__init__(self, message)  # what each way out would give stands on lines of its own
        self.floor_bytes = floor_bytes
        self.suggestions = suggestions
        self.set_by = set_by

    def __reduce__(self) -> tuple:
        make = functools.partial(type(self), floor_bytes=self.floor_bytes, suggestions=self.suggestions)
        return make, (str(self),)


class FieldError(ConfigError):
    """The value of one field is wrong. `path`: the name of the field, or names and places from the outside in; what
    reads a file knows where that is."""

    def __init__(self, path: str | tuple[str | int, ...], message: str) -> None:
        self.path = (path,) if isinstance(path, str) else path
        self.message = message
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        super().__init__(f"{name.removeprefix('.')}: {message}" if name else message)

    def below(self, part: str | int) -> FieldError:
        """The same, told from one level further out."""
        return FieldError((part, *self.path), self.message)


class NothingToTrainError(ConfigError):
    """Nothing that a forward pass reads requires a gradient."""


def wrong_argument(call: str, name: str, takes: str, value: object) -> ConfigError:
    """`lowtide.plan: loss= takes a function of the output, not int`."""
    return ConfigError(f"{call}: {name}= takes {takes}, not {type(value).__name__}")


def check_function(call: str, name: str, value: object, takes: str = "a function of one line of text") -> None:
    """Raises ConfigError for an argument that is neither None nor a function."""
    if value is not None and not callable(value):
        raise wrong_argument(call, name, takes, value)


_MOST_CHARACTERS = 3000


def _one_line(text: str) -> str:
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS - 1000]} ... {text[-1000:]}"
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


_ELSEWHERE = {"checkpoint": "recompute", "offload": "swap", "remat": "recompute"}
"""How others begin the names of what has another name here."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`; did you mean 'budget'?`, or nothing when no choice is near."""
    choices = list(choices)
    meant = [ours for theirs, ours in _ELSEWHERE.items() if theirs in word and ours in choices]
    nearest = meant or difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""


class TierFull(Exception):
    """`allocate` found no room on the tier (a cap, or a full disk). The runtime tries the next tier, then keeps."""


class RecomputeRefusedError(RuntimeError):
    """The recomputed module `path` cannot be run again to the bit. `can_stay`: a solved plan chose to run it again, and
    keeps it from now on; else a rule of the user's did."""

    def __init__(self, message: str, path: str, *, can_stay: bool) -> None:
        self.path = path
        self.can_stay = can_stay
        super().__init__(message)

    def __reduce__(self) -> tuple:
        return functools.partial(type(self), can_stay=self.can_stay), (str(self), self.path)


class PartialStepError(RuntimeError):
    """An optimizer's step stopped at bucket number `bucket`: those before it are updated, those after it are not.

    `can_resume`: nothing of this bucket was touched, and `resume()` of the handle goes on to the same bits.
    """

    def __init__(self, message: str, *, bucket: int, can_resume: bool) -> None:
        self.bucket = bucket
        self.can_resume = can_resume
        super().__init__(message)

    def __reduce__(self) -> tuple:
        return functools.partial(type(self), bucket=self.bucket, can_resume=self.can_resume), (str(self),)


class PipelineError(RuntimeError):
    """A step of a pipeline ended because another rank failed, or sent what was not expected. Says which, and where."""
