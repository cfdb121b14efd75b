"""Files that no person writes: refused in one line, quickly and in little memory, with the place of the mistake.

Every message is exact. The property at the end feeds text that nobody thought of to every loader: nothing but
`ConfigError` ever comes out, as one line.
"""
# ruff: noqa: E501 -- messages are easier to compare in one piece

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lowtide import Plan, Profile
from lowtide.cli.run_file import load_run
from lowtide.config.memory import load_memory
from lowtide.config.source import MOST_DEPTH, MOST_VALUES, MOST_YAML_BYTES, read_yaml
from lowtide.core.rules import Pattern
from lowtide.errors import ConfigError
from lowtide.mindformers.schema import read_sections
from lowtide.timeline.hardware import load_hardware
from lowtide.units import MIB

MODEL = "model: {model_type: llama, hidden_size: 16}\n"
TRAIN = "train: {steps: 1, device: cpu}\n"
GOOD = MODEL + TRAIN
MANY = "9" * 5000
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def quick_and_small() -> Iterator[None]:
    """Less than a second of this thread's own time, and no new high-water mark of memory beyond some megabytes."""
    peak_kib, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    yield
    assert time.thread_time() - start < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 128 << 10


def resolved(path: str) -> object:
    """What a file's sections mean."""
    return read_sections(path).resolve()


def refused(call: Callable[[], object]) -> str:
    with quick_and_small(), pytest.raises(ConfigError) as caught:
        call()
    text = str(caught.value)
    assert text.isprintable()
    return text


def refused_run(text: str) -> str:
    Path("run.yaml").write_text(text)
    return refused(lambda: load_run("run.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "run.yaml:5:8: the file has more than 10,000 values; write fewer, such as ranges"),
        ("a: [" + "1," * 50_000 + "]", "run.yaml:1:20001: the file has more than 10,000 values; write fewer, such as ranges"),
        ("a: " + "[" * 3000, "run.yaml:1:67: nested more than 64 deep; no setting is"),
        ("{a: " * 3000, "run.yaml:1:257: nested more than 64 deep; no setting is"),
        ("- " * 3000 + "1", "run.yaml:1:129: nested more than 64 deep; no setting is"),
        (
            "a: &a " + "[" * 60 + "]" * 60 + "\nb: " + "[" * 10 + "*a" + "]" * 10,
            "run.yaml:2:14: nested more than 64 deep; no setting is",
        ),
        ("a: &a {b: [*a]}", "run.yaml:1:4: this alias contains itself; write the value out"),
        ("a: *b", "run.yaml:1:4: not valid YAML: found undefined alias 'b'; put text that begins with * in quotes"),
        ("a: *.mlp", "run.yaml:1:5: not valid YAML: expected alphabetic or numeric character, but found '.'; "
         "put text that begins with * or & in quotes: '*.mlp'"),
        ("a:\n\tb: 1", "run.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token; "
         "indent with blanks, and put text that begins with @, % or ` in quotes"),
        ("a: 'b", "run.yaml:1:6: not valid YAML: found unexpected end of stream; close the quote that is open there"),
        ("a: [1, 2\nb: 3", "run.yaml:2:2: not valid YAML: expected ',' or ']', but got ':'; "
         "write a comma between values and close the bracket"),
        ("a: 1\n  b: 2", "run.yaml:2:4: not valid YAML: mapping values are not allowed here; "
         "put the value in quotes, or write one 'key: value' a line"),
        (" a: 1\nb: 2", "run.yaml:2:1: not valid YAML: expected '<document start>', but found '<block mapping start>'; "
         "begin all keys of a section in one column"),
        ("a: \"\\q\"", "run.yaml:1:6: not valid YAML: found unknown escape character 'q'; "
         "write each \\ twice, or use single quotes"),
        ("a:\n  b: 1\n c: 2", "run.yaml:3:2: not valid YAML: expected <block end>, but found '<block mapping start>'; "
         "begin all keys of a section in one column, and close quotes"),
        ("a: !!", "run.yaml:1:6: not valid YAML: expected URI, but found '\\x00'; "
         "look for an open quote or bracket and for uneven indentation there"),
        ("*b : 1", "run.yaml:1:1: expected a plain key, not an alias; write 'key: value'"),
        ('"a\\nb\\e[31m": 1', r"run.yaml:1:1: expected a plain key, not 'a\nb\x1b[31m'; write a short word"),
        ("? " + "k" * 2000 + "\n: 1", f"run.yaml:1:3: expected a plain key, not '{'k' * 59}...{'k' * 16}'; write a short word"),
        ("<<: {a: 1}", "run.yaml:1:1: merge keys ('<<') are not supported; write the keys out"),
        ("a: {b: 1, b: 2}", "run.yaml:1:11: duplicate key 'a.b'; it is already set at run.yaml:1:5; remove one of them"),
        (
            "a: !!python/object/apply:os.system ['touch pwned']",
            "run.yaml:1:4: tags such as 'tag:yaml.org,2002:python/object/apply:os.system' are not supported; remove it",
        ),
        ("!!python/name:os.system a: 1", "run.yaml:1:1: tags such as 'tag:yaml.org,2002:python/name:os.system' are "
         "not supported; remove it"),
        ("a: !" + "x" * 9000 + " 1", f"run.yaml:1:4: tags such as '!{'x' * 58}...{'x' * 16}' are not supported; remove it"),
        ("a: \x00", "run.yaml: not valid YAML: character 4: special characters are not allowed; remove it"),
        ('a: "\\U00110000"', "run.yaml: not valid YAML: a character or a version that does not exist; remove it"),
        (f"%YAML {MANY}.1\n---\na: 1", "run.yaml: not valid YAML: a character or a version that does not exist; remove it"),
        ("#" * MOST_YAML_BYTES + "\n", "run.yaml: larger than 262,144 bytes; this is another kind of file"),
    ],
)  # fmt: skip
def test_text(text: str, message: str) -> None:
    Path("run.yaml").write_text(text)
    assert refused(lambda: read_yaml("run.yaml")) == message
    assert not Path("pwned").exists()


def test_what_is_just_allowed() -> None:
    Path("a.yaml").write_text("[" * MOST_DEPTH + "]" * MOST_DEPTH)
    read_yaml("a.yaml")
    Path("a.yaml").write_text("a: &a [1]\nb: [" + "*a, " * ((MOST_VALUES - 4) // 2) + "]")
    read_yaml("a.yaml")
    Path("a.yaml").write_text("#" * (MOST_YAML_BYTES - 2) + "\n1")
    with quick_and_small():
        read_yaml("a.yaml")


def make_pipe(name: str) -> None:
    os.mkfifo(name)


def make_huge(name: str) -> None:
    with Path(name).open("wb") as file:
        file.truncate(1 << 30)


def make_link_to_itself(name: str) -> None:
    Path(name).symlink_to(name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_pipe, "run.toml: this is a pipe or a device; write its content to a file first"),
        (make_huge, "run.toml: larger than 262,144 bytes; this is another kind of file"),
        (os.mkdir, "run.toml: this is a folder; give a file"),
        (make_link_to_itself, "run.toml: cannot be read: Too many levels of symbolic links; check the path"),
        (lambda name: Path(name).write_bytes(b"a: \xe9"), "run.toml: this is not a text file; save it as UTF-8"),
        (lambda name: Path(name).symlink_to("/dev/zero"), "run.toml: this is a pipe or a device; write its content to a "
         "file first"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [load_run, load_memory, resolved, load_hardware])
def test_files_that_are_no_files(make: Callable[[str], object], message: str, read: Callable[[str], object]) -> None:
    make("run.toml")
    assert refused(lambda: read("run.toml")) == message


def test_names_of_files() -> None:
    assert refused(lambda: read_yaml("a\0b")) == r"'a\x00b' is not the name of a file; check the path"
    assert refused(lambda: read_yaml("\ud800")) == r"'\ud800' is not the name of a file; check the path"
    assert refused(lambda: read_yaml("x" * 300)) == f"{'x' * 300}: cannot be read: File name too long; check the path"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODEL + f"train: {{steps: {MANY}}}", "run.yaml:2:16: expected an integer for 'train.steps', not a number of 5000 "
         "digits; the most is 18"),
        (MODEL + "train: {steps: 9999999999999999}", "run.yaml:2:16: 'train.steps' must be at most 1000000000000000, not "
         "9999999999999999"),
        (MODEL + f"train: {{steps: 1, learning_rate: {MANY}}}", "run.yaml:2:34: expected a number for "
         "'train.learning_rate', not a number of 5000 digits; the most is 18"),
        (MODEL + "train: {steps: 1, learning_rate: 1e999}", "run.yaml:2:34: 'train.learning_rate' must be above 0, not "
         "inf"),
        (MODEL + "train: {steps: 1, weight_decay: 1e999}", "run.yaml:2:33: 'train.weight_decay' must be at least 0, not "
         "inf"),
        (MODEL + "train: {steps: 1, threads: 99999}", "run.yaml:2:28: 'train.threads' must be at most 1024, not 99999"),
        (MODEL + "train: {steps: 1, batch_size: 99999999999}", "run.yaml:2:31: 'train.batch_size' must be at most "
         "1048576, not 99999999999"),
        (MODEL + "train: {steps: 1, batch_size: -1}", "run.yaml:2:31: 'train.batch_size' must be at least 1, not -1"),
        (GOOD + "data: {sequence_length: 99999999999}", "run.yaml:3:25: 'data.sequence_length' must be at most 67108864, "
         "not 99999999999"),
        (MODEL + "train: {steps: 1, batch_size: 100000}\ndata: {sequence_length: 100000}", "run.yaml:2:31: "
         "'train.batch_size' of 100000 sequences of 100000 makes 10000000000 tokens per micro-batch, of at most 134217728; "
         "lower one of them"),
        ("model: {model_type: llama, num_hidden_layers: 100000000}\n" + TRAIN, "run.yaml:1:47: "
         "'model.num_hidden_layers' must be at most 4096, not 100000000"),
        ("model: {model_type: llama, num_hidden_layers: -2}\n" + TRAIN, "run.yaml:1:47: 'model.num_hidden_layers' must be at "
         "least 0, not -2"),
        ("model: {model_type: gpt2, n_layer: 100000000}\n" + TRAIN, "run.yaml:1:36: 'model.n_layer' must be at most 4096, "
         "not 100000000"),
        ("model: {model_type: qwen3_moe, num_experts: 100000000}\n" + TRAIN, "run.yaml:1:45: 'model.num_experts' must be "
         "at most 4096, not 100000000"),
        (f"model: {{model_type: llama, hidden_size: {MANY}}}\n" + TRAIN, "run.yaml:1:41: expected an integer for "
         "'model.hidden_size', not a number of 5000 digits; the most is 18"),
        ("model: {path: " + "x" * 300 + "}\n" + TRAIN, f"run.yaml:1:15: 'model.path': {'x' * 300} is not a folder on this "
         "machine; check the path (nothing is downloaded)"),
        (MODEL + 'train: {steps: 1, output_dir: "a\\0b"}', "run.yaml:2:31: expected text without control characters for "
         r"'train.output_dir', not 'a\x00b'"),
        (MODEL + 'train: {steps: 1, output_dir: "\\ud800"}', "run.yaml:2:31: expected text without control characters for "
         r"'train.output_dir', not '\ud800'"),
        (MODEL + "train: {steps: 1, output_dir: " + "x" * 5000 + "}", "run.yaml:2:31: expected at most 4,096 characters "
         "for 'train.output_dir', not 5,000"),
        (GOOD + "data: {files: [a, ~nobody-at-all/x, \"b\\n\"]}", "run.yaml:3:37: expected text without control characters "
         r"for 'data.files[2]', not 'b\n'"),
        (GOOD + "memory: {disk_path: ~nobody-at-all/x}", "run.yaml:3:21: there is no user 'nobody-at-all' for "
         "'memory.disk_path'; write the path out"),
        (GOOD + "memory: {budget: 99999999999999999999999999}", "run.yaml:3:18: expected a size such as 20GiB, a share such as 90% or auto for "
         "'memory.budget', not a number of 26 digits; the most is 18"),
        (GOOD + "memory: {budget: 99999999999999999999GiB}", "run.yaml:3:18: 'memory.budget': 99999999999999999999GiB is "
         "too large; the largest size is 1048576TiB"),
        (GOOD + "memory: {budget: " + MANY + "GiB}", f"run.yaml:3:18: 'memory.budget': '{'9' * 40}...' is not a size; write "
         "a number and a unit, such as 20GiB, 512MiB or 20GB"),
        (GOOD + "memory: {recompute: [layers.0-" + "9" * 900 + "]}", f"run.yaml:3:22: pattern 'layers.0-{'9' * 900}': "
         f"'0-{'9' * 900}' is not a range or a list of indices; write 0-15 or 0,2,5-7"),
        (GOOD + "memory: {recompute: ['" + "*a" * 2000 + "']}", "run.yaml:3:22: pattern '" + "*a" * 20 + "...' has 4000 "
         "characters, of at most 1000; write several patterns"),
        ("train: {steps: " + "x" * 100_000 + "}\n", f"run.yaml:1:16: expected an integer for 'train.steps', not '{'x' * 59}"
         f"...{'x' * 16}'"),
    ],
)  # fmt: skip
def test_run_files(text: str, message: str) -> None:
    assert refused_run(text) == message


UPSTREAM = "model: {model_config: {type: LlamaConfig, num_layers: 4}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {model_config: {num_layers: 100000000}}\nrecompute_config: {recompute: true}", "run.yaml:1:36: "
         "'num_layers' must be at most 4096, not 100000000"),
        (UPSTREAM + "parallel_config: {pipeline_stage: 1000000000}\nrecompute_config: {recompute: true}",
         "run.yaml:2:35: 'pipeline_stage' must be at most 4096, not 1000000000"),
        (UPSTREAM + f"recompute_config: {{recompute: [{MANY}]}}", "run.yaml:2:32: a number of 5000 digits; the most is 18"),
        (UPSTREAM + f"recompute: {{mode: full, full_recompute_layer: ['0-{'9' * 30}']}}", "run.yaml:2:48: "
         f"'recompute.full_recompute_layer[0]' must be a layer such as '5' or a range such as '0-3', not '0-{'9' * 30}'"),
        (UPSTREAM + "recompute_config: {select_recompute: ['" + "(" * 1001 + "']}", "run.yaml:2:39: "
         "'recompute_config.select_recompute[0]' has 1001 characters, of at most 1000; write names with '\\.' between the "
         f"levels: '{'(' * 1001}'"),
    ],
)  # fmt: skip
def test_files_of_mindspore_transformers(text: str, message: str) -> None:
    Path("run.yaml").write_text(text)
    assert refused(lambda: resolved("run.yaml")) == message


def test_chunks_and_stages_together() -> None:
    text = (
        "model: {model_config: {num_layers: 4096, pp_interleave_num: 4096}}\nparallel_config: {pipeline_stage: 4096}\n"
    )
    text += "parallel: {pipeline_config: {pipeline_interleave: true}}\nrecompute_config: {recompute: true}"
    Path("run.yaml").write_text(text)
    expected = "run.yaml:1:61: 'pp_interleave_num' makes 16777216 chunks on 4096 stages; the most is 4096"
    assert refused(lambda: resolved("run.yaml")) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"budget": 10**5000}, "memory.budget: expected a size such as 20GiB, a share such as 90% or auto, not a number of 5001 digits; the most is 18"),
        ({"min_bytes": float("nan")}, "memory.min_bytes: expected a size such as 20GiB, not nan"),
        ({"budget": "1\n" * 100}, r"memory.budget: '1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n1\n...' is not a "
         "size; write a number and a unit, such as 20GiB, 512MiB or 20GB"),
        ({"swap": [{"match": "a", "prefetch": -(10**5000)}]}, "memory.swap[0].prefetch: expected an integer or null, not a "
         "number of 5001 digits; the most is 18"),
        ({"x" * 10_000: 1}, None),
        ({10**5000: 1}, "memory: expected text keys, not a value of type int; write the key in quotes"),
    ],
)  # fmt: skip
def test_mappings(value: Any, message: str | None) -> None:
    text = refused(lambda: load_memory(value))
    if message is None:
        assert len(text) < 4000
        assert text.endswith("layers")
    else:
        assert text == message


def test_a_mapping_that_contains_itself() -> None:
    value: dict[str, Any] = {}
    value["recompute"] = [value]
    text = refused(lambda: load_memory(value))
    assert text.endswith(": nested more than 64 deep; no setting is")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, ": not valid JSON: nested too deep"),
        (f'{{"schema": {MANY}}}', ": not valid JSON: a number of too many digits"),
        ("{", ":1:2: not valid JSON: Expecting property name enclosed in double quotes"),
    ],
)
def test_plans_and_profiles(text: str, message: str) -> None:
    for kind, what in ((Plan, "plan"), (Profile, "profile")):
        told = f"{what}{message}; write one: lowtide {what} RUN.yaml --out {what}.json"
        assert refused(lambda kind=kind: kind.from_json(text)) == told


@pytest.mark.parametrize("text", ["a = " + "[" * 3000, f"a = {MANY}"])
def test_hardware(text: str) -> None:
    Path("x.toml").write_text(text)
    expected = "x.toml: not valid TOML: nested too deep, or a number of too many digits; write it anew"
    assert refused(lambda: load_hardware("x.toml")) == expected


def test_a_pattern_of_many_stars_is_matched_in_one_go() -> None:
    pattern = Pattern.parse("*a" * 400 + "b")
    with quick_and_small():
        assert not pattern.matches("layers." + "a" * 900)
    assert Pattern.parse("*a*c*").matches("xabcb")
    assert Pattern.parse("a*a").matches("aba")
    assert not Pattern.parse("a*a").matches("a")


# ---- a property

LOADERS: list[Callable[[str], object]] = [load_run, load_memory, resolved, load_hardware, read_sections]
WORDS = [
    *("model", "train", "data", "memory", "steps", "budget", "recompute", "swap", "keep", "match", "prefetch", "layers"),
    *("recompute_config", "swap_config", "select_recompute", "op_swap", "layer_swap", "op_name", "backward_prefetch"),
    *("model_type", "num_layers", "num_hidden_layers", "batch_size", "sequence_length", "files", "mode", "enable"),
    *("true", "false", "all", "auto", "full", "select", "null", "~", "~x", "llama", "layers.0-3", "layers.*.mlp", "'0-3'"),
    *("0", "1", "-1", "1e999", "-0", ".5", "0x10", "1_0", "20GiB", "9" * 30, "-" + "9" * 30, "nan", ".inf", '"\\0"', '"\\n"'),
    *("<<", "&a", "*a", "!!int", "!x", "|", ">", "'", '"', "?", "%", "@", "`", "\t", "\u2028", "\u00e9", "\U0001f600", "#"),
]  # fmt: skip


def random_text(draw: random.Random) -> str:
    """Words of the files in structures that may or may not be YAML."""

    def value(depth: int) -> str:
        kind = draw.random()
        if depth > 4 or kind < 0.5:
            return draw.choice(WORDS)
        items = [value(depth + 1) for _ in range(draw.randrange(4))]
        if kind < 0.65:
            return f"[{', '.join(items)}]"
        return "{" + ", ".join(f"{draw.choice(WORDS)}: {item}" for item in items) + "}"

    lines = [f"{draw.choice(WORDS)}: {value(0)}" for _ in range(draw.randrange(1, 6))]
    if draw.random() < 0.5:
        lines = [MODEL.strip(), TRAIN.strip(), *lines]
    text = "\n".join(lines)
    for _ in range(draw.choice([0, 0, 1, 5])):  # damage
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice(WORDS) + text[at + draw.randrange(3) :]
    return text


def what_it_says(read: Callable[[str], object]) -> str | None:
    """The refusal of `x.toml`; None if it is taken. Any other exception comes out."""
    try:
        read("x.toml")
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", range(4))
def test_nothing_but_config_errors(seed: int) -> None:
    draw = random.Random(seed)
    num_refused = 0
    for _ in range(100):
        text = random_text(draw)
        Path("x.toml").write_text(text, encoding="utf-8")
        for read in LOADERS:
            said = what_it_says(read)
            num_refused += said is not None
            assert said is None or (said.isprintable() and len(said) < 4096), text
    assert num_refused > 100


@pytest.mark.parametrize("seed", range(2))
def test_nothing_but_config_errors_from_bytes(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        good = bytearray(
            (GOOD + "memory: {budget: 20GiB, swap: [layers.0]}\nrecompute_config: {recompute: [1]}\n").encode()
        )
        for _ in range(draw.randrange(1, 8)):
            good[draw.randrange(len(good))] = draw.randrange(256)
        Path("x.toml").write_bytes(good)
        for read in LOADERS:
            said = what_it_says(read)
            assert said is None or said.isprintable(), bytes(good)


def test_limits_are_far_from_real_files() -> None:
    """The largest file of settings in this repository is a twentieth of what is allowed."""
    root = Path(__file__).parents[2] / "examples"
    assert max(path.stat().st_size for path in root.glob("*.yaml")) < MOST_YAML_BYTES / 20 < MIB
