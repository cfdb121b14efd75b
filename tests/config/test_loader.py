"""The strict loader: every mistake is one exact line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from lowtide.config.loader import NO_KEY, ByteSize, Locations, load_mapping, load_tree
from lowtide.config.source import read_yaml
from lowtide.errors import ConfigError, FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    SHORTHAND: ClassVar[str] = "match"

    match: str
    prefetch: int = 1

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise FieldError("prefetch", f"must be 0 or more, not {self.prefetch}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    budget: ByteSize | None = None
    min_bytes: ByteSize = 7
    swap: Literal["auto", "none"] | tuple[Item, ...] = "none"
    patterns: Literal["all"] | tuple[str, ...] = ()
    pin: bool = True
    rate: float = 1.0
    steps: int | None = None
    colour: Literal["red", "green"] = "red"
    path: Path | None = None
    locations: Locations = field(default_factory=Locations, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str
    memory: Memory = Memory()
    model: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Takes any key."""

    REST: ClassVar[str] = "others"

    steps: int = 1
    others: dict[str, Any] = field(default_factory=dict)
    made: int = field(default=0, metadata=NO_KEY)
    locations: Locations = field(default_factory=Locations, compare=False)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def read(text: str, cls: type = Run, **options: Any) -> Any:
        Path("run.yaml").write_text(text, encoding="utf-8")
        return load_tree(read_yaml("run.yaml"), cls, **options)

    return read


GOOD = """\
name: no
memory:
  budget: 20GiB
  min_bytes: 4096
  swap:
    - layers.0-3
    - {match: layers.*.mlp, prefetch: 2}
  patterns: [layers.0-15, '12']
  pin: false
  rate: 1e-4
  steps: 1_000
  colour: green
  path: /tmp/x
model: {hidden: 64, eps: 1e-5, tied: true, act: silu, off: no, at: 12:30, quoted: "1", none: ~, dims: [1, 2.5]}
"""


def test_the_rest_of_the_keys_is_one_field(read: Any) -> None:
    """Also keys with the names of fields that are no keys."""
    found = read("steps: 3\nothers: 1\nmade: [2]\nlocations: {a: no}\n", Open)
    assert found == Open(steps=3, others={"others": 1, "made": [2], "locations": {"a": "no"}})
    assert found.locations.keys == {
        "steps": "run.yaml:1:1",
        "others": "run.yaml:2:1",
        "made": "run.yaml:3:1",
        "locations": "run.yaml:4:1",
    }
    assert found.locations.of("made") == "run.yaml:3:7"
    with pytest.raises(ConfigError) as error:
        read("3", Open)
    assert str(error.value) == "run.yaml:1:1: expected a mapping, not '3'; write 'key: value', with these keys: steps"


def test_a_good_file(read: Any) -> None:
    run = read(GOOD)
    assert run.name == "no"
    assert run.memory == Memory(
        budget=20 << 30,
        min_bytes=4096,
        swap=(Item(match="layers.0-3"), Item(match="layers.*.mlp", prefetch=2)),
        patterns=("layers.0-15", "12"),
        pin=False,
        rate=1e-4,
        steps=1000,
        colour="green",
        path=Path("/tmp/x"),
    )
    assert run.model == {
        "hidden": 64,
        "eps": 1e-5,
        "tied": True,
        "act": "silu",
        "off": "no",
        "at": "12:30",
        "quoted": "1",
        "none": None,
        "dims": [1, 2.5],
    }


def test_every_value_knows_where_it_was_written(read: Any) -> None:
    places = read(GOOD).memory.locations
    assert places.prefix == "memory"
    assert places.of("budget") == "run.yaml:3:11"
    assert places.of("swap[0]") == "run.yaml:6:7"
    assert places.of("swap[0].match") == "run.yaml:6:7"
    assert places.of("swap[1].prefetch") == "run.yaml:7:39"
    assert places.of("swap[1].tier") == "run.yaml:7:7"
    assert places.of("keep[0]") == "memory.keep[0]"
    assert places.of("") == "run.yaml:3:3"


def test_a_section_is_read_alone(read: Any) -> None:
    assert read("memory: {rate: 2}\nother: [1\n  ]\n", Memory, section="memory").rate == 2.0


KEYS = "budget, min_bytes, swap, patterns, pin, rate, steps, colour, path"
MEMORY_MISTAKES = [
    ("  budgett: 1", "run.yaml:3:3: unknown key 'memory.budgett'; did you mean 'budget'?"),
    (
        "  xyzzy: 1",
        "run.yaml:3:3: unknown key 'memory.xyzzy'; known keys: " + KEYS,
    ),
    ("  rate: 1\n  rate: 2", "run.yaml:4:3: duplicate key 'memory.rate'; it is already set at run.yaml:3:3; remove one "
     "of them"),
    ("  rate: fast", "run.yaml:3:9: expected a number for 'memory.rate', not 'fast'"),
    ("  rate: '1'", "run.yaml:3:9: expected a number for 'memory.rate', not the text '1'"),
    ("  rate: [1]", "run.yaml:3:9: expected a number for 'memory.rate', not a list"),
    ("  rate:", "run.yaml:3:8: expected a number for 'memory.rate', not nothing"),
    ("  rate: .nan", "run.yaml:3:9: expected a number for 'memory.rate', not '.nan'"),
    ("  steps: 1.5", "run.yaml:3:10: expected an integer or null for 'memory.steps', not '1.5'"),
    ("  pin: no", "run.yaml:3:8: expected true or false for 'memory.pin', not 'no'"),
    ("  pin: True", "run.yaml:3:8: expected true or false for 'memory.pin', not 'True'; did you mean 'true'?"),
    ("  colour: gren", "run.yaml:3:11: expected red or green for 'memory.colour', not 'gren'; did you mean 'green'?"),
    (
        "  swap: atuo",
        "run.yaml:3:9: expected auto, none or a list for 'memory.swap', not 'atuo'; did you mean 'auto'?",
    ),
    ("  swap: {a: 1}", "run.yaml:3:9: expected auto, none or a list for 'memory.swap', not a mapping"),
    (
        "  budget: 20 GiBB",
        "run.yaml:3:11: 'memory.budget': '20 GiBB' is not a size; write a number and a unit, such as 20GiB, 512MiB "
        "or 20GB",
    ),
    ("  min_bytes: [1]", "run.yaml:3:14: expected a size such as 20GiB for 'memory.min_bytes', not a list"),
    (
        "  swap: [{match: a, prefech: 2}]",
        "run.yaml:3:21: unknown key 'memory.swap[0].prefech'; did you mean 'prefetch'?",
    ),
    ("  swap: [{prefetch: 2}]", "run.yaml:3:10: missing key 'memory.swap[0].match'; expected text"),
    ("  swap: [a, {match: b, prefetch: two}]", None),
    (
        "  swap: [{match: b, prefetch: -1}]",
        "run.yaml:3:31: 'memory.swap[0].prefetch' must be 0 or more, not -1",
    ),
    ("  swap: [[a]]", "run.yaml:3:10: expected a mapping for 'memory.swap[0]', not a list; write 'key: value', with "
     "these keys: match, prefetch"),
    ("  path: [a]", "run.yaml:3:9: expected a path or null for 'memory.path', not a list"),
    ("  rate: !!python/name:os.system 1", "run.yaml:3:9: tags such as 'tag:yaml.org,2002:python/name:os.system' "
     "are not supported; remove it"),
    ("  <<: {rate: 1}", "run.yaml:3:3: merge keys ('<<') are not supported; write the keys out"),
    ("  ? [a]\n  : 1", "run.yaml:3:5: expected a plain key, not a list or a mapping; write 'key: value'"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), MEMORY_MISTAKES)
def test_mistakes_below_memory(read: Any, line: str, message: str | None) -> None:
    if message is None:
        message = "run.yaml:3:34: expected an integer for 'memory.swap[1].prefetch', not 'two'"
    with pytest.raises(ConfigError) as caught:
        read(f"name: x\nmemory:\n{line}\n")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml:1:1: the file is empty; write its sections, as in examples/"),
        ("# only a comment\n", "run.yaml:1:1: the file is empty; write its sections, as in examples/"),
        (
            "- a\n",
            "run.yaml:1:1: expected a mapping, not a list; write 'key: value', with these keys: name, memory, model",
        ),
        ("memory: {}\n", "run.yaml:1:1: missing key 'name'; expected text"),
        (
            "name: x\nmemory:\n",
            "run.yaml:2:8: expected a mapping for 'memory', not nothing; write 'key: value', with these keys: " + KEYS,
        ),
        (
            "name: x\nmodel: [\n",
            "run.yaml:3:1: not valid YAML: expected the node content, but found '<stream end>'; "
            "close the bracket or the quote that is open there",
        ),
        (
            "name: a: b\n",
            "run.yaml:1:8: not valid YAML: mapping values are not allowed here; put the value in quotes, or "
            "write one 'key: value' a line",
        ),
        (
            "name: x\n---\nname: y\n",
            "run.yaml:2:1: not valid YAML: found a second document; remove the line '---' and one of them",
        ),
        ("name: \x07\n", "run.yaml: not valid YAML: character 7: special characters are not allowed; remove it"),
        ("name: x\nmodel: &a {b: *a}\n", "run.yaml:2:8: this alias contains itself; write the value out"),
    ],
)
def test_mistakes_of_the_whole_file(read: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value) == message


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere/run.yaml: no such file; check the path$"):
        read_yaml("nowhere/run.yaml")


def test_a_directory_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": this is a folder; give a file$"):
        read_yaml(tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r": this is not a text file; save it as UTF-8$"):
        read_yaml(tmp_path / "x.yaml")


def test_a_missing_section(read: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read("memry: {}\n", Memory, section="memory")
    assert str(caught.value) == "run.yaml:1:1: unknown section 'memry'; did you mean 'memory'?"
    with pytest.raises(ConfigError) as caught:
        read("[]\n", Memory, section="memory")
    assert str(caught.value) == (
        "run.yaml:1:1: expected a mapping with the section 'memory', not a list; write 'memory:' and its keys below it"
    )


def test_a_good_mapping() -> None:
    memory = load_mapping(
        {"budget": "20GB", "min_bytes": 1, "swap": ["a", {"match": "b", "prefetch": 0}], "rate": 2, "colour": "green"},
        Memory,
    )
    assert memory.budget == 20 * 10**9
    assert memory.swap == (Item(match="a"), Item(match="b", prefetch=0))
    assert (memory.min_bytes, memory.rate, memory.colour) == (1, 2.0, "green")
    assert memory.locations.of("swap[1].match") == "memory.swap[1].match"
    assert load_mapping({"swap": None, "steps": None}, _Loose, where="x") == _Loose()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loose:
    swap: Any = None
    steps: int | None = None


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"budgett": 1}, "memory.budgett: unknown key; did you mean 'budget'?"),
        ({"swap": [{"match": "a", "prefech": 1}]}, "memory.swap[0].prefech: unknown key; did you mean 'prefetch'?"),
        ({"swap": [{}]}, "memory.swap[0].match: missing key; expected text"),
        ({"swap": "atuo"}, "memory.swap: expected auto, none or a list, not 'atuo'; did you mean 'auto'?"),
        ({"pin": 1}, "memory.pin: expected true or false, not 1"),
        ({"pin": "true"}, "memory.pin: expected true or false, not the text 'true'"),
        ({"steps": True}, "memory.steps: expected an integer or null, not True"),
        ({"rate": "1"}, "memory.rate: expected a number, not the text '1'"),
        ({"path": 3}, "memory.path: expected a path or null, not 3"),
        ({"budget": -1}, "memory.budget: -1 is not a size; a size is never negative"),
        ({"budget": 1.5}, "memory.budget: expected a size such as 20GiB, not 1.5"),
        ({"swap": [{"match": "a", "prefetch": -1}]}, "memory.swap[0].prefetch: must be 0 or more, not -1"),
        ({1: 2}, "memory: expected text keys, not 1; write the key in quotes"),
        ([], "memory: expected a mapping, not a list; write 'key: value', with these keys: " + KEYS),
    ],
)
def test_mistakes_in_a_mapping(mapping: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_mapping(mapping, Memory)
    assert str(caught.value) == message
