"""What a device can do, in a handful of numbers, and how long an operator takes on it by roofline.

What: `load_hardware("h200")`, or the path of a file of one's own. The files, devices/*.toml, are flat: one number a
line, and with each number where it comes from: 'measured: how', 'vendor: which document', 'published: where', or
'assumed: from what'. Rates are what programs reach. `read_numbers` finds such a file by its name or path, and checks it
whole.
Roofline: Williams, Waterman, Patterson, CACM 2009: an operator takes the longer of its arithmetic and its traffic.

Kernels that reach different rates have prices of their own: large products; attention, by kernel and by pass
(`ATTENTION_KERNELS`); element-wise operators one by one, as eager PyTorch runs them; and the same when a compiler or a
hand-written kernel fuses them, which then move at the rate of a copy.

Not covered: kernels that reach less than the stated rates; measured profiles replace all of this.

What connects the devices of a cluster, and how much of a device a whole step reaches: `load_cluster("h800")`, or the
path of a file of one's own, from files of the same form, clusters/*.toml. `ideal` leaves communication out.
Why beside the device: the same H100 stands in nodes of other widths, and what a training step reaches of a roofline is
a matter of the software around it.

Not covered: the shape of the network beyond "within a node" and "between nodes", and traffic of others on it.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from lowtide.config.source import MOST_YAML_BYTES, read_text
from lowtide.core.budget import DeviceMemory
from lowtide.errors import ConfigError, did_you_mean
from lowtide.timeline.step import Link
from lowtide.units import parse_bytes

OTHER_KERNELS = ("efficient", "cudnn", "flash3")
ATTENTION_KERNELS = ("flash", *OTHER_KERNELS)
"""`flash`: FlashAttention-2, what torch's `scaled_dot_product_attention` runs by default in 16 bits without a mask.
`efficient`: what it runs with a mask or in float32. `cudnn`, `flash3`: for who asks for them. The unfused way (`math`)
is no kernel: it is products and element-wise operators, and priced as these."""

_TILE = (128, 256)
"""Rows and columns (or the other way round) of a product that one multiprocessor makes at a time: NVIDIA, Matrix
Multiplication Background User's Guide, section 3 (tile and wave quantization)."""

_FORM = '{ value = 1.0, source = "measured: how" }'
_SOURCES = ("measured: ", "vendor: ", "published: ", "assumed: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a kind of file has in it."""

    folder: str
    """Of `timeline/`, with those that lowtide has."""
    kind: str
    """What they describe, for messages."""
    keys: tuple[str, ...]
    optional: tuple[str, ...] = ()
    may_be_zero: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    """Keys whose value may be written as a size: `80GB`."""


_DEVICE = Form(
    folder="devices",
    kind="hardware: unknown device",
    keys=(
        "memory_bytes",
        "flops_per_second.float32",
        "attention.flash.forward",
        "attention.flash.backward",
        "attention.ramp_tokens",
        "memory_bytes_per_second",
        "eager_bytes_per_second",
        "launch_seconds",
        "link.out_bytes_per_second",
        "link.in_bytes_per_second",
        "link.latency_seconds",
        "link.compute_share",
    ),
    optional=(
        "flops_per_second.bfloat16",
        "flops_per_second.float16",
        "flops_per_second.float64",
        "flops_per_second.float8",
        "multiprocessors",
        *(f"attention.{kernel}.{side}" for kernel in OTHER_KERNELS for side in ("forward", "backward")),
    ),
    may_be_zero=("attention.ramp_tokens", "link.latency_seconds", "link.compute_share"),
    sizes=("memory_bytes",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device of one rank. All rates are what programs reach, not what is printed on the box."""

    name: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    """Of large matrix products, by dtype (`float8`, `bfloat16`, `float16`, `float32`)."""
    attention: Mapping[str, tuple[float, float]]
    """Kernel -> floating point operations per second of its forward and of its backward in bfloat16, on long sequences;
    of another dtype as much less as its products are. A causal mask halves the operations."""
    ramp_tokens: float
    """Attention over so many tokens reaches half of that rate; over n tokens, n / (n + ramp_tokens) of it."""
    memory_bytes_per_second: float
    """Of a copy within the device, counted as read and written: what fused kernels reach."""
    eager_bytes_per_second: float
    """What element-wise operators reach that run one by one."""
    launch_seconds: float
    """The least that any operator takes."""
    link: Link
    multiprocessors: int = 0
    """That work on the tiles of one product side by side; 0: not known, and products have no tiles."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Key of the file (`link.latency_seconds`) -> 'measured: ...', 'vendor: ...', 'published: ...', 'assumed: ...'."""

    def op_seconds(self, flops: float, nbytes: float, dtype: str, *, is_fused: bool = False) -> float:
        """Roofline time of one operator with `flops` floating point operations that moves `nbytes`. One without any
        moves them at the eager rate, unless it `is_fused`."""
        rate = self.memory_bytes_per_second if flops or is_fused else self.eager_bytes_per_second
        return max(flops / self._flops_per_second(dtype), nbytes / rate, self.launch_seconds)

    def tile_share(self, rows: int, columns: int) -> float:
        """Of a product `[rows, columns]`, how full its tiles and the last wave of them are: it takes as long as if all
        were. The better of the two ways to lay a tile."""
        if not self.multiprocessors or not rows or not columns:
            return 1.0
        return max(self._filled(rows, columns), self._filled(columns, rows))

    def _filled(self, rows: int, columns: int) -> float:
        num_tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
        num_slots = math.ceil(num_tiles / self.multiprocessors) * self.multiprocessors
        return rows * columns / (num_slots * math.prod(_TILE))

    def attention_seconds(
        self,
        flops: float,
        nbytes: float,
        dtype: str,
        *,
        tokens: float,
        kernel: str = "flash",
        is_backward: bool = False,
    ) -> float:
        """The same of fused attention over `tokens` keys. A kernel that the file does not know is priced as `flash`."""
        rate = self.attention.get(kernel, self.attention["flash"])[is_backward]
        rate *= tokens / (tokens + self.ramp_tokens)
        if "bfloat16" in self.flops_per_second:
            rate *= self._flops_per_second(dtype) / self.flops_per_second["bfloat16"]
        return max(flops / rate, nbytes / self.memory_bytes_per_second, self.launch_seconds)

    def _flops_per_second(self, dtype: str) -> float:
        return self.flops_per_second.get(dtype, self.flops_per_second["float32"])


def load_hardware(name_or_path: str | os.PathLike[str]) -> Hardware:
    """The device of that name, or of a TOML file of the same form as the ones in `timeline/devices`.

    Raises `ConfigError`: name unknown, file missing, not TOML, or any mistake in a key, a number or a source.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise ConfigError(f"hardware: expected a name such as 'h200', or the path of a TOML file, not {name_or_path!r}")
    name, where, numbers, sources = read_numbers(name_or_path, _DEVICE)
    flops = {key.partition(".")[2]: value for key, value in numbers.items() if key.startswith("flops_per_second.")}
    return Hardware(
        name=name,
        memory_bytes=int(numbers["memory_bytes"]),
        flops_per_second=flops,
        attention={
            kernel: (numbers[f"attention.{kernel}.forward"], numbers[f"attention.{kernel}.backward"])
            for kernel in ATTENTION_KERNELS
            if _is_whole(numbers, kernel, where)
        },
        ramp_tokens=numbers["attention.ramp_tokens"],
        memory_bytes_per_second=numbers["memory_bytes_per_second"],
        eager_bytes_per_second=numbers["eager_bytes_per_second"],
        launch_seconds=numbers["launch_seconds"],
        link=Link(**{key.partition(".")[2]: value for key, value in numbers.items() if key.startswith("link.")}),
        multiprocessors=int(numbers.get("multiprocessors", 0)),
        sources=sources,
    )


def memory_of_hardware(hardware: Hardware) -> DeviceMemory:
    """Of such a device, of which nothing is taken yet."""
    nbytes = hardware.memory_bytes
    return DeviceMemory(total_bytes=nbytes, free_bytes=nbytes, where=f"of {hardware.name}")


def _is_whole(numbers: Mapping[str, float], kernel: str, where: str) -> bool:
    """Whether the file has this kernel. Half of one is a mistake."""
    missing = [key for key in (f"attention.{kernel}.forward", f"attention.{kernel}.backward") if key not in numbers]
    if len(missing) == 1:
        raise ConfigError(f"{where}: missing key '{missing[0]}'; a kernel has a rate for each pass")
    return not missing


# -- files of numbers with sources ------------------------------------------------------------------------------------


def read_numbers(name_or_path: str | os.PathLike[str], form: Form) -> tuple[str, str, dict[str, float], dict[str, str]]:
    """Of one of the files of this form, or of one of the user's own, whose path ends in .toml: its name, where it is
    for messages, its numbers and their sources by key. In a name case does not count, nor do blanks, hyphens and
    underscores: `RTX 4090` is `rtx4090`.

    Raises `ConfigError`: name unknown, file missing, not TOML, or any mistake in a key, a number or a source.
    """
    where = os.fspath(name_or_path)
    if where.endswith(".toml"):
        name, text = Path(where).stem, read_text(where, most_bytes=MOST_YAML_BYTES)
    else:
        name = "".join(letter for letter in where.casefold() if letter not in " -_")
        names = known_names(form.folder)
        if name not in names:
            own = "; leave it out for this machine's own device" if name in ("cuda", "gpu", "npu", "xpu") else ""
            raise ConfigError(
                f"{form.kind} '{where}'{own or did_you_mean(where.lower(), names)} (known: {', '.join(names)}; a file "
                "of your own is given by its path, which ends in .toml)"
            )
        where = f"{name}.toml"
        text = (_folder(form.folder) / where).read_text(encoding="utf-8")
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{where}: not valid TOML: {error}; lowtide/timeline/devices/h200.toml shows the form"
        ) from None
    except (RecursionError, ValueError):  # tables without end; an integer of more than 4,300 digits
        raise ConfigError(
            f"{where}: not valid TOML: nested too deep, or a number of too many digits; write it anew"
        ) from None
    known = (*form.keys, *form.optional)
    entries = _flatten(document, "", known)
    for key in entries:
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(key, known)}")
    for key in form.keys:
        if key not in entries:
            raise ConfigError(f"{where}: missing key '{key}'; write {key} = {_FORM}")
    numbers = {key: _number(where, key, entry, form) for key, entry in entries.items()}
    return name, where, numbers, {key: entry["source"] for key, entry in entries.items()}


def known_names(folder: str) -> tuple[str, ...]:
    """The files that lowtide has in this folder of `timeline/`, in alphabetical order, without their ending."""
    names = (entry.name for entry in _folder(folder).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def _folder(name: str) -> Any:
    return resources.files("lowtide.timeline") / name


def _flatten(table: Mapping[str, Any], prefix: str, known: Collection[str]) -> dict[str, Any]:
    """`link.latency_seconds` -> what was written there. A table is what known keys begin with."""
    entries: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict) and any(name.startswith(f"{prefix}{key}.") for name in known):
            entries |= _flatten(value, f"{prefix}{key}.", known)
        else:
            entries[prefix + key] = value
    return entries


def _number(where: str, key: str, entry: Any, form: Form) -> float:
    if not isinstance(entry, dict) or set(entry) != {"value", "source"}:
        raise ConfigError(f"{where}: {key}: expected {_FORM}")
    source, value = entry["source"], entry["value"]
    if not isinstance(source, str) or not source.startswith(_SOURCES):
        *some, last = (f"'{start}'" for start in _SOURCES)
        raise ConfigError(f"{where}: {key}: a source starts with {', '.join(some)} or {last}, unlike {source!r}")
    if key in form.sizes and isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {key}: {error}") from None
    may_be_zero = key in form.may_be_zero
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not may_be_zero):
        wanted = "a number, zero or more" if may_be_zero else "a number greater than zero"
        raise ConfigError(f"{where}: {key}: expected {wanted}, not {value!r}")
    return float(value)


# -- what connects devices --------------------------------------------------------------------------------------------


_KEYS = (
    "node_devices",
    "node_bytes_per_second",
    "network_bytes_per_second",
    "message_seconds",
    "overlap_share",
    "compute_share",
    "reserved_share",
)
_CLUSTER = Form(
    folder="clusters",
    kind="cluster: unknown cluster",
    keys=_KEYS,
    may_be_zero=("message_seconds", "overlap_share", "reserved_share"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices in nodes. Rates are those of one device, each way."""

    name: str
    node_devices: int
    node_bytes_per_second: float
    """Between two devices of a node."""
    network_bytes_per_second: float
    """Between two devices of different nodes."""
    message_seconds: float
    """Added to each collective and to each hand-over."""
    overlap_share: float
    """Seconds that compute loses for each second that a collective runs beside it."""
    compute_share: float
    """Of the device's rates, what whole training steps reach."""
    reserved_share: float
    """Of the device's memory, what is left to libraries, communication buffers and fragmentation."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def bytes_per_second(self, num_devices: int) -> float:
        """Of a group of so many devices that lie side by side: within a node if they fit into one."""
        is_within = num_devices <= self.node_devices
        return self.node_bytes_per_second if is_within else self.network_bytes_per_second


def load_cluster(name_or_path: str | os.PathLike[str]) -> Cluster:
    """The cluster of that name, or of a TOML file. Raises `ConfigError` as `load_hardware` does."""
    name, where, numbers, sources = read_numbers(name_or_path, _CLUSTER)
    for key in ("overlap_share", "compute_share", "reserved_share"):
        if numbers[key] > 1:
            raise ConfigError(f"{where}: {key}: a share is at most 1, not {numbers[key]:g}")
    devices = numbers.pop("node_devices")
    if devices != int(devices):
        raise ConfigError(f"{where}: node_devices: expected a whole number, not {devices:g}")
    return Cluster(name=name, node_devices=int(devices), sources=sources, **numbers)


def all_to_all_seconds(
    cluster: Cluster, ranks: int, *, tokens: int, vector_bytes: int, top_k: int, most_nodes: int | None
) -> float:
    """One dispatch (or combine) of a vector for each token, to `top_k` experts spread over `ranks` that lie side by
    side. Each node that a token goes to gets it once over the network; within the node it is passed on to each expert.
    The two are at work at the same time, and the slower one counts."""
    if ranks == 1:
        return 0.0
    nodes = max(1, -(-ranks // cluster.node_devices))
    reached = nodes * (1 - (1 - 1 / nodes) ** top_k)
    if most_nodes is not None:
        reached = min(reached, most_nodes)
    across = tokens * vector_bytes * reached * (1 - 1 / nodes)
    within = tokens * vector_bytes * top_k * (1 - 1 / min(ranks, cluster.node_devices))
    slower = max(across / cluster.network_bytes_per_second, within / cluster.node_bytes_per_second)
    return cluster.message_seconds + slower


def ring_seconds(cluster: Cluster, ranks: int, nbytes: float, *, stride: int = 1) -> float:
    """A gather to, or a scattered sum over, `ranks` that are `stride` devices apart; `nbytes` is the whole of it."""
    if ranks == 1:
        return 0.0
    rate = cluster.bytes_per_second(ranks * stride)
    if ranks * stride > cluster.node_devices:
        # A ring enters and leaves each node once, and each device of the node that is in the group can be the place:
        # so many rings run side by side, each with a share of the bytes, over an adapter of its own.
        rate = min(cluster.node_bytes_per_second, rate * max(1, cluster.node_devices // stride))
    return cluster.message_seconds + nbytes * (ranks - 1) / ranks / rate


def hand_over_seconds(cluster: Cluster, nbytes: float, *, stride: int, ranks: int) -> float:
    """Activations, or their gradient, to the next of `ranks` stages that are `stride` devices apart."""
    if ranks == 1:
        return 0.0
    return cluster.message_seconds + nbytes / cluster.bytes_per_second(ranks * stride)
