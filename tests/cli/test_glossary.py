"""The glossary: every word of a plan's output is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.cli.glossary import WORDS, find
from lowtide.cli.main import main
from lowtide.core.plan import Plan
from lowtide.errors import ConfigError

ROOT = Path(__file__).parents[2]
PRINTED = (
    "plan", "peak", "budget", "everything kept", "floor", "stalls", "recompute", "certainty", "sites",
    "retained inputs",
    "check", "recipe", "weights", "optimizer state", "buffers and batch", "gradients", "activations",
    "head, loss, temporaries", "at the worst moment", "kept", "swapped", "recomputed", "away and back", "prefetch",
    "tier", "sites each", "gap", "layers", "link", "preset", "min_bytes",
)  # fmt: skip


@pytest.mark.parametrize("word", PRINTED)
def test_what_is_printed_is_explained(word: str) -> None:
    assert find(word).text.endswith(".")


def test_rows_of_the_account_are_words_of_it() -> None:
    golden = (ROOT / "tests/core/golden/solved_plan.json").read_text(encoding="utf-8")
    for line in Plan.from_json(golden).account:
        find(line.what)


def test_no_word_stands_twice() -> None:
    names = [name for word in WORDS for name in (word.name, *word.also)]
    assert len(names) == len(set(names))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["glossary", "gradient", "Checkpointing"]) == 0
    assert capsys.readouterr().out == (
        "recompute (also: recomputed, checkpointing, gradient checkpointing, activation checkpointing, remat)\n"
        "    The activation is dropped and computed again in the backward pass. It costs compute.\n"
    )
    assert main(["glossary"]) == 0
    assert capsys.readouterr().out.count("\n    ") == len(WORDS)
    assert main(["glossary", "stal"]) == 2
    said = capsys.readouterr().err
    assert said == "glossary: no entry for 'stal'; did you mean 'stall'? (lowtide glossary lists all words)\n"


def test_an_unknown_word() -> None:
    with pytest.raises(ConfigError):
        find("")
