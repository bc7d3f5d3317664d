"""A party's answers. The local training is `fulcrum.training.client.train_client`, the same as in one process.

`Desk.answer` takes a request's bytes and returns a reply's bytes; how they travel is not its business.
For a round: check the terms, reserve in the party's own ledger, compute, store the reply, settle, send.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import load as load_arrays

import fulcrum
from fulcrum.data import Dataset, Partition, from_arrays, load, party_of
from fulcrum.data.records import take_rows
from fulcrum.errors import BudgetError, ConfigError, DataError
from fulcrum.flower import keys
from fulcrum.flower.messages import (
    BadMessage,
    Envelope,
    Wanted,
    model_fingerprint,
    pack,
    read_arrays,
    read_header,
    state_arrays,
    take_state,
    wanted_state,
    write_events,
)
from fulcrum.flower.reply_store import Vault
from fulcrum.flower.terms import (
    Refusal,
    Terms,
    accept,
    allowed_rule,
    check_request,
    check_state,
    to_settings,
    within,
    write_terms,
)
from fulcrum.models.build import build
from fulcrum.models.checks import refuse_mixing
from fulcrum.models.layout import Layout
from fulcrum.privacy.events import Event, Gaussian
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.plan import make_plan
from fulcrum.privacy.statement import statement, to_markdown
from fulcrum.rng import Randomness, Secure, Seeded
from fulcrum.runs import folder as record
from fulcrum.settings.schema import Clip
from fulcrum.training.client import train_client
from fulcrum.training.problem import Problem
from fulcrum.training.round import digest
from fulcrum.types import Assignment, ClientReply, RoundRequest

Say = Callable[[str], None]
Consent = Callable[[Terms], bool]


def own_data(source: str, folder: str = "", classes: int = 0) -> Dataset:
    """A party's own records: what `fulcrum run --data` takes, or an .npz with x and y alone (no test data)."""
    if source.endswith(".npz") and Path(source).is_file():
        with np.load(source, allow_pickle=False) as archive:
            if "x_test" not in archive.files:
                missing = {"x", "y"} - set(archive.files)
                if missing:
                    raise DataError(f"{source} has no array named {missing.pop()}; a party's data needs x and y.")
                x, y = archive["x"], archive["y"]
                person = archive["person"] if "person" in archive.files else None
                known = int(archive["classes"]) if "classes" in archive.files else None
                # A party never evaluates; a Dataset has test data, so one record stands in for it.
                return from_arrays(x, y, x[:1], y[:1], person=person, name=Path(source).name, classes=classes or known)
    return load(source, folder)


@dataclass
class Desk:
    """Where a party answers. Make one with `open_desk`.

    terms is None until somebody agreed to a proposal. simulation: use the seeds that requests carry,
    and say so in the privacy statement.
    """

    name: str
    dataset: Dataset
    key: ec.EllipticCurvePrivateKey
    ledger: Ledger
    vault: Vault
    terms: Terms | None
    terms_path: Path
    consent: Consent | None = None
    simulation: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    say: Say = print
    done: bool = False
    """Whether the coordinator has said that the run is over."""

    def __post_init__(self) -> None:
        self._model: tuple[torch.nn.Module, Layout] | None = None
        if self.terms is not None:
            self._enroll(self.terms)

    # --- answers ----------------------------------------------------------------------------------

    def answer(self, request: Envelope) -> Envelope:
        """The signed reply to a request. Whatever goes wrong is said here in full and sent as a fixed code."""
        nonce = run = ""
        try:
            header = read_header(request, tuple(_ANSWERS))
            nonce, run = header["nonce"], header["run"]
            return _ANSWERS[header["kind"]](self, header, request)
        except BadMessage as error:
            self.say(f"refused a message: {error}")
            code = "message"
        except Refusal as error:
            self.say(f"refused: {error}")
            code = error.code
        except Exception as error:  # the text of an unforeseen error may hold data, so it stays here
            self.say(f"failed: {type(error).__name__}: {error}")
            code = "internal"
        return self._reply("refused", nonce, run, request, code=code)

    def refuse(self, request: Envelope, code: str) -> Envelope:
        """A signed refusal, for what the carrier of messages notices (such as an expired request)."""
        with contextlib.suppress(BadMessage):
            header = read_header(request, tuple(_ANSWERS))
            return self._reply("refused", header["nonce"], header["run"], request, code=code)
        return self._reply("refused", "", "", request, code=code)

    def hello(self, header: dict[str, Any], request: Envelope) -> Envelope:
        """Say who we are and what is public about our data, if the proposal is within our terms."""
        proposal = header["proposal"]
        if self.terms is None:
            self._agree(proposal)
        assert self.terms is not None  # _agree has set it or raised
        within(self.terms, proposal)
        model, layout = self.model()
        return self._reply(
            "welcome",
            header["nonce"],
            header["run"],
            request,
            units=self.units(),
            classes=self.dataset.classes,
            shape=list(self.dataset.shape),
            model=model_fingerprint(model, layout),
            randomness="seeded" if self.simulation else "secure",
        )

    def round(self, header: dict[str, Any], request: Envelope) -> Envelope:
        """One round: terms, ledger, training, vault; in this order."""
        if self.terms is None:
            raise Refusal("no-terms")
        terms, run, t = self.terms, header["run"], header["round"]
        model, layout = self.model()
        check_request(terms, header, model_fingerprint(model, layout), self.simulation)
        problem = self.problem(header, model, layout)
        template = problem.rule.init(Clip(C0=terms.C_min, C_min=terms.C_min, C_max=terms.C_max), problem.shape)
        wanted: Wanted = {"params": (torch.float32, (layout.dim,)), **wanted_state(template)}
        arrays = read_arrays(request, wanted)
        state = {name: value.to(self.device) for name, value in take_state(arrays).items()}
        check_state(terms, state)

        stored = self.vault.get(run, t)
        if stored is not None:
            if stored.request != request.digest:
                raise Refusal("repeated")
            # Again, in case that the crash came between storing and settling; the same digest changes nothing.
            self.ledger.settle(run, t, {self.name: released(stored.reply)})
            self.say(f"round {t + 1}: sent the stored reply again")
            return stored.reply
        self._reserve(run, t, (Gaussian(header["rate"], header["sigma"], header["steps"]),))

        task = Assignment(header["client"], header["rate"], header["sigma"], header["steps"], header["lr"])
        params = arrays["params"].to(self.device)
        asked = RoundRequest(t, header["rounds"], params, (task,), (state,), header["weight_decay"])
        update = train_client(problem, asked, task, state)
        own_state = state_arrays(update.state) if problem.rule.where == "client" else {}
        reply = self._reply(
            "update",
            header["nonce"],
            run,
            request,
            arrays={"delta": update.delta, "extra": update.extra, **own_state},
            round=t,
            events=write_events(update.events),
        )
        self.vault.put(run, t, request.digest, reply)
        self.ledger.settle(run, t, {self.name: digest(update)})
        self.say(f"round {t + 1} of {header['rounds']}: epsilon so far {self.ledger.epsilon(self.name):.4g}")
        return reply

    def finish(self, header: dict[str, Any], request: Envelope) -> Envelope:
        """The run is over: nothing is asked for, so nothing can go wrong."""
        self.done = True
        self.say(f"the coordinator has finished after {header['rounds']} rounds")
        return self._reply("noted", header["nonce"], header["run"], request)

    def _reply(
        self,
        kind: str,
        nonce: str,
        run: str,
        request: Envelope,
        arrays: dict[str, torch.Tensor] | None = None,
        **more: Any,
    ) -> Envelope:
        header = {"kind": kind, "nonce": nonce, "run": run, "party": self.name, "request": request.digest, **more}
        return keys.sign(self.key, pack(header, arrays))

    # --- what answers need ------------------------------------------------------------------------

    def units(self) -> int:
        """n_k: this party's examples or persons."""
        assert self.terms is not None
        return party_of(self.dataset, _alone(len(self.dataset.y), 0, self.name), 0, self.terms.unit).units

    def model(self) -> tuple[torch.nn.Module, Layout]:
        """The model that the terms name, built by this party's own software; its weights come with each round."""
        assert self.terms is not None
        if self._model is None:
            task, sample = self.dataset.task, take_rows(self.dataset.sample.x, slice(0, 8))
            model = build(self.terms.model, self.dataset.shape, task.outputs, 0, sample, task.sequence)
            refuse_mixing(model, take_rows(sample, slice(0, 2)))
            model = model.to(self.device)
            self._model = model, Layout.of(model)
        return self._model

    def problem(self, header: dict[str, Any], model: torch.nn.Module, layout: Layout) -> Problem:
        """The client's problem, over this party's own records and no others."""
        assert self.terms is not None
        randomness: Randomness = Seeded(int(header["seeds"][0])) if self.simulation else Secure()
        return Problem(
            dataset=self.dataset,
            partition=_alone(len(self.dataset.y), header["client"], self.name),
            model=model,
            layout=layout,
            rule=allowed_rule(self.terms, header["rule"]),
            randomness=randomness,
            unit=self.terms.unit,
            groups=layout.layers if header["groups"] == "layer" else (),
            device=self.device,
        )

    def _agree(self, proposal: dict[str, Any]) -> None:
        """Ask whoever sits here; what they agree to is written down and holds from then on."""
        if self.consent is None:
            raise Refusal("no-terms")
        try:
            terms = accept(self.name, proposal)
        except ConfigError as error:
            raise Refusal("message", str(error)) from error
        if not self.consent(terms):
            raise Refusal("consent")
        with self.terms_path.open("x", encoding="utf-8") as file:
            file.write(write_terms(terms))
        self._enroll(terms)
        self.terms = terms

    def _enroll(self, terms: Terms) -> None:
        self.ledger.enroll(
            self.name,
            budget=terms.budget,
            delta=terms.delta,
            accountant=terms.accountant,
            unit=terms.unit,
            population=f"{self.dataset.name}, {self.dataset.fingerprint}",
        )
        if self.ledger.accounts()[self.name].budget != terms.budget:
            self.ledger.set_budget(self.name, terms.budget)

    def _reserve(self, run: str, t: int, events: tuple[Event, ...]) -> None:
        """Pay before anything is computed. What was reserved and never released is not paid again."""
        held = [entry for entry in self.ledger.entries(self.name) if (entry.run, entry.round) == (run, t)]
        if any(entry.digest is not None for entry in held):
            raise Refusal("lost")
        try:
            granted = self.ledger.reserve(run, t, {self.name: events})
        except BudgetError as error:  # reserved before, for something else
            raise Refusal("repeated") from error
        if not granted[self.name]:
            raise Refusal("budget")

    # --- the party's own statement ----------------------------------------------------------------

    def write_statement(self, folder: Path) -> None:
        """PRIVACY.md and privacy.json of this party, over all runs of its ledger."""
        if self.terms is None:
            return
        settings = to_settings(self.terms)
        rule = allowed_rule(self.terms, self.terms.rules[0])
        plan = make_plan(settings, [self.name], [self.units()], rule, population=self.dataset.name)
        entries = self.ledger.entries(self.name)
        words = statement(
            settings,
            plan,
            rule,
            self.ledger.spends(),
            run_id=entries[-1].run if entries else "none yet",
            scope="ledger",
            randomness_mode="seeded" if self.simulation else "secure",
            dataset_name=f"{self.dataset.name} of {self.name}",
            dataset_warnings=self.dataset.warnings,
            finished=self.done,
            rounds_done=len({(entry.run, entry.round) for entry in entries}),
            version=fulcrum.__version__,
            date=record.now(),
        )
        words["parties"][0]["budget"] = self.terms.budget
        folder.mkdir(parents=True, exist_ok=True)
        record.write_whole(folder / "PRIVACY.md", to_markdown(words).encode())
        record.write_whole(folder / "privacy.json", record.to_json(words).encode())

    def close(self) -> None:
        """Close ledger and vault."""
        self.ledger.close()
        self.vault.close()


_ANSWERS: dict[str, Callable[[Desk, dict[str, Any], Envelope], Envelope]] = {
    "hello": Desk.hello,
    "round": Desk.round,
    "done": Desk.finish,
}


def released(reply: Envelope) -> str:
    """The ledger's fingerprint of a stored update: that of its numbers, as in a run in one process."""
    arrays = load_arrays(reply.body)
    return digest(ClientReply(0, arrays["delta"], arrays["extra"], (), {}))


def _alone(records: int, client: int, name: str) -> Partition:
    """A partition in which party number `client` holds every record and those before it none."""
    if client >= 1_000_000:
        raise Refusal("party")
    starts = torch.zeros(client + 2, dtype=torch.int64)
    starts[-1] = records
    return Partition(torch.arange(records), starts, (*(f"other-{k}" for k in range(client)), name))


@contextlib.contextmanager
def open_desk(
    name: str,
    dataset: Dataset,
    key: Path,
    ledger: Path,
    terms: Terms | None,
    terms_path: Path,
    *,
    consent: Consent | None = None,
    simulation: bool = False,
    device: torch.device | None = None,
    say: Say = print,
) -> Iterator[Desk]:
    """A party's desk over its ledger and the replies beside it (LEDGER.replies); one process at a time."""
    if terms is not None and terms.party != name:
        raise ConfigError(f"{terms_path} was agreed to by party {terms.party!r}, not {name!r}; use that name.")
    ledger.parent.mkdir(parents=True, exist_ok=True)
    with ledger.with_name(ledger.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"ledger {ledger} is in use by another party process; stop that one first.") from None
        desk = Desk(
            name=name,
            dataset=dataset,
            key=keys.load_private(key),
            ledger=Ledger.open(ledger),
            vault=Vault(ledger.with_name(ledger.name + ".replies")),
            terms=terms,
            terms_path=terms_path,
            consent=consent,
            simulation=simulation,
            device=device or torch.device("cpu"),
            say=say,
        )
        try:
            yield desk
        finally:
            desk.close()


def explain(terms: Terms, units: int) -> str:
    """What a person is asked to agree to, with what it costs."""
    per = f"1/{units}"
    risk = "" if terms.delta < 1 / units else f" WARNING: not below {per}, so the guarantee means little."
    lines = [
        f"The coordinator proposes, for party {terms.party} with {units} {terms.unit}s:",
        f"  up to {terms.rounds} rounds of {terms.steps} step(s), each on a {terms.rate:g} sample of the {terms.unit}s",
        f"  noise multiplier of at least {terms.sigma:.5g}, clipping rule {', '.join(terms.rules)} ({terms.groups})",
        f"  clipping norm within {terms.C_min:g} to {terms.C_max:g}, learning rate up to {terms.lr:g}",
        f"  model {terms.model.name}, built by this party's own software",
        f"  epsilon of at most {terms.budget:.4g} at delta {terms.delta:g} ({terms.accountant}), over all runs.{risk}",
    ]
    return "\n".join(lines)
