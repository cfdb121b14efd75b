"""Cases that were recorded from MindSpore Transformers itself, and whether `resolve` gives the same.

What: `misses(case)` runs one case in the format of cases/upstream.json and lists what differs: tables, layers, what is
recomputed and swapped in each layer, log lines. Where upstream fails, strict mode must refuse; where it hangs or
crashes, compat may go on, but must warn.

As a program: `python tests/mindformers/schema/upstream.py FILE...` prints how many cases of each file agree.
Not covered: upstream's own error texts; ours are tested in test_cases.py.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from lowtide.errors import ConfigError
from lowtide.mindformers.schema import Resolution
from tests.support.sections import resolve

TREES = json.loads((Path(__file__).parent / "cases" / "upstream_trees.json").read_text())
_NOT_LOGGED_HERE = re.compile(
    r"(WARNING|Pipeline id list|Interleave id list|The configuration of select_recompute_exclude)"
)


def misses(case: dict[str, Any]) -> list[str]:
    """What differs, one line each."""
    if "recompute_config" in case:
        return _block_misses(case)
    layer_errors = [layer["error"] for layer in case["expected_per_layer"] or [] if layer.get("error")]
    fails = bool(case["expected_error"] or case["expected_check_rules_error"] or layer_errors)
    if fails:
        return _refusal_misses(case)
    try:
        result = _resolve(case, compat=True)
    except ConfigError as error:
        return [f"refused: {error}"]
    return _result_misses(case, result)


def _resolve(case: dict[str, Any], *, compat: bool) -> Resolution:
    sections = _written(case["input"])
    chunks = case["interleave"] if case.get("pipeline_interleave_enabled", True) else 1
    return resolve(
        sections["recompute_config"],
        sections["swap_config"],
        num_layers=case["num_layers"],
        pipeline_stage=case["pp"],
        pp_interleave_num=chunks,
        offset=_written(case["offset"]),
        names=TREES[case["layer_tree"]],
        compat=compat,
    )


def _refusal_misses(case: dict[str, Any]) -> list[str]:
    try:
        _resolve(case, compat=False)
        return ["strict mode does not refuse it"]
    except ConfigError:
        pass
    try:
        result = _resolve(case, compat=True)
    except ConfigError:
        return []
    return [] if result.warnings else ["compat goes on without a warning"]


def _result_misses(case: dict[str, Any], result: Resolution) -> list[str]:
    found: list[str] = []

    def compare(what: str, expected: Any, got: Any) -> None:
        if expected != got:
            found.append(f"{what}: expected {expected}, got {got}")

    for key, table in case["expected_normalized"].items():
        compare(key, table, result.normalized[key])
    if "num_layers_per_stage" in case:
        compare("num_layers_per_stage", case["num_layers_per_stage"], result.num_layers_per_stage)
    for expected in case["expected_per_layer"]:
        layer = result.layers[expected["layer"]]
        at = f"layer {layer.index}"
        compare(f"{at} place", (expected["stage"], expected["chunk"]), (layer.stage, layer.chunk))
        compare(f"{at} full", expected["full_recompute"], layer.full_recompute)
        compare(f"{at} recompute", sorted(expected["recompute_on"]), sorted(layer.recompute_ops))
        compare(f"{at} comm", sorted(expected.get("recompute_comm_op", [])), sorted(layer.comm_recompute_ops))
        compare(f"{at} excluded", sorted(expected.get("recompute_off", [])), sorted(layer.recompute_exclude_ops))
        effective = expected.get("swap_effective_rule1", {})
        swapped = {
            name: expected["offload_targets"][name]
            for name, entry in effective.items()
            if entry["status"] in ("active", "partial")
        }
        compare(f"{at} swap", swapped, layer.swap_ops)
        holes = {name for name, entry in effective.items() if entry["status"] == "partial"}
        compare(f"{at} holes", holes, set(layer.swap_holes))
    head = case.get("init_log") or case.get("expected_init_log") or []
    per_layer = [line for layer in case["expected_per_layer"] for line in layer["log"]]
    lines = [_line(text) for text in [*head, *per_layer]]
    compare(
        "log lines",
        [line for line in lines if not _NOT_LOGGED_HERE.match(line)],
        [_line(line) for line in result.log_lines],
    )
    return found


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text.removeprefix("INFO - ").replace("WARNING - ", "WARNING ")).strip()


def _block_misses(case: dict[str, Any]) -> list[str]:
    """A block of a YAML file that upstream ships."""
    expected = case["legacy_dev_result"]
    if expected is None or case["num_layers"] is None:
        return []
    chunks = case["pp_interleave_num"] if case["pipeline_interleave"] else 1
    try:
        result = resolve(
            case["recompute_config"],
            case["swap_config"],
            num_layers=expected["total_layers_passed_to_LayerSetting"],
            pipeline_stage=case["stage_num"] or case["pp"],
            pp_interleave_num=chunks,
            offset=case["offset"],
        )
    except ConfigError as error:
        return [] if expected["error"] or expected["check_rules_error"] else [f"refused: {error}"]
    found = []
    if result.num_layers_per_stage != expected["num_layers_per_stage"]:
        found.append(f"grid: {result.num_layers_per_stage}, not {expected['num_layers_per_stage']}")
    for key in ("layer_recompute", "select_recompute", "select_comm_recompute"):
        if result.normalized[key] != expected[key]:
            found.append(f"{key}: {result.normalized[key]}, not {expected[key]}")
    full = [layer.index for layer in result.layers if layer.full_recompute]
    if full != expected["full_recompute_layers"]:
        found.append(f"full: {full}, not {expected['full_recompute_layers']}")
    return found


def _written(value: Any) -> Any:
    """Python values from how the cases write what JSON has not: tuples and keys that are numbers."""
    if isinstance(value, dict):
        if set(value) == {"__tuple__"}:
            return tuple(map(_written, value["__tuple__"]))
        return {
            int(key.removeprefix("__int__:")) if key.startswith("__int__:") else key: _written(item)
            for key, item in value.items()
        }
    return [_written(item) for item in value] if isinstance(value, list) else value


def main(paths: list[str]) -> int:
    total = 0
    for path in paths:
        cases = [case for case in json.loads(Path(path).read_text()) if "schema" not in case]
        failed = {str(case.get("id") or case["path"]): found for case in cases if (found := misses(case))}
        for name, found in failed.items():
            print(f"{name}:", *found, sep="\n    ")
        print(f"{path}: {len(cases) - len(failed)} of {len(cases)} agree")
        total += len(failed)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
