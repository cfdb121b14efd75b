"""Expressions that are matched in bounded time: the same answer as `re`, and none that takes for ever."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.config.mindformers import resolve
from lowtide.config.mindformers.expressions import fits, problem
from lowtide.errors import ConfigError

ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\w", r"\d", "(a|b)", "(ab|a)", "(|a)", "^", "$", "(?=a)", "(?!b)", "(?:b)"]
REPEATS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{0,3}", "{2,}", "*?", "+?"])
PIECES = st.tuples(st.sampled_from(ATOMS), REPEATS).map("".join)
GROUPS = st.tuples(st.lists(PIECES, min_size=1, max_size=2), REPEATS).map(lambda pair: f"({''.join(pair[0])}){pair[1]}")
EXPRESSIONS = st.lists(st.one_of(PIECES, GROUPS), min_size=1, max_size=4).map("".join)


@settings(max_examples=1500, deadline=None)
@given(expression=EXPRESSIONS, text=st.text("ab1", max_size=5))
def test_the_same_answer_as_re(expression: str, text: str) -> None:
    try:
        expected = re.fullmatch(expression, text) is not None
    except re.error:  # a repeated '^'
        assert problem(expression) is not None
        return
    assert problem(expression) is None
    assert fits(expression, text) == expected


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("(a+)+", "a" * 60 + "!"),
        ("((((((a*)*)*)*)*)*)*", "a" * 60 + "!"),
        (".*.*.*.*.*.*.*.*x", "a" * 64),
        ("(a|aa)" * 30, "a" * 64),
        ("a?" * 30 + "a" * 30, "a" * 29),
        ("(a{1,60}){1,60}b", "a" * 64),
    ],
)
def test_what_takes_for_ever_elsewhere(expression: str, text: str) -> None:
    start = time.process_time()
    assert not fits(expression, text)
    assert time.process_time() - start < 2.0  # milliseconds here, years with `re`


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("(.*_)*norm", ["attention_norm", "ffn_norm"]),
        (r"(feed_.*|.*_forward)\.(w\d+|mul)+", ["feed_forward.mul", "feed_forward.w1"]),
        (r"feed_forward\.((.*)_)*(mu?l?)+", ["feed_forward.mul"]),
    ],
)
def test_nested_repetition_that_makes_sense(pattern: str, names: list[str]) -> None:
    tree = {"attention_norm": {"norm": None}, "ffn_norm": {"norm": None}, "feed_forward": {"mul": None, "w1": {}}}
    result = resolve({"select_recompute": [pattern]}, num_layers=1, names=tree, compat=False)
    assert result.layers[0].recompute_ops == names


def test_a_catastrophe_on_real_names_is_over_at_once() -> None:
    tree = {f"{'a' * 48}{index}_": {"mul": None} for index in range(8)}
    start = time.process_time()
    with pytest.raises(ConfigError, match="names nothing in a layer"):
        resolve({"select_recompute": [r"((a+)+)+!\.mul"]}, num_layers=2, names=tree, compat=False)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            r"((a+)\2*)+",
            "looks back or does not give back, as '\\1' or 'a*+' does, and has many choices: it may take for ever",
        ),
        (
            "(?i)(a+)+b",
            "looks back or does not give back, as '\\1' or 'a*+' does, and has many choices: it may take for ever",
        ),
        ("a{99999999999}", "is not a regular expression: the repetition number is too large"),
        ("[a", "is not a regular expression: unterminated character set"),
    ],
)
def test_refused(pattern: str, message: str) -> None:
    for compat in (True, False):
        with pytest.raises(ConfigError) as caught:
            resolve({"select_recompute": [pattern]}, num_layers=1, compat=compat)
        assert str(caught.value) == (
            f"recompute_config.select_recompute[0]: {message}; write names with '\\.' between the levels: {pattern!r}"
        )


@pytest.mark.parametrize("expression", [r"(a|b)\1", "(?i)NORM", "a*+", r"\bnorm\b", "(?<=n)orm|norm"])
def test_odd_ones_with_few_choices_are_fine(expression: str) -> None:
    assert problem(expression) is None
    assert not fits(expression, "other")
