"""What people call from Python: `train`, `rounds`, `resume`; and the steps they are made of.

Settings files are read where they are needed, so that ready-made `Settings` train without pydantic.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fulcrum
from fulcrum import record
from fulcrum.accounting import Spend
from fulcrum.central import check_rule, local_problem
from fulcrum.clip import find_rule
from fulcrum.config import Settings, check
from fulcrum.coordinates import digest, folded
from fulcrum.data import Dataset, featured, holdout, load, split, unit_counts
from fulcrum.engine import find_engine
from fulcrum.errors import BudgetError, ConfigError, RunError
from fulcrum.federate import Federation, Snapshot, federate
from fulcrum.ledger import Ledger
from fulcrum.local import Problem
from fulcrum.models import Layout, build, refuse_mixing
from fulcrum.plan import affordable_rounds, make_plan
from fulcrum.record import RunFolder
from fulcrum.rng import make
from fulcrum.statement import statement, to_markdown
from fulcrum.types import RoundResult

OnRound = Callable[[RoundResult], None]


@dataclass(frozen=True)
class Result:
    """A finished (or stopped) run.

    accuracy (a fraction) and loss are on public test data. epsilon is the largest over the parties,
    epsilons each party's, delta theirs all; where `sound` is False epsilon is nominal, and where
    `summary["aggregation"]` is "ideal-secagg" it assumes a secure aggregation that is simulated. C lists the
    clipping norm of every round. model is an ordinary nn.Module with the trained weights. summary is
    what summary.json holds; folder is where it lies, None where nothing was kept.
    """

    accuracy: float
    loss: float
    epsilon: float
    epsilons: tuple[float, ...]
    delta: float
    sound: bool
    C: tuple[float, ...]
    model: nn.Module
    settings: Settings
    summary: dict[str, Any]
    folder: Path | None


def prepare(settings: Settings, dataset: Dataset | None = None, model: nn.Module | None = None) -> Federation:
    """Load the data, split it, build the model, plan the privacy: everything that can go wrong before training.

    dataset and model take the place of what the settings name, for data and models made in Python.
    """
    check(settings)
    rule = find_rule(settings.clip.rule)
    device = find_device(settings.run.device)
    dataset = dataset or load(settings.data.source, settings.data.dir)
    if settings.data.validation > 0:
        dataset = holdout(dataset, settings.data.validation, settings.run.seed)
    dataset = featured(dataset, settings.data, device)
    if settings.privacy.unit == "person" and dataset.person is None:
        raise ConfigError(
            f"privacy.unit = 'person' needs an id for each record, and {dataset.name} has none; "
            "give an .npz with an array named person, or use unit example."
        )
    partition = split(dataset, settings.data, settings.run.seed)
    if model is not None and settings.model.coordinates != "plain":
        raise ConfigError(
            "model.coordinates is for models that the settings name; set it to plain, and hand over "
            "fulcrum.coordinates.centred(model, facts)."
        )
    if model is None:
        model = build(settings.model, tuple(dataset.x.shape[1:]), dataset.classes, settings.run.seed)
    refuse_mixing(model, dataset.x[:2])
    model = model.to(device)
    layout = Layout.of(model)
    problem = Problem(
        dataset=dataset,
        partition=partition,
        model=model,
        layout=layout,
        rule=rule,
        randomness=make(settings.privacy.randomness, settings.run.seed),
        unit=settings.privacy.unit,
        groups=layout.layers if settings.clip.groups == "layer" else (),
        device=device,
        diagnostics=settings.run.diagnostics,
        precision=settings.run.precision,
        workers=settings.run.workers,
    )
    check_rule(rule, settings, problem)
    plan = make_plan(settings, partition, unit_counts(dataset, partition, settings.privacy.unit), rule)
    return Federation(settings, problem, plan, find_engine(settings.run.engine, local_problem(problem)))


def find_device(name: str) -> torch.device:
    """The device a setting names; `auto` takes a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"run.device = {name!r} is not known; use auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"run.device = {name!r}, but this machine has no GPU that PyTorch can use; use cpu.")
    return device


def ledger_warnings(federation: Federation) -> list[str]:
    """What a kept ledger says about this run: parties whose budget will run out before it ends.

    Raises BudgetError where no party can pay for even one round.
    """
    path = federation.settings.run.ledger
    if not path or not Path(path).is_file():
        return []
    with Ledger.open(path) as ledger:
        short = affordable_rounds(federation.plan, ledger)
    if not short:
        return []
    fewest, most_ = min(short.values()), max(short.values())
    names = ", ".join(list(short)[:3]) + (", ..." if len(short) > 3 else "")
    says = f"{len(short)} of {federation.plan.parties} parties ({names}) have budget in {path} for "
    says += f"{fewest} of {federation.plan.rounds} rounds" if fewest == most_ else f"{fewest} to {most_} rounds"
    if most_ == 0 and len(short) == federation.plan.parties:
        raise BudgetError(f"{says}; lower --epsilon, or raise their budget: fulcrum ledger {path} --budget EPSILON")
    return [f"{says}; they sit out when it is spent."]


# --- running ------------------------------------------------------------------------------------


def execute(
    federation: Federation,
    out: Path | str | None = None,
    on_round: OnRound | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Result:
    """Train to the end. With `out`, a new folder there holds the run and makes it resumable.

    facts go into run.json beside the usual ones; an "id" among them is the run's id in ledgers.
    """
    run = str((facts or {}).get("id", uuid.uuid4().hex))
    if out is None:
        with Ledger.open(federation.settings.run.ledger or ":memory:") as ledger:
            return _finish(federation, None, ledger, run, None, [], on_round)
    with closing(RunFolder.create(Path(out))) as folder:
        from fulcrum import settings_file

        folder.write_text("settings.toml", settings_file.dump(federation.settings))
        folder.write_json("environment.json", record.environment(federation.problem.device))
        folder.write_json(
            "run.json",
            {
                "id": run,
                "created": record.now(),
                "version": fulcrum.__version__,
                "data": federation.problem.dataset.fingerprint,
                "parameters": federation.problem.layout.dim,
                "buffers": digest(federation.problem.model),
                "unit": federation.problem.unit,
                "aggregation": federation.plan.aggregation,
                **(facts or {}),
            },
        )
        with Ledger.open(_ledger_path(federation.settings, folder.path)) as ledger:
            return _finish(federation, folder, ledger, run, None, [], on_round)


def resume(
    folder: Path | str,
    on_round: OnRound | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
) -> Result:
    """Continue a run where it stopped. A seeded run ends with the same bits as if it had not stopped.

    dataset and model must be given again where they were given to `train` as objects.
    """
    from fulcrum import settings_file

    if "flower" in record.load_json(Path(folder), "run.json"):
        raise RunError(f"{folder} was served to parties elsewhere; continue it with: fulcrum serve --resume {folder}")
    return go_on(prepare(settings_file.read(Path(folder) / "settings.toml"), dataset, model), folder, on_round)


def go_on(federation: Federation, folder: Path | str, on_round: OnRound | None = None) -> Result:
    """Continue the run in a folder with a federation that was prepared anew from its settings."""
    path = Path(folder)
    facts = record.load_json(path, "run.json")
    problem = federation.problem
    if facts.get("data") != problem.dataset.fingerprint:
        raise RunError(f"{path} was trained on other data than {problem.dataset.name} holds now; bring that data back.")
    if facts.get("parameters") != problem.layout.dim:
        raise RunError(
            f"{path} has a model of {facts.get('parameters')} parameters, this one has {problem.layout.dim}."
        )
    if facts.get("buffers", digest(problem.model)) != digest(problem.model):  # older runs did not write it down
        raise RunError(
            f"{path} was trained with other means or buffers in its model; bring back the model's code, or the file of "
            f"model.init = {federation.settings.model.init!r}, as it was."
        )
    with closing(RunFolder.open(path)) as opened:
        start = opened.last_snapshot(problem.device)
        lines = opened.rewind_metrics(start.round if start else 0)
        with Ledger.open(_ledger_path(federation.settings, path)) as ledger:
            return _finish(federation, opened, ledger, str(facts["id"]), start, lines, on_round)


def _ledger_path(settings: Settings, folder: Path) -> Path:
    return Path(settings.run.ledger) if settings.run.ledger else folder / "ledger.sqlite"


def _finish(
    federation: Federation,
    folder: RunFolder | None,
    ledger: Ledger,
    run: str,
    start: Snapshot | None,
    lines: list[dict[str, Any]],
    on_round: OnRound | None,
) -> Result:
    """Play the remaining rounds, keeping the folder up to date, and sum up; also when interrupted."""
    settings = federation.settings
    # Another draw of secure randomness would be another release, so no round may have to be replayed.
    every = 1 if settings.privacy.randomness == "secure" else settings.run.checkpoint_every
    history = [_payers(line, federation.plan.parties) for line in lines]
    snapshot = start
    saved = start.round if start else 0
    _state(federation, folder, ledger, run, lines, finished=False)
    try:
        for result, snapshot in federate(federation, ledger, run, start, history):
            if folder and (snapshot.round % every == 0 or snapshot.round == settings.train.rounds):
                folder.checkpoint(snapshot)
                saved = snapshot.round
            lines.append(record.plain(record.metrics_line(result)))
            if folder:
                folder.add_metrics(result)
            if on_round:
                on_round(result)
    except BaseException:
        if folder and snapshot and snapshot.round > saved:
            folder.checkpoint(snapshot)
        _state(federation, folder, ledger, run, lines, finished=False)
        raise
    if folder and snapshot and snapshot.round > saved:
        folder.checkpoint(snapshot)
    return _sum_up(federation, folder, ledger, run, snapshot, lines)


def _payers(line: dict[str, Any], parties: int) -> Sequence[int]:
    """Who paid in a round of metrics.jsonl: the participants; where these are secret, all with budget left."""
    if "participants" in line:
        return tuple(line["participants"])
    out = set(line.get("out_of_budget", ()))
    return [k for k in range(parties) if k not in out]


def _sum_up(
    federation: Federation,
    folder: RunFolder | None,
    ledger: Ledger,
    run: str,
    snapshot: Snapshot | None,
    lines: list[dict[str, Any]],
) -> Result:
    """Write what a reader needs of a finished run, and hand it back."""
    settings, problem = federation.settings, federation.problem
    done = len(lines)
    finished = done == settings.train.rounds
    privacy = _state(federation, folder, ledger, run, lines, finished)
    model = copy.deepcopy(problem.model)
    if snapshot is not None:
        problem.layout.write(model, snapshot.averaged)
    evaluated = [line for line in lines if line["accuracy"] is not None]
    last = evaluated[-1] if evaluated else {"accuracy": None, "loss": None}
    summary: dict[str, Any] = {
        "status": "finished" if finished else "stopped: too few parties have budget left",
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        "evaluated_on": "a held-out part of the training data" if settings.data.validation else "public test data",
        "epsilon": lines[-1]["epsilon"] if lines else 0.0,
        "epsilon_pld": _worst_pld(ledger, run, settings.privacy.delta),
        "epsilon_scope": privacy["epsilon"],
        "delta": settings.privacy.delta,
        "unit": privacy["unit"],
        "aggregation": privacy["aggregation"],
        "accountant": settings.privacy.accountant,
        "sound": problem.rule.sound,
        "private": problem.rule.private,
        "method": settings.method,
        "rule": problem.rule.name,
        "rounds": done,
        "C": [line["C"] for line in lines],
        "parties": problem.partition.parties,
        "parameters": problem.layout.dim,
        "seconds": sum(line["seconds"] for line in lines),
        "warnings": [*problem.dataset.warnings, *federation.plan.warnings],
        "run": run,
        "settings": dataclasses.asdict(settings),
    }
    if lines and "epsilons" in lines[-1]:
        summary["epsilons"] = dict(
            zip(map(federation.plan.name, range(federation.plan.parties)), lines[-1]["epsilons"], strict=True)
        )
    if folder:
        trained = snapshot.averaged if snapshot else problem.layout.flatten(model)
        folder.write_model(folded(model, problem.layout.unflatten(trained)))  # a plain network, whatever trained it
        folder.write_json("summary.json", summary)
    epsilons = tuple(lines[-1]["epsilons"]) if lines and "epsilons" in lines[-1] else ()
    return Result(
        accuracy=last["accuracy"] if last["accuracy"] is not None else math.nan,
        loss=last["loss"] if last["loss"] is not None else math.nan,
        epsilon=float(summary["epsilon"]),
        epsilons=tuple(map(float, epsilons)),
        delta=settings.privacy.delta,
        sound=problem.rule.sound,
        C=tuple(summary["C"]),
        model=model,
        settings=settings,
        summary=summary,
        folder=folder.path if folder else None,
    )


def _worst_pld(ledger: Ledger, run: str, delta: float) -> float:
    """The largest epsilon of any party in this run, by PLD."""
    return max((spend.epsilon(delta, "pld") for spend in _distinct(ledger.spends(run).values())), default=0.0)


def _distinct(spends: Iterable[Spend]) -> list[Spend]:
    """Parties with the same past cost the same: one of each."""
    return list({spend.key: spend for spend in spends}.values())


def _state(
    federation: Federation,
    folder: RunFolder | None,
    ledger: Ledger,
    run: str,
    lines: Sequence[Any],
    finished: bool,
) -> dict[str, Any]:
    """The privacy statement as things stand, also written into the folder."""
    settings, problem = federation.settings, federation.problem
    own = ledger.spends(run)
    words = statement(
        settings,
        federation.plan,
        problem.rule,
        ledger.spends() if settings.run.ledger else own,
        run_id=run,
        scope="ledger" if settings.run.ledger else "run",
        randomness_mode=problem.randomness.mode,
        dataset_name=problem.dataset.name,
        dataset_warnings=problem.dataset.warnings,
        finished=finished,
        rounds_done=len(lines),
        version=fulcrum.__version__,
        date=record.now(),
        run_spent=own,
    )
    if folder:
        folder.write_json("privacy.json", words)
        folder.write_text("PRIVACY.md", to_markdown(words))
    return words


# --- in one call --------------------------------------------------------------------------------


def train(
    data: str | Dataset | None = None,
    model: str | nn.Module | None = None,
    *,
    settings: Settings | None = None,
    out: Path | str | None = None,
    on_round: OnRound | None = None,
    **names: Any,
) -> Result:
    """Train one model over several parties, privately.

        result = fulcrum.train(data="mnist", epsilon=1.64, parties=10, rounds=200)
        result.accuracy, result.epsilon, result.model

    data: a source's name, or a `Dataset` (`fulcrum.data.from_arrays` makes one). model: a name, or an
    nn.Module whose weights are the public start. Other names are those of the command line and the
    settings file: method, epsilon, delta, parties, rounds, lr, kappa, or whole sections such as
    train={"server": "adam"}. settings: ready-made ones instead of names. out: a new folder that keeps
    the run. on_round is called with each RoundResult.
    """
    federation = prepare(*_from_names(data, model, settings, names))
    return execute(federation, out, on_round)


def rounds(
    data: str | Dataset | None = None,
    model: str | nn.Module | None = None,
    *,
    settings: Settings | None = None,
    **names: Any,
) -> Iterator[RoundResult]:
    """As `train`, one round at a time, for notebooks. Nothing is kept; stop whenever you like.

    for r in fulcrum.rounds(data="digits", epsilon=4.0):
        print(r.round, r.accuracy, r.C, r.epsilon)
    """
    federation = prepare(*_from_names(data, model, settings, names))
    with Ledger.open(federation.settings.run.ledger or ":memory:") as ledger:
        for result, _ in federate(federation, ledger, uuid.uuid4().hex):
            yield result


def _from_names(
    data: str | Dataset | None, model: str | nn.Module | None, settings: Settings | None, names: dict[str, Any]
) -> tuple[Settings, Dataset | None, nn.Module | None]:
    """Settings, and the data and model that were given as objects."""
    if settings is not None and names:
        raise ConfigError(f"settings and {', '.join(names)} are both given; put the names into the settings.")
    words = dict(names)
    dataset = data if isinstance(data, Dataset) else None
    module = model if isinstance(model, nn.Module) else None
    if data is not None:
        words["data"] = dataset.name if dataset else data
    if model is not None:
        words["model"] = type(module).__name__ if module else model
    if settings is None:
        from fulcrum import settings_file

        settings = settings_file.from_names(words)
    return settings, dataset, module
