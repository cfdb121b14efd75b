"""Details that decide: what hooks cost, how large a copy should be, what compute loses while copies run, and more.

    python -m benchmarks.details [--only hooks copy_size ...] [--device cuda]

Each piece is small and can be run apart:

- hooks: seconds that lowtide's hooks add for each saved tensor and each layer, with everything kept;
- copy_size: bytes per second out and in, alone and both at once, by the size of a copy;
- matmul_while_copying: how much slower matrix products are while copies run;
- prefetch_lead: step time and stalls of a swapped model by how many operators ahead fetches start;
- issue (accelerator): the host's time to issue a step, by fate: whether hooks hold the device up;
- pinned_memory (accelerator): lowtide's arena beside torch's caching host allocator, in seconds and bytes;
- fragmentation (accelerator): what the device's allocator reserves beyond what it has given out, by fate.

On a CPU the first three run unless `--only` says otherwise; the disk is its next tier.

Cost: half a minute on two cores, two minutes on a GPU. Not covered: several devices that copy at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.record import Record, hardware
from benchmarks.rows import Row, command_of, parser, run

ON_HOST = ("hooks", "copy_size", "matmul_while_copying")
_DEFAULTS = {"hidden": (256, 4096), "sequence": (256, 4096), "matrix": (512, 8192), "total_mib": (128, 2048)}
PIECES = (*ON_HOST, "prefetch_lead", "issue", "pinned_memory", "fragmentation")


def main(argv: Sequence[str]) -> int:
    options = parser("details", __doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--layers", type=int, default=4, help="of the Llama")
    options.add_argument("--hidden", type=int, help="of the Llama; 256 on a CPU, else 4096")
    options.add_argument("--sequence", type=int, help="of the Llama; 256 on a CPU, else 4096")
    options.add_argument("--matrix", type=int, help="of the products; 512 on a CPU, else 8192")
    options.add_argument("--total-mib", type=int, help="moved by each copy measurement; 128 on a CPU, else 2048")
    args = options.parse_args(argv)
    is_host = args.device == "cpu"
    for key, (on_host, elsewhere) in _DEFAULTS.items():
        if getattr(args, key) is None:
            setattr(args, key, on_host if is_host else elsewhere)
    record = Record(
        question="details",
        title="What do hooks, copies and allocators cost?",
        kind="measured",
        command=command_of("details", argv),
        settings={key: getattr(args, key) for key in ("rounds", "total_mib", "matrix", "layers", "hidden", "sequence")},
        rows=[],
        notes=["On a CPU the next tier is the disk, and copies take part of the same cores."] if is_host else [],
        hardware=hardware(args.device),
    )
    names = PIECES if args.only or not is_host else ON_HOST
    return run(record, [{"piece": name} for name in names], lambda piece: measure(piece, args), args)


def measure(piece: Mapping[str, Any], args: argparse.Namespace) -> list[Row]:
    """The rows of one piece."""
    from benchmarks import details_copies, details_steps

    makers: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
        "hooks": details_steps.hooks,
        "prefetch_lead": details_steps.prefetch_lead,
        "issue": details_steps.issue,
        "fragmentation": details_steps.fragmentation,
        "copy_size": details_copies.copy_size,
        "matmul_while_copying": details_copies.matmul_while_copying,
        "pinned_memory": details_copies.pinned_memory,
    }
    return makers[piece["piece"]](args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
