"""A finished run: what its files can still show. No canary was in it, so there is no coin to guess.

- The account is computed again from the ledger's events, and compared with the statement and the summary.
- On public data, the model's losses on its training records and on test records are compared: membership by a loss
  threshold, one-run bounds. They hold if the test records were drawn like the training records.

It says nothing about noise and clipping while the run trained: for that, run with canaries (`fulcrum audit CONFIG`).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulcrum.analysis.audit.bounds import BoolVector
from fulcrum.analysis.audit.curves import FloatVector, merge_events
from fulcrum.analysis.audit.in_run import CanaryView, FamilyCache, make_entry
from fulcrum.analysis.audit.outcome import Audit, PartyAudit, conclude
from fulcrum.data import Dataset
from fulcrum.data.records import Records
from fulcrum.errors import DataError, RunError
from fulcrum.privacy.accounting import compute_epsilon
from fulcrum.privacy.events import Gaussian
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs.binding import StoredRun
from fulcrum.runs.preparation import prepare_unrehearsed
from fulcrum.runs.stored_model import load_trained
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation

MAX_RECORDS = 20_000
"""Records of each party, and test records, that are scored at most."""
RELATIVE = 1e-6
"""Two epsilons agree if they differ by less than this part."""


def audit_finished_run(folder: Path | str, confidence: float = 0.95) -> Audit:
    """What the folder of a finished run still shows; see the module's text for what it cannot say."""
    stored = StoredRun.read(Path(folder))
    if "audit" in stored.facts:
        raise RunError(
            f"{folder} was trained with canaries, and its audit.json says what they showed; audit another run."
        )
    settings = stored.read_settings()
    with stored.open_ledger() as ledger:
        delta, events, checks = reconcile(stored, ledger, settings.privacy.delta)
        claimed = ledger.epsilons(stored.id)
    notes = [
        "no canary was in this run: noise and clipping of its rounds cannot be measured afterwards; "
        "fulcrum audit with the same settings trains again with canaries",
    ]
    parties: list[PartyAudit] = []
    federation, why = prepare_again(stored, settings)
    if federation is None:
        notes.append(f"records were not scored: {why}")
    else:
        dataset, plan = federation.problem.dataset, federation.plan
        notes.append(
            "membership by loss holds if test records were drawn like training records, and is a weak attack: the "
            "final model alone, no shadow models (fulcrum attack has those)"
        )
        families, entries = FamilyCache(), []
        test = score_records(stored.path, dataset, dataset.test_records)
        members = {plan.name(k): federation.problem.partition.indices(k) for k in range(plan.parties)}
        if federation.settings.data.partition != "iid":
            # A party's own records differ from the test records in more than membership.
            members = {}
            notes.append("the parties' records are not drawn alike, so all members are compared with the test records")
        costliest = max(claimed, key=lambda name: claimed[name])
        everybody = torch.randperm(len(dataset.records), generator=torch.Generator().manual_seed(0))
        members["all parties"] = everybody
        for name, rows in members.items():
            who = name if name in events else costliest
            own = dataset.records.take(rows[:MAX_RECORDS])
            view = pair_scores(score_records(stored.path, dataset, own), test, events[who])
            entries.append(make_entry(name, claimed[who], view, delta, families))
        parties = conclude(entries, confidence)
    seen = "after the fact: ledger and statement; on public data the final model's loss on members and on others"
    return Audit(seen, "members", delta, confidence, tuple(parties), checks=checks, notes=tuple(notes))


def prepare_again(stored: StoredRun, settings: Settings) -> tuple[Federation | None, str]:
    """The run's federation, if its members may be compared with test records; else why not."""
    if "flower" in stored.facts:
        return None, "they are at the parties"
    try:
        federation = prepare_unrehearsed(settings)
    except DataError:
        return None, "the run's data is not there any more"
    dataset, plan = federation.problem.dataset, federation.plan
    if not dataset.public:
        return None, "the data is private, and nobody has paid for a look at its losses"
    if dataset.test is None:
        return None, "there are no test records to compare with"
    if plan.central is not None or not plan.private:
        return None, "the run has no noise" if not plan.private else "at unit client a party is one unit"
    return federation, ""


def reconcile(
    stored: StoredRun, ledger: Ledger, delta: float
) -> tuple[float, dict[str, tuple[Gaussian, ...]], dict[str, bool]]:
    """The events of every party as its ledger has them, and whether statement, summary and rounds agree with them."""
    lines = [json.loads(line) for line in (stored.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    statement, summary = (_read_json(stored.path / name) for name in ("privacy.json", "summary.json"))
    delta = float(statement.get("delta", delta))
    found: dict[str, list[Gaussian]] = {}
    rounds = 0
    for t in range(max(len(lines), 1) + 1):
        reserved = ledger.list_round_reservations(stored.id, range(t, t + 1))
        rounds += bool(reserved)
        for party, events in reserved:
            found.setdefault(party, []).extend(event for event in events if isinstance(event, Gaussian))
    spent = ledger.epsilons(stored.id)
    enforced = str(statement.get("accountant", {}).get("enforced", "rdp"))
    largest = max(spent.values(), default=math.nan)
    checks = {
        "the ledger has every round that released something": rounds >= sum(1 for line in lines if _took_part(line)),
        "the ledger's epsilon covers its own events": all(
            spent[party] >= compute_epsilon(events, delta, enforced) * (1 - RELATIVE) for party, events in found.items()
        ),
        "privacy.json says what the ledger says": _agree(statement.get("epsilon"), largest),
        "summary.json says what the ledger says": _agree(summary.get("epsilon"), largest),
    }
    return delta, {party: tuple(merge_events(events)) for party, events in found.items()}, checks


def _took_part(line: dict[str, Any]) -> bool:
    return line.get("participants") is None or len(line["participants"]) > 0


def _agree(told: Any, computed: float) -> bool:
    if isinstance(told, str):
        told = math.inf if told == "inf" else math.nan
    return isinstance(told, int | float) and (told == computed or abs(told - computed) <= RELATIVE * abs(computed))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read; finish the run with fulcrum resume, or restore the file.") from error
    if not isinstance(found, dict):
        raise RunError(f"{path} was edited or damaged; restore it from a copy.")
    return found


@torch.no_grad()
def score_records(folder: Path, dataset: Dataset, records: Records) -> FloatVector:
    """Minus the loss of the final model on each record: [n]."""
    trained = load_trained(folder)
    found = []
    for piece in torch.arange(min(len(records), MAX_RECORDS)).split(500):
        part = records.take(piece)
        found.append(-dataset.task.loss(trained.outputs(part.x), part.y).double())
    return torch.cat(found).nan_to_num(0.0, 0.0, 0.0).numpy()


def pair_scores(members: FloatVector, others: FloatVector, events: tuple[Gaussian, ...]) -> CanaryView:
    """Scores of members and of others in an order that fair coins of a fixed seed decide, one coin per place.

    One-run bounds are about independent coins, so members and others are not equally many: as many places are taken as
    the shorter of both lists almost surely lasts for.
    """
    generator = np.random.default_rng(0)
    count = min(len(members), len(others))
    places = max(count, 2 * count - math.ceil(12 * math.sqrt(count)))
    included: BoolVector = generator.random(places) < 0.5
    while max(int(included.sum()), int((~included).sum())) > count:
        included = included[:-1]
    scores: FloatVector = np.empty(len(included))
    scores[included] = generator.permutation(members)[: int(included.sum())]
    scores[~included] = generator.permutation(others)[: int((~included).sum())]
    return CanaryView(np.zeros((len(included), 0)), None, included, events, scores=scores)
