"""Train a federation to its end: in memory, stored in a folder, or resumed from one."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from torch import nn

import fulcrum
from fulcrum.data import Dataset
from fulcrum.data.fingerprints import compute_keyed_fingerprint, find_key_file
from fulcrum.errors import RunError
from fulcrum.models.whitening import compute_buffer_digest
from fulcrum.privacy.ledger import Ledger
from fulcrum.runs import binding
from fulcrum.runs import folder as record
from fulcrum.runs.active_run import ActiveRun, write_privacy_statement
from fulcrum.runs.folder import RunFolder
from fulcrum.runs.observers import Observer, ObserverList, RoundCallback, RunInfo, RunRecorder, find_observer
from fulcrum.runs.preparation import prepare
from fulcrum.runs.reference import train_reference
from fulcrum.runs.result import Result, finish_run
from fulcrum.runs.split import describe_split
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation
from fulcrum.training.loop import federate
from fulcrum.training.snapshot import Snapshot


def execute(
    federation: Federation,
    out: Path | str | None = None,
    on_round: RoundCallback | None = None,
    facts: Mapping[str, Any] | None = None,
    observers: Sequence[str | Observer] = (),
) -> Result:
    """Train to the end. With `out`, a new folder there holds the run and makes it resumable.

    on_round is called with each RoundResult; observers watch the run (`fulcrum.Observer`, or names as for --observe).

    facts: additional entries of run.json; an "id" among them is the run's id in ledgers.
    """
    watching = [
        find_observer(given) for given in observers
    ]  # before the folder is created, so that a wrong name leaves no folder
    run = str((facts or {}).get("id", uuid.uuid4().hex))
    federation = dataclasses.replace(federation, settings=binding.make_ledger_absolute(federation.settings))
    if out is None:
        with open_run_ledger(federation.settings) as ledger:
            binding.register_run(federation, ledger, run)
            return _run_remaining_rounds(ActiveRun(federation, None, ledger, run), None, [], on_round, watching)
    with closing(RunFolder.create(Path(out))) as folder, ExitStack() as stack:
        with folder.remove_unless_started():
            ledger = stack.enter_context(open_run_ledger(federation.settings, folder.path))
            binding.register_run(federation, ledger, run)
            _write_start_files(folder, federation, ledger, run, facts or {})
        return _run_remaining_rounds(ActiveRun(federation, folder, ledger, run), None, [], on_round, watching)


def resume(
    folder: Path | str,
    on_round: RoundCallback | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    observers: Sequence[str | Observer] = (),
    repeat: bool = False,
) -> Result:
    """Continue a run where it stopped. A seeded run ends with the same bits as if it had not stopped.

    dataset and model must be given again where they were given to `train` as objects. repeat: allow that rounds whose
    checkpoints were lost are drawn and paid again, where randomness is secure. Refused in one sentence: a ledger that
    is missing, another one or rolled back, and settings that were edited.
    """
    stored = binding.StoredRun.read(Path(folder))
    if "flower" in stored.facts:
        raise RunError(f"{folder} was served to parties elsewhere; continue it with: fulcrum serve --resume {folder}")
    settings = stored.read_settings()
    stored.open_ledger().close()  # before the data is read: plans count what the ledger says
    return resume_prepared(prepare(settings, dataset, model), folder, on_round, observers, repeat)


def resume_prepared(
    federation: Federation,
    folder: Path | str,
    on_round: RoundCallback | None = None,
    observers: Sequence[str | Observer] = (),
    repeat: bool = False,
) -> Result:
    """Resume the run in a folder with a federation that was prepared again from its settings."""
    watching = [find_observer(given) for given in observers]
    path = Path(folder)
    stored = binding.StoredRun.read(path)
    stored.check_settings(federation.settings)
    _refuse_other_problem(federation, path, stored.facts)
    with closing(RunFolder.open(path)) as opened, stored.open_ledger() as ledger:
        start = opened.load_last_snapshot(federation.problem.device)
        done = start.round if start else 0
        notes = binding.check_checkpoints(stored, federation, ledger, done, repeat)
        binding.register_run(federation, ledger, stored.id)  # the same record as before, or refused
        lines = opened.truncate_metrics(done)
        run = ActiveRun(federation, opened, ledger, stored.id, tuple(notes))
        return _run_remaining_rounds(run, start, lines, on_round, watching)


def open_run_ledger(settings: Settings, folder: Path | None = None) -> Ledger:
    """The ledger that the settings name; else the run's own, in its folder or in memory."""
    return Ledger.open(settings.run.ledger or (folder / "ledger.sqlite" if folder else ":memory:"))


def _write_start_files(
    folder: RunFolder, federation: Federation, ledger: Ledger, run: str, facts: Mapping[str, Any]
) -> None:
    """Write a new folder's files before the first round: settings, environment, and what `resume_prepared` compares."""
    from fulcrum.settings import files as settings_file

    problem = federation.problem
    folder.write_text("settings.toml", settings_file.dump_settings(federation.settings))
    if problem.dataset.schema is not None:  # so that predictions see the same columns
        for name, content in problem.dataset.schema.pack().items():
            record.write_file_atomically(folder.path / name, content)
    folder.write_json("split.json", describe_split(federation))
    if federation.rehearsed:
        folder.write_json("rehearsal.json", federation.rehearsed)
    folder.write_json("environment.json", record.describe_environment(problem.device))
    folder.write_json(
        "run.json",
        {
            "id": run,
            "created": record.current_utc_time(),
            "version": fulcrum.__version__,
            "data": compute_keyed_fingerprint(problem.dataset),
            "parameters": problem.layout.dim,
            "buffers": compute_buffer_digest(problem.model),
            "unit": problem.unit,
            "score": problem.task.score,
            "higher_is_better": problem.task.higher_is_better,
            "aggregation": federation.plan.aggregation,
            "simulation": problem.randomness.mode != "secure",
            "sound": problem.rule.sound,
            "private": problem.rule.private,
            **binding.describe_binding(federation, ledger),
            **facts,
        },
    )


def _refuse_other_problem(federation: Federation, path: Path, facts: Mapping[str, Any]) -> None:
    """Raise RunError if run.json has other data or another model than the federation."""
    problem = federation.problem
    if facts.get("data") != compute_keyed_fingerprint(problem.dataset):
        raise RunError(
            f"{path} was trained on other data than {problem.dataset.name} holds now"
            + ("" if problem.dataset.public else f", or under another key than {find_key_file()} holds now")
            + "; bring that data back."
        )
    if facts.get("parameters") != problem.layout.dim:
        raise RunError(
            f"{path} has a model of {facts.get('parameters')} parameters, this one has {problem.layout.dim}."
        )
    if facts.get("buffers", compute_buffer_digest(problem.model)) != compute_buffer_digest(
        problem.model
    ):  # older runs did not store it
        raise RunError(
            f"{path} was trained with other means or buffers in its model; bring back the model's code, or the file of "
            f"model.init = {federation.settings.model.init!r}, as it was."
        )


def _run_remaining_rounds(
    run: ActiveRun,
    start: Snapshot | None,
    lines: list[dict[str, Any]],
    on_round: RoundCallback | None,
    watching: Sequence[Observer],
) -> Result:
    """Run the remaining rounds, update the folder, and write the summary; also when interrupted.

    lines: the lines of metrics.jsonl before `start`; new rounds append theirs.
    """
    settings = run.federation.settings
    # A new draw of secure randomness is a new release, so no round may need a replay.
    every = 1 if settings.privacy.randomness == "secure" else settings.run.checkpoint_every
    recorder = RunRecorder(run.folder, every, settings.train.rounds, start, lines, run.ledger)
    observers = ObserverList(recorder, watching, on_round)
    if run.folder:  # a process that is killed can write no statement, and one of before would say too little
        run.folder.remove_statement()
    try:
        where, score = run.folder.path if run.folder else None, run.federation.problem.task.score
        public = run.federation.problem.dataset.public and run.federation.problem.dataset.train is not None
        observers.started(RunInfo(run.id, settings, where, run.federation.plan, score, run.notes, public))
        for result, snapshot in federate(run.federation, run.ledger, run.id, start):
            observers.round(result, snapshot)
        recorder.ended(None)  # the last checkpoint is written before the summary
        reference = train_reference(run.federation) if settings.run.reference else {}
        finished = finish_run(run, recorder.latest, lines, reference)
    except BaseException:
        observers.notify_interrupted()
        write_privacy_statement(run, len(lines), finished=False)
        raise
    observers.ended(finished)
    return finished
