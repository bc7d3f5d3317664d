"""What ties a run's folder, its settings and its ledger together, and the checks before a run goes on.

run.json      the settings, the ledger's identity and absolute path, and the ledger's head when the run was registered
head file     ledger-head.json: the ledger's head after the last checkpoint
ledger        the run's record, with a digest of the settings and a keyed fingerprint of the data

A ledger that is missing, another one, rolled back or rewritten, settings that were edited, and checkpoints that are
lost are each refused in a sentence of their own: the ledger alone knows what was spent, so a run without it could say
less than what was released.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulcrum.data.fingerprints import DIGEST_BYTES as UNIT_BYTES
from fulcrum.data.fingerprints import KEY_MARK, compute_keyed_fingerprint, name_record_key
from fulcrum.errors import BudgetError, ConfigError, InputError, RunError
from fulcrum.privacy.ledger import Ledger, LedgerAccount, LedgerHead, RunRecord, make_seed_digest
from fulcrum.runs import folder as record
from fulcrum.runs.preparation import RECORDS_SUFFIX, list_person_record_digests, list_unit_digests
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation
from fulcrum.training.loop import MAX_PARTIES_WITH_EPSILON
from fulcrum.training.problem import get_private_seed

RUN_FORMAT = 2
"""The format of run.json. Format 1 (no such entry) was not bound to its ledger and had other random numbers."""
HEAD_FILE = "ledger-head.json"
OWN_LEDGER = "ledger.sqlite"
CHANGEABLE_SETTINGS = ("run.device", "run.engine", "run.workers", "run.checkpoint_every", "data.dir")
"""Settings that may change before a run goes on: where and how fast it computes, and where its data lies."""


# --- settings -----------------------------------------------------------------------------------


def list_bound_settings(settings: Settings) -> dict[str, Any]:
    """The settings that a run is bound to, as JSON holds them: {"train.rounds": 200, ...}."""
    found: dict[str, Any] = {"method": settings.method}
    for section, values in dataclasses.asdict(settings).items():
        if isinstance(values, Mapping):
            found |= {f"{section}.{name}": value for name, value in values.items()}
    kept = {name: value for name, value in sorted(found.items()) if name not in CHANGEABLE_SETTINGS}
    normal: dict[str, Any] = json.loads(json.dumps(kept))
    return normal


def compute_settings_digest(bound: Mapping[str, Any]) -> str:
    """A digest of `list_bound_settings`, without the private seed: a ledger's reader must not find it by trying."""
    private = "run.seed" if bound.get("privacy.seed") is None else "privacy.seed"
    public = {name: value for name, value in bound.items() if name != private}
    return hashlib.blake2b(json.dumps(public, sort_keys=True).encode(), digest_size=16).hexdigest()


def make_ledger_absolute(settings: Settings) -> Settings:
    """The settings with an absolute path of the kept ledger, so that they mean the same from every folder."""
    path = settings.run.ledger
    if not path or path == ":memory:":
        return settings
    return settings.replace(run={"ledger": os.path.abspath(path)})


# --- the run in its ledger ----------------------------------------------------------------------


def register_run(federation: Federation, ledger: Ledger, run: str) -> None:
    """Register in the ledger what the run is, before its first release; the same again (to resume) changes nothing.

    The plans of the parties follow as they are invited (`fulcrum.training.loop`).
    """
    settings, problem, plan = federation.settings, federation.problem, federation.plan
    mode = problem.randomness.mode
    ledger.bring_to_current_format()  # its identity salts the seed's digest
    known = RunRecord(
        id=run,
        rule=problem.rule.name,
        sound=problem.rule.sound,
        private=problem.rule.private,
        randomness=mode,
        arithmetic="proven" if problem.proven else "fast",
        aggregation=plan.aggregation,
        unit=plan.unit,
        seed_digest=make_seed_digest(get_private_seed(settings), ledger.identity) if mode == "seeded" else "",
        data_digest=compute_keyed_fingerprint(problem.dataset),
        settings_digest=compute_settings_digest(list_bound_settings(settings)),
        simulation=mode != "secure",
    )
    # The record comes last: a start that is refused for its parties or units must not use up the private seed. A seed
    # that is refused must not leave units behind either.
    used = {each.seed_digest for each in ledger.runs().values() if each.id != run}
    if settings.run.ledger and not problem.dataset.public:
        check_record_key(ledger)
    if settings.run.ledger and (not known.seed_digest or known.seed_digest not in used):
        if plan.parties <= MAX_PARTIES_WITH_EPSILON:
            known_by = "" if problem.dataset.public else f", {KEY_MARK}{name_record_key()}"
            terms = {plan.name(k): plan.terms(k) for k in range(plan.parties)}
            ledger.enroll_parties(
                LedgerAccount(name, **{**each, "population": f"{each['population']}{known_by}"})
                for name, each in terms.items()
            )
        register_units(federation, ledger, run)
    ledger.register_run(known)


def check_record_key(ledger: Ledger) -> None:
    """ConfigError where the ledger knows records by another key: everybody would seem to be new, with a full budget."""
    for account in ledger.accounts().values():
        if KEY_MARK in account.population and account.population.partition(KEY_MARK)[2] != name_record_key():
            raise ConfigError(
                f"the key by which ledger {ledger.path} knows the records again is another one now; bring its file "
                "back (FULCRUM_KEY_FILE), since without it everybody would seem to be new and have a full budget."
            )


def register_units(federation: Federation, ledger: Ledger, run: str) -> None:
    """Register whose records each party has, by keyed digests, so that a kept ledger knows them under any name.

    A person may have records at several parties of one run; whoever is on record at a party that is not in this run
    came under another name, and is refused.
    """
    if federation.problem.dataset.train is None:  # a coordinator: the parties know their own units
        return
    digests = list_unit_digests(federation)
    records = list_person_record_digests(federation)
    check_known_records(ledger, digests, records)
    everybody = [units[at : at + UNIT_BYTES] for units in digests.values() for at in range(0, len(units), UNIT_BYTES)]
    shared = len(set(everybody)) < len(everybody)
    for party, units in digests.items() if shared else ():
        for other, count in ledger.find_known_units(party, units).elsewhere.items():
            if other not in digests:
                raise BudgetError(
                    f"{count} units of party {party!r} are in ledger {ledger.path} as units of party {other!r}, whose "
                    "budget counts what was released of them; use the parties' names of before."
                )
    if digests:
        ledger.register_all_units(run, digests, allow_shared=shared)
    if records:
        ledger.register_all_units(run, records, allow_shared=True)


def check_known_records(ledger: Ledger, digests: Mapping[str, bytes], records: Mapping[str, bytes]) -> None:
    """BudgetError where persons' records are known to the ledger, and the persons are not.

    Persons are known by their ids. The same records without ids, or under other ids, would come with a full budget.
    """
    for name, units in records.items():
        party, known = name.removesuffix(RECORDS_SUFFIX), ledger.find_known_units(name, units)
        for other, count in known.elsewhere.items():
            if other not in records:
                raise BudgetError(
                    f"{count} records of party {party!r} are in ledger {ledger.path} as records of party "
                    f"{other.removesuffix(RECORDS_SUFFIX)!r} (or without persons), whose budget counts what was "
                    "released of them; use the parties' names and the persons of before."
                )
        if known.staying and not ledger.find_known_units(party, digests[party]).staying:
            raise BudgetError(
                f"{known.staying} records of party {party!r} are in ledger {ledger.path} under other persons' ids, "
                "whose budget counts what was released of them; use the ids of before."
            )


def describe_binding(federation: Federation, ledger: Ledger) -> dict[str, Any]:
    """The entries of run.json that bind a new run to its settings and its ledger."""
    settings = federation.settings
    bound = list_bound_settings(settings)
    return {
        "format": RUN_FORMAT,
        "settings_digest": compute_settings_digest(bound),
        "settings": bound,
        "ledger": {
            "path": os.path.abspath(ledger.path),
            "kept": bool(settings.run.ledger),
            **head_to_json(ledger.head()),
        },
    }


def head_to_json(head: LedgerHead) -> dict[str, Any]:
    """A ledger's head as entries of a JSON object."""
    return {"identity": head.ledger, "sequence": head.sequence, "digest": head.digest}


def head_from_json(entries: Mapping[str, Any], where: Path) -> LedgerHead:
    """The head in a JSON object; RunError where it is damaged."""
    try:
        return LedgerHead(str(entries["identity"]), int(entries["sequence"]), str(entries["digest"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise RunError(
            f"{where} was edited or damaged: it does not say which ledger the run has; restore it."
        ) from None


# --- before a run goes on -----------------------------------------------------------------------


@dataclass(frozen=True)
class StoredRun:
    """A run's folder as `run.json` describes it. facts: all entries of run.json."""

    path: Path
    facts: Mapping[str, Any]

    @staticmethod
    def read(path: Path) -> StoredRun:
        """The run in a folder; RunError where an earlier version began it, or run.json is damaged."""
        facts = record.load_run_json(path, "run.json")
        if "id" not in facts or not isinstance(facts.get("format", 1), int):
            raise RunError(f"{path}/run.json was edited or damaged: it names no run; restore it from a copy.")
        if facts.get("format", 1) < RUN_FORMAT:
            raise RunError(
                f"{path} was begun by an earlier Fulcrum, which did not bind a run to its ledger and drew other random "
                "numbers; finish it with that version, or start a new run with its settings.toml."
            )
        if facts["format"] > RUN_FORMAT:
            raise RunError(f"{path} was begun by a later Fulcrum ({facts.get('version')}); continue it with that one.")
        return StoredRun(path, facts)

    @property
    def id(self) -> str:
        """The run's name in the ledger."""
        return str(self.facts["id"])

    @property
    def ledger_path(self) -> Path:
        """The ledger: its own one lies in the folder, wherever that is now; a kept one where it was."""
        ledger = self._ledger
        return Path(str(ledger.get("path", ""))) if ledger.get("kept") else self.path / OWN_LEDGER

    @property
    def _ledger(self) -> Mapping[str, Any]:
        found = self.facts.get("ledger")
        if not isinstance(found, Mapping):
            raise RunError(f"{self.path}/run.json was edited or damaged: it names no ledger; restore it from a copy.")
        return found

    @property
    def heads(self) -> list[LedgerHead]:
        """The heads that the ledger must contain: at registration, and after the last checkpoint."""
        found = [head_from_json(self._ledger, self.path / "run.json")]
        if (self.path / HEAD_FILE).is_file():
            found.append(head_from_json(record.load_run_json(self.path, HEAD_FILE), self.path / HEAD_FILE))
        return found

    def read_settings(self) -> Settings:
        """The settings in the folder; RunError where they were edited since the run began."""
        from fulcrum.settings import files as settings_file

        settings = settings_file.read_settings(self.path / "settings.toml")
        self.check_settings(settings)
        return settings

    def check_settings(self, settings: Settings) -> None:
        """RunError, naming the field, where the settings are not those with which the run began."""
        began = self.facts.get("settings")
        if not isinstance(began, Mapping) or compute_settings_digest(began) != self.facts.get("settings_digest"):
            raise RunError(f"{self.path}/run.json was edited: its settings are not those of its digest; restore it.")
        now, usual = list_bound_settings(settings), list_bound_settings(Settings())
        for name in sorted({*began, *now}):
            # A setting that a later version added must have its default.
            before, after = began.get(name, usual.get(name)), now.get(name)
            if before != after:
                raise RunError(
                    f"{self.path}/settings.toml was edited: {name} = {after!r}, but the run began with {before!r}; "
                    "change it back, or start a new run."
                )

    def open_ledger(self) -> Ledger:
        """The run's ledger, after it is known to be the same one and to hold all that this run has on record."""
        path = self.ledger_path
        if not path.exists():
            raise RunError(
                f"ledger {path} of run {self.path} is missing; bring it back (a link in its place will do), since it "
                "alone says what was spent."
            )
        if path.is_file() and path.stat().st_size == 0:
            raise RunError(
                f"ledger {path} of run {self.path} is empty now, and was not when the run stopped; bring back the file "
                "that says what was spent."
            )
        with self._say_which_run():
            ledger = Ledger.open(path)
        try:
            self._check_ledger(ledger)
        except BaseException:
            ledger.close()
            raise
        return ledger

    @contextlib.contextmanager
    def _say_which_run(self) -> Iterator[None]:
        """Around calls of the ledger: its refusals name the run that does not go on."""
        try:
            yield
        except InputError as error:
            raise RunError(f"run {self.path} does not go on: {error}") from error

    def _check_ledger(self, ledger: Ledger) -> None:
        with self._say_which_run():
            for head in self.heads:
                ledger.check_contains(head)
        known = ledger.runs().get(self.id)
        if known is None or not known.is_known:
            raise RunError(
                f"ledger {ledger.path} does not know run {self.id} of {self.path}; run.json or the ledger was edited, "
                "so bring back the files as they were."
            )
        if known.settings_digest != self.facts.get("settings_digest"):
            raise RunError(
                f"{self.path}/run.json was edited: its settings are not those that ledger {ledger.path} has on record "
                f"for run {self.id}; restore it."
            )
        self.check_rounds(ledger)

    def check_rounds(self, ledger: Ledger) -> None:
        """RunError where the folder has a round on record that nobody paid for in the ledger."""
        lines = record.load_metrics(self.path)
        # A round to which the public coin invited nobody costs nothing. Secret participation (None) always costs.
        played = [int(line["round"]) for line in lines if line.get("participants") != []]
        paid = [t for t in played if ledger.list_round_reservations(self.id, range(t - 1, t))]
        if len(paid) < len(played):
            raise RunError(
                f"{self.path} has {len(played)} rounds on record, and ledger {ledger.path} knows of {len(paid)} of "
                "them; bring back the ledger that paid for all, since a statement from this one would say too little."
            )


def check_checkpoints(stored: StoredRun, federation: Federation, ledger: Ledger, start: int, repeat: bool) -> list[str]:
    """Warnings about rounds after round `start` that are released a second time; RunError where that needs consent.

    Between a release and its checkpoint a crash can lose one round. Where more are missing, checkpoints were lost.
    """
    rounds = federation.settings.train.rounds
    settled = [t for t in range(start, rounds) if ledger.count_settled_attempts(stored.id, t)]
    if not settled or federation.engine.replays_rounds(federation.problem.randomness.mode):
        return []
    which = f"round {settled[0] + 1}" if len(settled) == 1 else f"rounds {settled[0] + 1} to {settled[-1] + 1}"
    if len(settled) > 1 and not repeat:
        left = f"the newest there is of round {start}" if start else "none is left"
        raise RunError(
            f"{stored.path} lost its checkpoint after round {settled[-1] + 1} ({left}), and secure noise cannot be "
            f"drawn again; bring the checkpoint back, or pay for {which} a second time with --repeat."
        )
    lost = "The checkpoint of" if len(settled) == 1 else "The checkpoints of"
    verb = "was" if len(settled) == 1 else "were"
    return [f"{lost} {which} {verb} lost: secure noise is drawn anew there, and paid a second time."]


def identify_file(path: Path) -> tuple[int, int] | None:
    """(device, inode) of a file, by which a replaced file is noticed; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
