"""`lowtide glossary [WORD]`: what a word of lowtide's output means; without one, all of them.

What: `WORDS` in the order in which a reader of `lowtide plan` meets them; `find` looks one up, also by another name for
it.
Exit status: 0, or 2 for a word that is not in it.
Not covered: words of PyTorch, and keys of the run file (docs/memory-rules.md).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from lowtide.cli.waiting import width_of_stdout
from lowtide.core.text_table import wrapped
from lowtide.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Word:
    """One entry."""

    name: str
    text: str
    also: tuple[str, ...] = ()
    """Other names for the same."""


WORDS = (
    Word("plan", "What happens to each activation, and why: it is kept, swapped or recomputed."),
    Word("peak", "The most bytes on the device at any moment of a step: weights, gradients, optimizer state, "
         "activations and temporaries together.", ("peak memory",)),
    Word("budget", "The peak that you allow, per device: 20GiB, 90% (of the device's memory) or auto (what the device "
         "has, less 5 %)."),
    Word("preset", "A goal instead of a budget. fastest: keep all that fits. smallest: the least peak. balanced: where "
         "less memory begins to cost much time."),
    Word("everything kept", "The same step without a plan: every activation stays on the device.", ("plain",)),
    Word("floor", "The smallest peak that any plan of this step can reach. A smaller budget is refused."),
    Word("step", "Here one micro-batch: its forward pass and its backward pass."),
    Word("micro-batch", "What goes through the model at once. Several make one step of the optimizer."),
    Word("stall", "Time in which compute waits for a copy that is not there yet.", ("stalls",)),
    Word("gap", "How far from the fastest possible a plan can be, at most. At most 0.6 % from the fastest possible "
         "means: no plan for this budget, found or not, saves more than 0.6 % of the step."),
    Word("certainty", "Where bytes and times come from: observed in a real step, or traced without one, with times by "
         "roofline."),
    Word("roofline", "A time for an operator: the longer of its arithmetic and its memory traffic at the device's "
         "rates."),
    Word("activation", "A tensor that the forward pass leaves for the backward pass.", ("activations",)),
    Word("site", "One activation's memory, with a name: model.layers.3.mlp.mul is what the operator mul made there.",
         ("sites", "sites each", "storage")),
    Word("layer", "A block that the model repeats, such as model.layers.3.", ("layers",)),
    Word("keep", "The activation stays on the device. It costs memory.", ("kept",)),
    Word("swap", "The activation is copied to main memory (or a disk), freed, and fetched before it is needed. It "
         "costs time on the link, which is free while compute hides it.", ("swapped", "offload", "away and back")),
    Word("recompute", "The activation is dropped and computed again in the backward pass. It costs compute.",
         ("recomputed", "checkpointing", "gradient checkpointing", "activation checkpointing", "remat")),
    Word("recipe", "The short list of operators that computes an activation again."),
    Word("retained input", "A tensor that PyTorch would free and that is kept because a recipe starts from it.",
        ("retained inputs", "anchor")),
    Word("codec", "A smaller form of an activation that gives back the same bits.", ("codecs",)),
    Word(
        "check",
        "How what is recomputed is proven while you train. full: in every forward pass. deep: also every byte "
        "of it.",
    ),
    Word("min_bytes", "Activations smaller than this are kept. Left out, it fits the model."),
    Word("weights", "The parameters of the model."),
    Word("gradients", "One number for each trained parameter. They grow during the backward pass and are freed when "
         "the optimizer has used them; with several micro-batches a step they stay from one to the next."),
    Word("optimizer state", "What the optimizer remembers of each parameter: for AdamW two numbers.",
         ("optimizer", "optimizer's state")),
    Word("temporaries", "Results that live for a few operators, the loss and the head's output among them.",
         ("head, loss, temporaries",)),
    Word("buffers and batch", "Tensors of the model that are not trained, and the inputs of the step."),
    Word("at the worst moment", "The moment of the step with the highest peak. It may be another one with the plan "
         "than without."),
    Word("link", "The connection between the device and main memory (or a disk), over which copies go."),
    Word("prefetch", "Fetching a swapped activation before it is needed."),
    Word("tier", "Where a swapped activation goes: host (main memory) or disk."),
    Word("digest", "Twelve characters that are the same for plans that do the same."),
    Word("spill", "A swap of an activation that the plan keeps, because a step saved more than planned.", ("spills",)),
    Word("headroom", "Memory that a budget of auto leaves free: the driver, libraries and blocks that do not fit need "
         "it."),
    Word("masters", "A second copy of 16-bit weights in 32 bits, which some optimizers keep.", ("fp32 masters",)),
)  # fmt: skip


def find(name: str) -> Word:
    """The entry of a word. Raises `ConfigError` for an unknown word."""
    wanted = " ".join(name.casefold().replace("_", " ").split())
    for word in WORDS:
        if wanted in [own.replace("_", " ") for own in (word.name, *word.also)]:
            return word
    names = [own for word in WORDS for own in (word.name, *word.also)]
    raise ConfigError(
        f"glossary: no entry for '{name}'{did_you_mean(wanted, names)} (lowtide glossary lists all words)"
    )


def lines(word: Word) -> list[str]:
    """An entry as text."""
    also = f" (also: {', '.join(word.also)})" if word.also else ""
    return [f"{word.name}{also}", f"    {word.text}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "word", nargs="*", metavar="WORD", help="one word of the output, such as gap; absent: all of them"
    )


def run(args: argparse.Namespace) -> int:
    """Prints entries. Raises `ConfigError` for an unknown word."""
    words = [find(" ".join(args.word))] if args.word else list(WORDS)
    told = (line for word in words for line in lines(word))
    print("\n".join(wrapped(told, width_of_stdout(), indent="    ")))
    return 0
