r"""Regular expressions from a file that somebody else wrote, matched in bounded time.

What: `fits(expression, text)` is `re.fullmatch`, and `problem(expression)` says what is wrong with an expression.
Why not `re` alone: it tries one choice after the other, and the number of tries is the product of all choices.
`(a+)+b` on a name of 40 letters takes for ever, and so does `.*.*.*.*.*.*x`; a file must not stop the program.

How: an expression of at most two choices, none inside the other, goes to `re`, which then needs at most (length of the
name)^2 tries. Any other goes over positions instead: for every part of the expression and every position, the set of
positions where the part may end, each worked out once. Names are short, so that is at most a few thousand steps.
Only what looks backwards or refuses to give back (`\1`, `(?<=a)`, `(?>a)`, `a*+`, `(?i)`) has no such sets; with more
than two choices it is refused.

Cost: a microsecond with `re`, some 50 microseconds over positions. Not covered: where in the text something was found.
"""

from __future__ import annotations

import functools
import re
import re._constants as code  # type: ignore[import-not-found]
import re._parser as regex_parser  # type: ignore[import-not-found]
from typing import Any

_MOST_TRIED = 2
_REPEATS = (code.MAX_REPEAT, code.MIN_REPEAT)
_CHOICES = (*_REPEATS, code.POSSESSIVE_REPEAT, code.BRANCH)
_CHARACTERS = (code.LITERAL, code.NOT_LITERAL, code.ANY, code.IN)
_CATEGORIES = {
    code.CATEGORY_DIGIT: r"\d",
    code.CATEGORY_NOT_DIGIT: r"\D",
    code.CATEGORY_SPACE: r"\s",
    code.CATEGORY_NOT_SPACE: r"\S",
    code.CATEGORY_WORD: r"\w",
    code.CATEGORY_NOT_WORD: r"\W",
}
_EDGES = (code.AT_BEGINNING, code.AT_BEGINNING_STRING, code.AT_END, code.AT_END_STRING)


def problem(expression: str) -> str | None:
    """What is wrong with an expression, or None."""
    try:
        compiled, parsed = _read(expression)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {getattr(error, 'msg', str(error))}"
    if compiled is None and not _has_sets(parsed):
        return "looks back or does not give back, as '\\1' or 'a*+' does, and has many choices: it may take for ever"
    return None


def fits(expression: str, text: str) -> bool:
    """Does all of `text` match? Raises nothing for an expression without a `problem`."""
    compiled, parsed = _read(expression)
    if compiled is not None:
        return compiled.fullmatch(text) is not None
    return len(text) in _Positions(text).after(parsed, 0)


@functools.lru_cache(maxsize=256)
def _read(expression: str) -> tuple[re.Pattern[str] | None, Any]:
    """The expression as `re` has it, if it may be used, and its parts."""
    compiled, parsed = re.compile(expression), regex_parser.parse(expression)
    return compiled if _is_cheap(parsed) else None, parsed


def _is_cheap(parsed: Any) -> bool:
    """At most two choices, none inside the other."""
    depths = list(_choices(parsed, 0))
    return len(depths) <= _MOST_TRIED and not any(depths)


def _choices(items: Any, depth: int) -> Any:
    """For each choice in an expression, how many others it is inside of."""
    for op, argument in items:
        inside = depth
        if op in _CHOICES:
            yield depth
            inside += 1
        for below in _below(op, argument):
            yield from _choices(below, inside)


def _below(op: Any, argument: Any) -> list[Any]:
    """The expressions inside one part of an expression."""
    if op is code.BRANCH:
        return list(argument[1])
    if isinstance(argument, regex_parser.SubPattern):
        return [argument]
    if op in _CHARACTERS or not isinstance(argument, tuple):
        return []
    return [item for item in argument if isinstance(item, regex_parser.SubPattern)]


def _has_sets(parsed: Any) -> bool:
    is_plain = not parsed.state.flags & (re.IGNORECASE | re.ASCII | re.LOCALE)
    return is_plain and _is_regular(parsed)


def _is_regular(items: Any) -> bool:
    for op, argument in items:
        if op is code.AT:
            is_known = argument in _EDGES
        elif op is code.SUBPATTERN:
            is_known = not argument[1] and not argument[2]
        elif op in (code.ASSERT, code.ASSERT_NOT):
            is_known = argument[0] > 0
        else:
            is_known = op in (*_CHARACTERS, *_REPEATS, code.BRANCH)
        if not is_known or not all(_is_regular(below) for below in _below(op, argument)):
            return False
    return True


class _Positions:
    """Where the parts of one expression may end in one text, worked out on demand."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._known: dict[tuple[int, int], frozenset[int]] = {}

    def after(self, items: Any, start: int) -> frozenset[int]:
        """All positions where a sequence of parts that begins at `start` may end."""
        key = (id(items), start)
        if key not in self._known:
            ends = {start}
            for op, argument in items:
                ends = {end for begin in ends for end in self._part(op, argument, begin)}
            self._known[key] = frozenset(ends)
        return self._known[key]

    def _part(self, op: Any, argument: Any, start: int) -> set[int] | frozenset[int]:
        if op is code.BRANCH:
            return {end for branch in argument[1] for end in self.after(branch, start)}
        if op is code.SUBPATTERN:
            return self.after(argument[3], start)
        if op in _REPEATS:
            fewest, most, body = argument
            return self._repeat(body, start, fewest=fewest, most=most)
        if op is code.AT:
            is_at_start = argument in (code.AT_BEGINNING, code.AT_BEGINNING_STRING)
            return {start} if start == (0 if is_at_start else len(self._text)) else set()
        if op in (code.ASSERT, code.ASSERT_NOT):
            return {start} if bool(self.after(argument[1], start)) is (op is code.ASSERT) else set()
        is_there = start < len(self._text) and _is_character(op, argument, self._text[start])
        return {start + 1} if is_there else set()

    def _repeat(self, body: Any, start: int, *, fewest: int, most: int) -> set[int]:
        # More rounds than there are characters only repeat rounds that match nothing.
        rounds = 2 * len(self._text) + 2
        ends = {start}
        for _ in range(min(fewest, rounds)):
            ends = {end for begin in ends for end in self.after(body, begin)}
        found, new = set(ends), ends
        for _ in range(min(most - fewest, rounds)):
            new = {end for begin in new for end in self.after(body, begin)} - found
            if not new:
                break
            found |= new
        return found


def _is_character(op: Any, argument: Any, character: str) -> bool:
    if op is code.ANY:
        return character != "\n"
    if op is code.LITERAL:
        return ord(character) == argument
    if op is code.NOT_LITERAL:
        return ord(character) != argument
    is_negated = argument[0][0] is code.NEGATE
    return any(_is_in(kind, value, character) for kind, value in argument[is_negated:]) is not is_negated


def _is_in(kind: Any, value: Any, character: str) -> bool:
    if kind is code.LITERAL:
        return ord(character) == value
    if kind is code.RANGE:
        return value[0] <= ord(character) <= value[1]
    return re.fullmatch(_CATEGORIES[value], character) is not None
