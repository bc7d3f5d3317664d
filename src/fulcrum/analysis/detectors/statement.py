"""Statement check: PRIVACY.md and privacy.json beside the ledger, the plan and the settings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fulcrum.analysis.detectors.executed import Executed
from fulcrum.analysis.detectors.findings import Reading, contradict
from fulcrum.privacy.ledger import Ledger

NAME = "statement check"


def read_statement(run: Executed) -> Iterator[Reading]:
    """All readings of a run's statements: the one at its end, and the one when it stopped."""
    with Ledger.open(run.folder / "ledger.sqlite") as ledger:
        said = ledger.epsilons(run.facts["run"]["id"])
        releases = {name: spend.releases for name, spend in ledger.get_spends(run.facts["run"]["id"]).items()}
    yield from read_facts(run, run.facts, said, releases)
    if run.early:
        done = max((result.round for result in run.results[: run.early["run"]["rounds_done"]]), default=0)
        yield contradict(
            NAME,
            "rounds of a stopped run",
            run.early["run"]["rounds_done"] < done or run.early["run"]["finished"],
            f"the statement of the stopped run has {run.early['run']['rounds_done']} rounds, and {done} were played",
        )
        yield contradict(
            NAME,
            "epsilon of a stopped run",
            _number(run.early["epsilon"]) > _number(run.facts["epsilon"]) + 1e-9,
            "the run's epsilon was larger when it stopped than at its end",
        )
    yield from read_page(run)
    yield from read_other_files(run)


def read_facts(
    run: Executed, facts: Mapping[str, Any], said: Mapping[str, float], releases: Mapping[str, int]
) -> Iterator[Reading]:
    """privacy.json beside the ledger, the plan and the settings."""
    if run.refused:  # the statement is that of the stop
        return
    plan, settings, rule = run.federation.plan, run.federation.settings, run.federation.problem.rule
    enforced = facts["accountant"]["enforced"]
    largest = max((said.get(plan.name(k), 0.0) for k in range(plan.parties)), default=0.0)
    yield _compare("epsilon", _number(facts["epsilon"]), largest, "the largest of the parties' ledgers")
    yield _compare("delta", float(facts["delta"]), settings.privacy.delta, "privacy.delta")
    for what, shown, wanted in (
        ("unit", facts["unit"], settings.privacy.unit),
        ("aggregation", facts["aggregation"], settings.privacy.aggregation),
    ):
        yield contradict(NAME, what, shown != wanted, f"the statement's {what} is {shown!r}, and the run's {wanted!r}")
    yield _compare("rounds", facts["run"]["rounds_done"], max(r.round for r in run.results), "the rounds played")
    rows = {row["name"]: row for row in facts["parties"]}
    for k in range(plan.parties):
        name, group = plan.name(k), plan.group(k)
        row = rows.get(name)
        if row is None:
            yield contradict(NAME, "parties", True, f"party {name} is missing in the statement", name)
            continue
        yield _compare(
            "epsilon of a party", _number(row[f"epsilon_{enforced}"]), said.get(name, 0.0), "its ledger", name
        )
        yield _compare("releases of a party", row["releases"], releases.get(name, 0), "its ledger", name)
        yield _compare("sigma of a party", float(row["sigma"]), group.sigma, "its plan", name)
        yield _compare("rate of a party", float(row["rate"]), group.rate, "its plan", name)
        yield _compare("units of a party", row["units"], plan.units(k), "its plan", name)
    if settings.privacy.epsilon is not None and plan.private:
        yield contradict(
            NAME,
            "promise",
            _number(facts["epsilon"]) > max(settings.privacy.epsilon, *settings.privacy.budgets.values(), 0.0) * 1.0005,
            f"epsilon = {facts['epsilon']} was spent, and {settings.privacy.epsilon:g} was asked for",
        )
    yield contradict(
        NAME,
        "guarantee",
        facts["guarantee"] == "yes" and (not rule.sound or not rule.private or facts["simulation"]),
        f"the statement calls the epsilon of the rule {rule.name!r} a guarantee, which it is not",
    )
    seeded = run.federation.problem.randomness.mode != "secure"
    yield contradict(NAME, "simulation", seeded and not facts["simulation"], "a seeded run's statement does not say so")
    evaluation, dataset = facts["evaluation"], run.federation.problem.dataset
    private = settings.data.validation > 0 and not dataset.public
    scored = any(result.metrics for result in run.results)
    yield contradict(
        NAME,
        "evaluation",
        private and scored and (evaluation["kind"] != "held-out" or "epsilon" not in evaluation),
        "private held-out records were scored, and the statement says nothing of what that cost them",
    )


def read_page(run: Executed) -> Iterator[Reading]:
    """PRIVACY.md beside privacy.json: the number that a person reads."""
    first = re.search(r"epsilon = ([0-9.einfat+-]+)", run.page)
    shown = math.inf if first is None or first[1].startswith("inf") else float(first[1].rstrip("."))
    wanted = _number(run.facts["epsilon"])
    off = shown < wanted * (1 - 1e-9) or (math.isfinite(wanted) and shown > wanted * 1.01 + 1e-3)
    yield contradict(
        NAME,
        "page",
        first is None or off,
        f"PRIVACY.md says epsilon = {shown:g}, and privacy.json {wanted:.6g}",
    )
    delta = re.search(r"delta = ([0-9.e+-]+)", run.page)
    yield contradict(
        NAME,
        "delta on the page",
        delta is None or abs(float(delta[1].rstrip(".")) / float(run.facts["delta"]) - 1) > 1e-3,
        "PRIVACY.md has another delta than privacy.json",
    )


def read_other_files(run: Executed) -> Iterator[Reading]:
    """Every other place where a person or a program reads this run's epsilon: it must not be below the statement's."""
    if run.refused:
        return
    wanted = _number(run.facts["epsilon"])
    summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    yield _compare("epsilon of summary.json", _number(summary["epsilon"]), wanted, "the statement")
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = max(lines, key=lambda line: int(line["round"]))
    yield _compare("epsilon of metrics.jsonl", _number(last["epsilon"]), wanted, "the statement")
    yield _compare("epsilon of the last round", run.results[-1].epsilon, wanted, "the statement")
    card = (run.folder / "MODEL.md").read_text(encoding="utf-8")
    shown = re.search(r"^\| epsilon \| ([0-9.einfat+-]+)", card, re.MULTILINE)
    yield contradict(
        NAME,
        "model card",
        shown is None or _number(shown[1]) < wanted * (1 - 1e-9),
        f"MODEL.md says epsilon = {shown[1] if shown else 'nothing'}, and the statement {wanted:.6g}",
    )
    told = [result.round for result in run.results if result.diagnostics]
    yield contradict(
        NAME,
        "diagnostics",
        bool(told) and not run.federation.settings.run.diagnostics,
        f"round {told[0] if told else 0} tells diagnostics, which are not private, and nobody asked for them",
    )


def _number(value: float | str) -> float:
    """A number of privacy.json, where infinity is text."""
    return float(value)


def _compare(what: str, shown: float, wanted: float, source: str, party: str = "") -> Reading:
    """A number of the statement beside where it must come from; equal but for rounding."""
    same = shown == wanted or abs(shown - wanted) <= 1e-6 * max(abs(shown), abs(wanted))
    return contradict(
        NAME, what, not same, f"the statement has {shown:.6g} as the {what}, and {source} says {wanted:.6g}", party
    )
