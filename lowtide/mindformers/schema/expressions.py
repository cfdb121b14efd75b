r"""Regular expressions from a file that somebody else wrote, matched in bounded time.

What: `fits(expression, text)` is `re.fullmatch`, and `problem(expression)` says what is wrong with an expression.
Why some are refused: `re` tries one choice after the other, and the number of tries is the product of all choices.
`(a+)+b` on a name of 40 letters takes for ever, and so does `.*.*.*.*.*.*x`; a file must not stop the program.

How: before an expression is used, its choices are multiplied, as if every character of it fitted every character of a
name. A repetition counts as many choices as it may have lengths, times the choices inside it to the power of that
length. Alternatives add up. Three `.*` are allowed, four are not; a repetition inside a repetition seldom is.

Cost: some microseconds an expression; at worst some milliseconds a name. Not covered: what is harmless because its
characters exclude each other, as in `(\w+,)*`: refused like the others.
"""

from __future__ import annotations

import functools
import re
import re._constants as code  # type: ignore[import-not-found]
import re._parser as regex_parser  # type: ignore[import-not-found]
from typing import Any

_MOST_CHARACTERS = 1_000
_NAME_CHARACTERS = 64
_MOST_TRIES = (_NAME_CHARACTERS + 1) ** 3
_REPEATS = (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT)


def problem(expression: str) -> str | None:
    """What is wrong with an expression, or None."""
    if len(expression) > _MOST_CHARACTERS:
        return f"has {len(expression)} characters, of at most {_MOST_CHARACTERS}"
    try:
        _read(expression)
        parsed = regex_parser.parse(expression)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {getattr(error, 'msg', str(error))}"
    if _tries(parsed) > _MOST_TRIES:
        return "repeats what repeats, or has too many choices: to match a name may take for ever"
    return None


@functools.lru_cache(maxsize=256)
def _read(expression: str) -> re.Pattern[str]:
    return re.compile(expression)


def fits(expression: str, text: str) -> bool:
    """Whether all of `text` matches. Only for an expression without a `problem`."""
    return _read(expression).fullmatch(text) is not None


def _tries(items: Any) -> int:
    """In how many ways a sequence of parts may match a name, at most. Counts no further than just above the limit."""
    tries = 1
    for op, argument in items:
        if op in _REPEATS:
            fewest, most, body = argument
            rounds = min(most, _NAME_CHARACTERS)
            each = _tries(body)
            tries *= (max(rounds - fewest, 0) + 1) * (each if each == 1 else min(each, _MOST_TRIES) ** rounds)
        elif op is code.BRANCH:
            tries *= sum(map(_tries, argument[1]))
        else:
            for below in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(below, regex_parser.SubPattern):
                    tries *= _tries(below)
        tries = min(tries, _MOST_TRIES + 1)
    return tries
