"""Expressions that are matched in bounded time: the answer of `re`, or refused because it might take for ever."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.mindformers.schema.names import fits, problem
from tests.support.sections import resolve

ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\w", r"\d", "(a|b)", "(ab|a)", "(|a)", "^", "$", "(?=a)", "(?!b)", "(?:b)"]
REPEATS = st.sampled_from(["", "", "*", "+", "?", "{2}", "{0,3}", "{2,}", "*?", "+?"])
PIECES = st.tuples(st.sampled_from(ATOMS), REPEATS).map("".join)
GROUPS = st.tuples(st.lists(PIECES, min_size=1, max_size=2), REPEATS).map(lambda pair: f"({''.join(pair[0])}){pair[1]}")
FOR_EVER = "repeats what repeats, or has too many choices: to match a name may take for ever"
EXPRESSIONS = st.lists(st.one_of(PIECES, GROUPS), min_size=1, max_size=4).map("".join)


@settings(max_examples=300, deadline=None)
@given(expression=EXPRESSIONS, text=st.sampled_from(["a" * 64, "ab" * 32, "aab1" * 16, "1" * 64]))
def test_what_is_not_refused_ends_soon(expression: str, text: str) -> None:
    wrong = problem(expression)
    if wrong is None:
        start = time.process_time()
        fits(expression, text)
        assert time.process_time() - start < 2.0
    else:
        assert wrong == FOR_EVER or wrong.startswith("is not a regular expression: ")  # a repeated '^'


@pytest.mark.parametrize(
    "expression",
    [
        "(a+)+",
        "((((((a*)*)*)*)*)*)*",
        "(.*_)*norm",
        "(a{1,60}){1,60}b",
        r"(w\d+|mul)+",
        "(?i)(a+)+b",
        r"((a+)\2*)+",
        "(?=(a+)+b)a*",
        "(?>(a+)+b)",
        ".*.*.*.*x",
        "(a|aa)" * 30,
        "a?" * 30 + "a" * 30,
    ],
)
def test_what_may_take_for_ever_is_refused_at_once(expression: str) -> None:
    start = time.process_time()
    assert problem(expression) == FOR_EVER
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (".*.*.*[xy]", "a" * 64),
        (".*.*.*[xy]", "a" * 300),
        (r"\w*?\w*?\w*?!", "a" * 300),
        ("(a|aa)" * 18, "a" * 64),
        ("a?" * 18 + "a" * 18, "a" * 17),
        (r"(\w*\d?){2}!", "1" * 300),
        ("a{1,60}b{0,60}a{0,60}!", "a" * 300),
    ],
)
def test_the_worst_that_is_not_refused_ends_soon(expression: str, text: str) -> None:
    assert problem(expression) is None
    start = time.process_time()
    assert not fits(expression, text)
    assert time.process_time() - start < 2.0  # a quarter of a second at most; milliseconds on names


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("(.*_)?norm", ["attention_norm", "ffn_norm"]),
        (r"(feed_.*|.*_forward)\.(w\d+|mul)", ["feed_forward.mul", "feed_forward.w1"]),
        (r"feed_forward\.(.*_){0,2}mu?l?", ["feed_forward.mul"]),
    ],
)
def test_choices_that_make_sense(pattern: str, names: list[str]) -> None:
    tree = {"attention_norm": {"norm": None}, "ffn_norm": {"norm": None}, "feed_forward": {"mul": None, "w1": {}}}
    result = resolve({"select_recompute": [pattern]}, num_layers=1, names=tree, compat=False)
    assert result.layers[0].recompute_ops == names


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"((a+)\2*)+", FOR_EVER),
        ("(a+)+b", FOR_EVER),
        ("a" * 1001, "has 1001 characters, of at most 1000"),
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
