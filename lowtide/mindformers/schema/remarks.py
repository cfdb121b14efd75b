"""What is said once about many layers: upstream's tables, swaps that are undone, patterns that name nothing."""

from __future__ import annotations

from lowtide.mindformers.schema.aliases import family_of
from lowtide.mindformers.schema.issues import layers_text
from lowtide.mindformers.schema.layers import Work
from lowtide.mindformers.schema.names import Found, nearest
from lowtide.mindformers.schema.recompute import SELECT_KEYS


def head_lines(work: Work) -> list[str]:
    """What upstream prints before the first layer."""
    lines = []
    if not work.swap.is_on:
        lines.append(f"num_layers per stage: {work.grid.table()}")
        lines.append(f"Accumulated num_layers per stage: {work.grid.accumulated()}")
    tables = work.recompute.log_texts() | work.swap.normalized()
    lines.append(f"Formative layer_recompute: {tables['layer_recompute']}")
    for key, pattern in work.recompute.removed:
        lines.append(f"The pattern {pattern} in {key} conflicts with {key}_exclude and will be removed.")
    lines += [f"Formative {key}: {tables[key]}" for key in SELECT_KEYS]
    if work.swap.is_on:
        lines.append(f"Formative layer swap: {tables['layer_swap']}")
        lines.append(f"Formative op swap: {tables['op_swap']}")
    return lines


def report(work: Work) -> None:
    """Warnings that are about many layers at once: undone swaps, and patterns that name nothing."""
    report_lost(work)
    defaults: dict[str, list[tuple[str, list[Found]]]] = {}
    is_default = {(path, pattern): default for path, pattern, default in work.patterns()}
    for (path, pattern), found in work.asked.items():
        if is_default[path, pattern]:
            defaults.setdefault(path, []).append((pattern, found))
        else:
            _report_pattern(work, path, pattern, found)
    for path, group in defaults.items():
        if not any(one.groups for _, found in group for one in found):
            report_nothing(work, path, " and ".join(f"'{pattern}'" for pattern, _ in group), group[0][0])


def report_lost(work: Work) -> None:
    """Swaps that recompute undoes."""
    for (path, sentence), layers in work.lost.items():
        work.issues.warn(path, sentence.format(layers=layers_text(layers)))


def _report_pattern(work: Work, path: str, pattern: str, found: list[Found]) -> None:
    readings = {one.reading for one in found}
    if readings == {"free"}:
        work.issues.note(f"no effect: {path} '{pattern}', because it is a view or a cast in PyTorch")
    elif not readings & {"exact", "plain dots", "alias"}:
        report_nothing(work, path, f"'{pattern}'", pattern)
    elif "plain dots" in readings and work.issues.compat:
        separated = pattern.replace("\\.", ".").replace(".", "\\.")
        work.issues.warn(
            path, f"'{pattern}' has plain dots, with which upstream matches nothing; read as '{separated}'"
        )
    elif "alias" in readings and "exact" not in readings:
        names = next(one for one in found if one.reading == "alias").matches
        shown = ", ".join(f"'{match.name}'" for match in names)
        if work.issues.compat and family_of(work.trees[0]) in ("legacy", "mcore"):
            work.issues.warn(path, f"'{pattern}' is a Hugging Face name, which upstream does not know; read as {shown}")
        else:
            work.issues.note(f"{path}: '{pattern}' is here {shown}")


def report_nothing(work: Work, path: str, shown: str, pattern: str) -> None:
    tree = next((tree for tree in work.trees if tree is not None), {})
    names = nearest(pattern, tree)
    hint = "nearest: " + ", ".join(f"'{name}'" for name in names) if names else "names start below the layer"
    if pattern.startswith(("layers", "model")):
        hint = "names start below the layer, and layers are chosen by number"
    work.issues.tolerate(path, f"{shown} names nothing in a layer", meaning=f"it does nothing; {hint}", fix=hint)
