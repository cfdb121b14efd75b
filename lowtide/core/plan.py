"""The plan: which fate each activation has, and why. It is the contract between the part that decides and the part
that does, so it is plain data: frozen, comparable, printable, and the same after a trip through JSON.

A plan made from rules knows the layers of the model and the rules. The sites (names, bytes, dtypes) are known once a
step was observed; until then `sites` is empty and the table shows the rules.

A plan that the solver found has `sites` from the start, with recipes and distances, and says what it will cost
(`predicted`) and where the bytes are at the worst moment (`account`).

Not covered in this version: schedules of pipelines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from lowtide.core.decisions import AccountLine, OptimizerPlacement, Prediction, SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.json_text import Mistake, build, parse_json
from lowtide.core.plan_table import plan_table
from lowtide.core.rules import Rules
from lowtide.errors import ConfigError

SCHEMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The fates of a model's activations. Sizes are bytes per rank."""

    layers: tuple[str, ...]
    """Dotted names of the layers, in order of the forward pass."""
    rules: Rules = field(default_factory=Rules)
    min_bytes: int
    """Storages smaller than this are kept."""
    host_budget_bytes: int | None = None
    disk_budget_bytes: int | None = None
    disk_path: str | None = None
    sites: tuple[SiteDecision, ...] = ()
    """In order of production; empty until a step was observed."""
    is_solved: bool = False
    """True when `sites` decides (a solver made it); else the rules decide, and `sites` shows what came of them."""
    check: Literal["full", "sampled", "deep"] = "full"
    """How recipes are proven in planned steps: 'full' (every forward pass), 'sampled' (some) or 'deep' (every byte)."""
    budget_bytes: int | None = None
    predicted: Prediction | None = None
    account: tuple[AccountLine, ...] = ()
    loss: str = "plain"
    """'sliced': the loss of the model in slices of rows, which has the same bits."""
    loss_rows: int | None = None
    """Of a block of head and loss (`memory.loss: {rows: ...}`), on which the bits depend; None: the head is whole."""
    mlp_rows: int | None = None
    """Of a block of an MLP (`memory.mlp`), likewise."""
    optimizer: OptimizerPlacement | None = None
    """Where the optimizer's state is between steps; None: it stays where it is."""
    audited_peak_bytes: int | None = None
    """The peak of steps in which every live byte was counted (`tide.audit()`), to stand beside the predicted one."""

    def with_sites(self, sites: Iterable[SiteDecision]) -> Plan:
        """The same plan with what was observed."""
        return dataclasses.replace(self, sites=tuple(sites))

    @property
    def does_nothing(self) -> bool:
        """True when every activation is kept (no rule says otherwise, or none of the observed sites is affected), and
        all of the optimizer's state, and the loss is plain."""
        if self.loss != "plain" or self.mlp_rows is not None or (self.optimizer is not None and self.optimizer.moves):
            return False
        if self.sites:
            return all(site.fate is Fate.KEEP and site.codec is None for site in self.sites)
        return self.rules.does_nothing

    def digest(self) -> str:
        """12 hex digits over what all ranks must agree on: rules, `min_bytes` and layer names, and the fates of a
        solved plan, and when the optimizer's state travels; not byte counts, not budgets, and not where a rule was
        written."""
        agreed = {
            "schema": SCHEMA,
            "layers": self.layers,
            "min_bytes": self.min_bytes,
            "rules": [{key: value for key, value in rule.items() if key != "where"} for rule in self.rules.to_plain()],
            "sites": [_agreed(site) for site in self.sites] if self.is_solved else [],
            **({} if self.check == "full" else {"check": self.check}),
            **({} if self.loss == "plain" else {"loss": self.loss}),
            **self._rows(),
            **({} if self.optimizer is None or not self.optimizer.moves else {"optimizer": self.optimizer.overlap}),
        }
        text = json.dumps(agreed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _rows(self) -> dict[str, int]:
        rows = {"loss_rows": self.loss_rows, "mlp_rows": self.mlp_rows}
        return {key: number for key, number in rows.items() if number is not None}

    def to_json(self) -> str:
        """JSON text with two-space indentation and a fixed order of keys; `Plan.from_json` gives back an equal plan."""
        document = {
            "schema": SCHEMA,
            "digest": self.digest(),
            "layers": self.layers,
            "min_bytes": self.min_bytes,
            "host_budget_bytes": self.host_budget_bytes,
            "disk_budget_bytes": self.disk_budget_bytes,
            "disk_path": self.disk_path,
            "rules": self.rules.to_plain(),
            "is_solved": self.is_solved,
            "check": self.check,
            "loss": self.loss,
            **self._rows(),
            "budget_bytes": self.budget_bytes,
            "predicted": None if self.predicted is None else dataclasses.asdict(self.predicted),
            "account": [dataclasses.asdict(line) for line in self.account],
            "optimizer": None if self.optimizer is None else dataclasses.asdict(self.optimizer),
            **({} if self.audited_peak_bytes is None else {"audited_peak_bytes": self.audited_peak_bytes}),
            "sites": [_site_to_dict(site) for site in self.sites],
        }
        return json.dumps(document, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Raises `ConfigError` when the text is something else or was edited badly."""
        document = parse_json(text, "plan", "; write one: lowtide plan RUN.yaml --out plan.json")
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema is None:
            raise ConfigError("plan: this is no plan of lowtide; write one: lowtide plan RUN.yaml --out plan.json")
        if schema != SCHEMA:
            raise ConfigError(
                f"plan: schema {schema} is not supported by this version; write the plan again (schema {SCHEMA})"
            )
        del document["schema"]
        digest = document.pop("digest", None)
        try:
            plan = build(cls, document)
        except (Mistake, ConfigError) as error:
            raise ConfigError(f"plan: {error}; write the plan again") from None
        if plan.digest() != digest:
            raise ConfigError(f"plan: the digest {digest} does not fit the rules and layers; write the plan again")
        return plan

    def __str__(self) -> str:
        return plan_table(self)


def _agreed(site: SiteDecision) -> tuple[Any, ...]:
    """What all ranks must agree on about one site."""
    codec = () if site.codec is None else (site.codec.kind,)
    return (site.name, site.fate.value, site.tier, site.prefetch, site.leave, *codec)


def _site_to_dict(site: SiteDecision) -> dict[str, Any]:
    """Without a codec where it has none, as plans were written before there were any."""
    entry = dataclasses.asdict(site)
    if site.codec is None:
        del entry["codec"]
    return entry
