"""Patterns and precedence, also against a second matcher that shares no code with the first."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core.fate import Fate, Tier
from lowtide.core.rules import Pattern, Rule, Rules, nearest_names, unmatched_error
from lowtide.errors import ConfigError


def rule(text: str, fate: Fate = Fate.SWAP, **options: object) -> Rule:
    return Rule(pattern=Pattern.parse(text), fate=fate, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.0-15", "model.layers.3", True),
        ("layers.0-15", "model.layers.3.mlp.mul", True),
        ("layers.0-15", "model.layers.15", True),
        ("layers.0-15", "model.layers.16.mlp", False),
        ("layers.0-15", "model.layers.x", False),
        ("layers.0,2,5-7", "model.layers.6", True),
        ("layers.0,2,5-7", "model.layers.3", False),
        ("layers.3", "model.layers.31", False),
        ("mul", "model.layers.3.mlp.mul", True),
        ("mul", "model.layers.3.mlp.mul_1", True),
        ("mul", "model.layers.3.mlp.mul_x", False),
        ("mul", "model.layers.3.mul_1.silu", False),
        ("mul_1", "model.layers.3.mlp.mul", False),
        ("mul_1", "model.layers.3.mlp.mul_1", True),
        ("mul_1", "model.layers.3.mlp.mul_12", False),
        ("mlp", "model.layers.3.mlp", True),
        ("mlp.*", "model.layers.3.mlp", False),
        ("mlp.*", "model.layers.3.mlp.mul", True),
        ("mlp.*", "model.layers.3.mlp.down_proj.mm", True),
        ("*.mlp", "mlp", False),
        ("*.mlp", "block.mlp", True),
        ("*", "anything", True),
        ("layers.*.mlp", "model.layers.3.mlp.mul", True),
        ("layers.*.mlp", "model.layers.3.4.mlp.mul", False),
        ("q_*", "layers.0.attn.q_proj.mm", True),
        ("q_*", "layers.0.attn.k_proj.mm", False),
        ("*_proj", "layers.0.attn.k_proj.mm", True),
        ("*ul", "layers.0.mlp.mul_1", True),
        ("layers", "mylayers.0", False),
        ("my-layers.0", "my-layers.0", True),
        ("a.b.c", "b.c", False),
    ],
)
def test_matches(pattern: str, name: str, expected: bool) -> None:
    assert Pattern.parse(pattern).matches(name) is expected


def test_a_module_whose_name_looks_like_a_numbered_op_is_not_one() -> None:
    assert not Pattern.parse("block").matches("model.block_1", is_site=False)
    assert Pattern.parse("block_1").matches("model.block_1", is_site=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a pattern is empty; write a name such as 'layers.0-15'"),
        ("a..b", "pattern 'a..b': nothing between two dots; write '*' for any one name"),
        ("a.", "pattern 'a.': nothing between two dots; write '*' for any one name"),
        ("layers.15-0", "pattern 'layers.15-0': the range '15-0' is backwards; write 0-15"),
        ("layers.0-", "pattern 'layers.0-': '0-' is not a range or a list of indices; write 0-15 or 0,2,5-7"),
        ("layers.0,,1", "pattern 'layers.0,,1': '0,,1' is not a range or a list of indices; write 0-15 or 0,2,5-7"),
        ("a.**.b", "pattern 'a.**.b': '**' is not needed; a pattern covers everything below what it names"),
        (
            "layers.[0-9]",
            "pattern 'layers.[0-9]': '[' has no meaning in '[0-9]'; use names, '*', ranges (0-15) and index lists "
            "(0,2,5-7)",
        ),
        ("q,k", "pattern 'q,k': ',' has no meaning in 'q,k'; use names, '*', ranges (0-15) and index lists (0,2,5-7)"),
    ],
)
def test_malformed_patterns(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Pattern.parse(text)
    assert str(caught.value) == message
    with pytest.raises(ConfigError) as caught:
        Pattern.parse(text, where="run.yaml:4:9")
    assert str(caught.value) == f"run.yaml:4:9: {message}"


# A second matcher: one regular expression for the whole pattern, indices spelled out.
def naive_match(pattern: str, name: str) -> bool:
    pieces = []
    for segment in pattern.split("."):
        if re.fullmatch(r"[0-9,-]*[,-][0-9,-]*", segment):
            numbers: list[str] = []
            for item in segment.split(","):
                ends = [int(end) for end in item.split("-")]
                numbers += [str(number) for number in range(ends[0], ends[-1] + 1)]
            pieces.append("0*(" + "|".join(numbers) + ")")
        else:
            pieces.append("[^.]*".join(re.escape(text) for text in segment.split("*")))
    body = r"\.".join(pieces)
    ends_in_op = re.fullmatch(rf"(.*\.)?{body}(_[0-9]+)?", name) is not None
    return ends_in_op or re.fullmatch(rf"(.*\.)?{body}\..*", name) is not None


PARTS = st.sampled_from(["model", "layers", "mlp", "q_proj", "k_proj", "mul", "mul_1", "add_12", "0", "1", "2", "7"])
NAMES = st.lists(PARTS, min_size=1, max_size=6).map(".".join)
SEGMENTS = st.one_of(
    PARTS, st.sampled_from(["*", "q_*", "*_proj", "m*l", "*_1", "add", "0-1", "1-7", "0,2", "0,2-5,7", "12-99"])
)
PATTERNS = st.lists(SEGMENTS, min_size=1, max_size=4).map(".".join)


@given(PATTERNS, NAMES)
def test_agrees_with_the_naive_matcher(pattern: str, name: str) -> None:
    assert Pattern.parse(pattern).matches(name) is naive_match(pattern, name)


@given(PATTERNS, NAMES, NAMES)
def test_what_is_below_a_match_matches(pattern: str, name: str, below: str) -> None:
    if Pattern.parse(pattern).matches(name, is_site=False):
        assert Pattern.parse(pattern).matches(f"{name}.{below}")
        assert Pattern.parse(pattern).matches(f"{below}.{name}", is_site=False)


@given(st.lists(st.tuples(PATTERNS, st.sampled_from(list(Fate))), max_size=5), NAMES)
def test_precedence(written: list[tuple[str, Fate]], name: str) -> None:
    rules = Rules(tuple(rule(text, fate, prefetch=index) for index, (text, fate) in enumerate(written)))
    decision = rules.decide(name)
    matched = [(index, fate) for index, (text, fate) in enumerate(written) if naive_match(text, name)]
    for fate in (Fate.KEEP, Fate.RECOMPUTE, Fate.SWAP):
        of_fate = [index for index, other in matched if other is fate]
        if of_fate:
            assert (decision.fate, decision.prefetch) == (fate, of_fate[-1])
            assert decision.rule is rules.rules[of_fate[-1]]
            return
    assert (decision.fate, decision.rule) == (Fate.KEEP, None)


def test_the_last_swap_rule_wins_and_says_why() -> None:
    rules = Rules(
        (
            rule("layers.*", prefetch=1, tier=Tier.HOST, where="run.yaml:3:9"),
            rule("layers.7", prefetch=4, tier=Tier.DISK, where="run.yaml:4:9"),
        )
    )
    decision = rules.decide("model.layers.7.mlp.mul")
    assert (decision.fate, decision.prefetch, decision.tier) == (Fate.SWAP, 4, Tier.DISK)
    assert decision.reason == "swap 'layers.7' (run.yaml:4:9)"
    assert rules.decide("model.layers.6.mlp.mul").reason == "swap 'layers.*' (run.yaml:3:9)"
    assert rules.decide("model.norm.mul").reason == "no rule names it"


def test_does_nothing() -> None:
    assert Rules().does_nothing
    assert Rules((rule("*", Fate.KEEP),)).does_nothing
    assert not Rules((rule("*"),)).does_nothing


LLAMA = [
    name
    for index in range(32)
    for layer in [f"model.layers.{index}"]
    for name in (layer, f"{layer}.self_attn", f"{layer}.self_attn.sdpa", f"{layer}.mlp", f"{layer}.mlp.mul")
] + ["model.norm", "lm_head"]


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("layers.*.mpl", ["layers.*.mlp"]),
        ("layer.0-15", ["layers.0-15"]),
        ("layers.40-50.mlp", ["layers.0-31.mlp"]),
        ("layers.32", ["layers.0-31"]),
        ("layers.mlp", ["layers.*.mlp"]),
        ("sdap", ["sdpa"]),
        ("h.0", []),
        ("zzzz", []),
    ],
)
def test_nearest_names(text: str, nearest: list[str]) -> None:
    assert nearest_names(Pattern.parse(text), LLAMA)[:1] == nearest


def test_unmatched() -> None:
    rules = Rules((rule("layers.0-15"), rule("layers.*.mpl", where="run.yaml:4:9"), rule("mlp.mul"), rule("h")))
    unmatched = rules.unmatched(LLAMA)
    assert [str(item.pattern) for item in unmatched] == ["layers.*.mpl", "h"]
    assert str(unmatched_error(unmatched[0], LLAMA)) == (
        "run.yaml:4:9: pattern 'layers.*.mpl' matches no layer, module or op of this model; nearest: 'layers.*.mlp', "
        "'layers.*.mlp.mul', 'model.layers.*.mlp'"
    )
    assert str(unmatched_error(unmatched[1], LLAMA)) == (
        "pattern 'h' matches no layer, module or op of this model; print the plan to see the names"
    )
