"""What a device can do, in a handful of numbers, and how long an operator takes on it by roofline.

Each number has a source: 'measured' (with the command) or 'vendor' (with the document). Files: hardware/*.toml.
Roofline: Williams, Waterman, Patterson, CACM 2009: an operator takes the longer of its arithmetic and its traffic.

Not covered: kernels that reach less than the stated shares; measured profiles replace all of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowtide.timeline.step import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device of one rank. All rates are what programs reach, not what is printed on the box."""

    name: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    """Of large matrix products, by dtype (`bfloat16`, `float16`, `float32`)."""
    attention_share: float
    """Fused attention reaches this share of the above."""
    memory_bytes_per_second: float
    launch_seconds: float
    """The least that any operator takes."""
    link: Link
    sources: Mapping[str, str] = field(default_factory=dict)
    """Number -> 'measured: ...' or 'vendor: ...'."""

    def op_seconds(self, flops: float, nbytes: float, dtype: str, *, is_attention: bool = False) -> float:
        """Roofline time of one operator with `flops` floating point operations that moves `nbytes`."""
        rate = self.flops_per_second.get(dtype, self.flops_per_second["float32"])
        if is_attention:
            rate *= self.attention_share
        return max(flops / rate, nbytes / self.memory_bytes_per_second, self.launch_seconds)
