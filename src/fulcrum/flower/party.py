"""A party's service: it answers the coordinator's requests within the party's terms and budget.

`PartyService.answer` takes the bytes of a request and returns the bytes of a reply; a transport carries them.
For a round, in this order: check the terms, reserve in the party's own ledger, train, store the reply, settle, send.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import load as load_arrays
from safetensors.torch import save as save_arrays

from fulcrum.clipping.party_state import select_moving_entries
from fulcrum.data import Dataset
from fulcrum.errors import BudgetError, ConfigError, DataError, FulcrumError, ModelError
from fulcrum.flower import keys
from fulcrum.flower.array_coding import decode_own_arrays
from fulcrum.flower.display import clean_message, show_value
from fulcrum.flower.known_ledgers import head_to_table
from fulcrum.flower.messages import (
    ArraySpec,
    BadMessage,
    Envelope,
    OtherVersion,
    assignment_from_table,
    compute_max_body_bytes,
    events_agree,
    events_to_rows,
    make_state_spec,
    pack_envelope,
    read_message_arrays,
    read_message_header,
    simulation_from_table,
    state_from_arrays,
    write_shape,
)
from fulcrum.flower.pairwise.party import MAX_KEYS_BYTES, MaskedRounds
from fulcrum.flower.party_canaries import PartyCanaries
from fulcrum.flower.party_data import LoadRecords, check_task
from fulcrum.flower.party_ledger import enroll_party, register_party_run
from fulcrum.flower.party_statement import make_party_statement
from fulcrum.flower.party_training import LocalTrainer, PartyRunFacts
from fulcrum.flower.proposals import accept_proposal, check_proposal
from fulcrum.flower.refusals import TermsRefusal
from fulcrum.flower.reply_store import ReplyStore
from fulcrum.flower.request_checks import check_clipping_state, check_params, check_round_request
from fulcrum.flower.request_gate import RequestGate
from fulcrum.flower.task_terms import TaskNotDeclared, check_declared
from fulcrum.flower.terms import PartyTerms, terms_to_toml, validate_terms
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.privacy.events import Event
from fulcrum.privacy.ledger import Ledger
from fulcrum.privacy.mechanism import compute_planned_events
from fulcrum.privacy.pairwise.integers import pack_message
from fulcrum.privacy.statement import statement_to_markdown
from fulcrum.runs import folder as record
from fulcrum.settings.registry import forbid_imports
from fulcrum.training.round import compute_reply_digest
from fulcrum.types import ClientReply, RoundRequest, RuleState

MessageFn = Callable[[str], None]
UNKNOWN_REQUEST_BYTES = 1 << 20
"""Bytes of the longest request before this party has built its model: a greeting."""
ConsentFn = Callable[[PartyTerms], bool]


@dataclass
class PartyService:
    """Answers the coordinator's requests for one party. Make one with `open_party_service`.

    load_records: loads this party's records for the task of the terms, once they are agreed.
    terms is None until somebody agreed to a proposal. simulation: use the seeds that requests carry,
    and say so in the privacy statement.
    """

    name: str
    load_records: LoadRecords
    key: ec.EllipticCurvePrivateKey
    ledger: Ledger
    replies: ReplyStore
    terms: PartyTerms | None
    terms_path: Path
    consent: ConsentFn | None = None
    simulation: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    say: MessageFn = print
    gate: RequestGate | None = None
    """Which requests are the coordinator's. None: every one, for parties and a coordinator in one process."""
    done: bool = False
    """Whether the coordinator has said that the run is over."""
    canaries: PartyCanaries | None = None
    """This party's own canaries, where it audits itself."""

    def __post_init__(self) -> None:
        self._dataset: Dataset | None = None
        self._trainer: LocalTrainer | None = None
        self._registered: set[PartyRunFacts] = set()
        self._masked = MaskedRounds(self.name, self.key)

    # --- answers ----------------------------------------------------------------------------------

    def answer(self, request: Envelope) -> Envelope:
        """The signed reply to a request. An error is told here in full, and sent as a fixed code."""
        nonce = run = ""
        try:
            header = read_message_header(request, tuple(_ANSWERS_BY_KIND))
            nonce, run = header["nonce"], header["run"]
            if self.gate is not None:
                self.gate.check(request, header)
            return _ANSWERS_BY_KIND[header["kind"]](self, header, request)
        except OtherVersion as error:
            self.say(f"refused a message: {error}")
            code = "version"
        except BadMessage as error:
            self.say(f"refused a message: {error}")
            code = "message"
        except TermsRefusal as error:
            self.say(f"refused: {error}")
            code = error.code
        except DataError as error:  # its text says what the records hold, so it stays here
            self.say(f"refused: {error}")
            code = "data"
        except ModelError as error:  # the model of the terms does not take the records
            self.say(f"refused: {error}")
            code = "model"
        except Exception as error:  # the text of an unforeseen error may hold data, so it stays here
            self.say(f"failed: {type(error).__name__}: {error}")
            code = "internal"
        return self._make_signed_reply("refused", nonce, run, request, code=code)

    def make_refusal(self, request: Envelope, code: str) -> Envelope:
        """A signed refusal, for what the transport notices (such as an expired request)."""
        with contextlib.suppress(BadMessage):
            header = read_message_header(request, tuple(_ANSWERS_BY_KIND))
            return self._make_signed_reply("refused", header["nonce"], header["run"], request, code=code)
        return self._make_signed_reply("refused", "", "", request, code=code)

    def answer_hello(self, header: dict[str, Any], request: Envelope) -> Envelope:
        """Send our name, our ledger's identity and what is public about our data, if the proposal is within our terms.

        Public are the number of units n_k and the shape of a record. Model and task follow from the terms and that
        shape; nothing is computed from the values of records or labels.
        """
        proposal = header["proposal"]
        if self.terms is None:
            self._ask_consent(proposal)
        assert self.terms is not None  # _ask_consent has set it or raised
        check_proposal(self.terms, proposal, self.simulation)
        self.prepare()
        return self._make_signed_reply(
            "welcome",
            header["nonce"],
            header["run"],
            request,
            units=self.trainer.units,
            shape=write_shape(self.dataset.shape),
            model=self.trainer.fingerprint,
            task=self.trainer.task_fingerprint,
            randomness="seeded" if self.simulation else "secure",
            ledger=head_to_table(self.ledger.head()),
        )

    def round(self, header: dict[str, Any], request: Envelope) -> Envelope:
        """One round: check the terms, reserve, train, store the reply; in this order."""
        if self.terms is None:
            raise TermsRefusal("no-terms")
        self.prepare()
        terms, trainer, run, t = self.terms, self.trainer, header["run"], header["round"]
        task = assignment_from_table(header["assignment"])
        streams = simulation_from_table(header["simulation"])
        check_round_request(terms, header, task, trainer.fingerprint, trainer.task_fingerprint, self.simulation)
        facts = PartyRunFacts(run, task.client, header["rule"], streams)
        rule, start = trainer.problem(facts).rule, trainer.start_state(facts)
        own = rule.where == "client"  # then nothing of its state comes from elsewhere
        moving = {} if own else select_moving_entries(rule.moves, start)
        spec: ArraySpec = {"params": (torch.float32, (trainer.layout.dim,)), **make_state_spec(moving)}
        arrays = read_message_arrays(request, spec)
        check_params(arrays["params"])
        moved = state_from_arrays(arrays)
        state = (
            self._load_own_state(run, t, start) if own else trainer.complete_state(facts, moved, t, header["rounds"])
        )
        check_clipping_state(terms, state, moved)
        if terms.aggregation == "pairwise":
            asked = RoundRequest(
                t, header["rounds"], arrays["params"].to(self.device), (task,), (state,), header["weight_decay"]
            )
            return self._report_ready(header, request, facts, asked, moved)

        stored = self.replies.get(run, t)
        if stored is not None:
            if stored.request != request.digest:
                raise TermsRefusal("repeated")
            # Settle again, in case of a crash between storing and settling; the same digest changes nothing.
            self.ledger.settle(run, t, {self.name: compute_stored_digest(stored.reply)})
            self.say(f"round {t + 1}: sent the stored reply again")
            return stored.reply
        planned = compute_planned_events(task, rule, task.rate * trainer.units, t)
        self._register_run(facts)
        self._reserve_round(run, t, planned)

        params = arrays["params"].to(self.device)
        asked = RoundRequest(t, header["rounds"], params, (task,), (state,), header["weight_decay"])
        update = trainer.train(facts, asked)
        if not events_agree(update.events, planned):
            raise BudgetError(f"round {t + 1} would release {update.events}, but {planned} was reserved.")
        # What leaves: functions of the released integers and of the request. Nothing else of the training does.
        released = {"delta": update.delta, "extra": update.extra}
        reply = self._make_signed_reply(
            "update",
            header["nonce"],
            run,
            request,
            arrays={**released, "C": update.state["C"]} if own else released,
            round=t,
            events=events_to_rows(update.events),
        )
        after = _state_to_bytes(trainer.adapt_own_state(facts, asked, update)) if own else None
        self.replies.put(run, t, request.digest, reply, after, self.ledger.head())
        self.ledger.settle(run, t, {self.name: compute_reply_digest(update)})
        self.say(
            f"round {t + 1} of {header['rounds']}: epsilon so far {format_epsilon(self.ledger.epsilon(self.name))}"
        )
        return reply

    def _report_ready(
        self,
        header: dict[str, Any],
        request: Envelope,
        facts: PartyRunFacts,
        asked: RoundRequest,
        moved: dict[str, torch.Tensor],
    ) -> Envelope:
        """With pairwise masks: compute, and say so. Nothing is released, and nothing is paid, before the manifest."""
        self._register_run(facts)
        pending = self._masked.compute(self.trainer, facts, asked, moved)
        key = self._masked.start_run(facts.run)
        return self._make_signed_reply(
            "ready",
            header["nonce"],
            facts.run,
            request,
            round=asked.round,
            fresh=pending.nonce,
            key=dataclasses.asdict(key.signed),
        )

    def answer_manifest(self, header: dict[str, Any], request: Envelope) -> Envelope:
        """With pairwise masks: check who takes part and on what terms, pay, mask, send."""
        if self.terms is None or self.terms.aggregation != "pairwise":
            raise TermsRefusal("aggregation")
        if self._masked.answered is not None and self._masked.answered[0] == request.digest:
            return self._masked.answered[1]  # the same bytes again: the same bytes in return
        spec: ArraySpec = {
            name: (torch.uint8, (header[f"{name}_bytes"],))
            for name in ("manifest", "keys")
            if 0 < header[f"{name}_bytes"] <= MAX_KEYS_BYTES
        }
        arrays = {name: bytes(value.numpy()) for name, value in read_message_arrays(request, spec).items()}
        run, t = header["run"], header["round"]
        self._masked.read_keys(arrays.get("keys", b""))
        update, unpinned = self._masked.mask(self.trainer, self.terms, self.ledger, run, t, arrays.get("manifest", b""))
        reply = self._make_signed_reply(
            "update",
            header["nonce"],
            run,
            request,
            arrays={"delta": pack_message(update.delta, update.bits), "extra": update.extra},
            round=t,
            events=events_to_rows(update.events),
        )
        self._masked.answered = (request.digest, reply)
        apart = f"; {unpinned} participants are not pinned and count as colluders" if unpinned else ""
        self.say(f"round {t + 1}: masked; epsilon so far {format_epsilon(self.ledger.epsilon(self.name))}{apart}")
        return reply

    def answer_finish(self, header: dict[str, Any], request: Envelope) -> Envelope:
        """The run is over; the coordinator asks for nothing more."""
        if self.terms is not None:
            self.prepare()
        self.done = True
        self._masked.forget()
        self.say(f"the coordinator has finished after {header['rounds']} rounds")
        return self._make_signed_reply("noted", header["nonce"], header["run"], request)

    def answer_notice(self, header: dict[str, Any], request: Envelope) -> Envelope:
        """A sentence for the people here, such as why this party does not take part."""
        self.say(f"the coordinator says: {show_value(header['text'], 1000)}")
        return self._make_signed_reply("noted", header["nonce"], header["run"], request)

    def _make_signed_reply(
        self,
        kind: str,
        nonce: str,
        run: str,
        request: Envelope,
        arrays: dict[str, torch.Tensor] | None = None,
        **more: Any,
    ) -> Envelope:
        header = {"kind": kind, "nonce": nonce, "run": run, "party": self.name, "request": request.digest, **more}
        return keys.sign_envelope(self.key, pack_envelope(header, arrays))

    # --- what answers need ------------------------------------------------------------------------

    def compute_request_limit(self) -> int:
        """The most bytes that an honest request has now: a greeting before the terms are agreed, then a model."""
        if self.terms is None:
            return UNKNOWN_REQUEST_BYTES
        try:
            dim = self.trainer.layout.dim
        except FulcrumError:  # the greeting is answered with it
            return UNKNOWN_REQUEST_BYTES
        # Weights, and whatever a rule may send of the same length beside; then the framing. Or a manifest with keys.
        masks = 2 * MAX_KEYS_BYTES if self.terms.aggregation == "pairwise" else 0
        return compute_max_body_bytes({"all": (torch.float64, (2 * dim,))}) + UNKNOWN_REQUEST_BYTES + masks

    def prepare(self) -> None:
        """Load this party's records and open its account in the ledger, once the terms are agreed.

        Raises DataError where the records do not fit the task of the terms; every answer but a refusal needs them.
        """
        assert self.terms is not None
        if self._dataset is None:
            dataset = self._load(self.terms)
            dataset = dataset if self.canaries is None else self.canaries.add_records(dataset)
            enroll_party(self.ledger, self.terms, dataset)
            self.ledger.bring_to_current_format()  # the coordinator gets to know which ledger this is
            self._dataset = dataset

    @property
    def dataset(self) -> Dataset:
        """This party's own records, with the task of its terms."""
        self.prepare()
        assert self._dataset is not None
        return self._dataset

    @property
    def trainer(self) -> LocalTrainer:
        """This party's model and engine, made when first needed; the terms must be agreed by then."""
        if self._trainer is None:
            assert self.terms is not None
            self._trainer = LocalTrainer(self.name, self.dataset, self.terms, self.device, self.canaries)
        return self._trainer

    def _ask_consent(self, proposal: dict[str, Any]) -> None:
        """Ask the person at this party; the terms they agree to are written to disk and hold from then on."""
        if self.consent is None:
            raise TermsRefusal("no-terms")
        try:
            with forbid_imports():
                terms = accept_proposal(self.name, proposal, look_up=False)
        except TaskNotDeclared as error:
            raise TermsRefusal("task", str(error)) from error
        except ConfigError as error:
            raise TermsRefusal("message", str(error)) from error
        try:
            if not self.consent(terms):
                raise TermsRefusal("consent")
            try:
                validate_terms(terms)  # looks up rules that are not built in: their code runs only now
            except ConfigError as error:
                raise TermsRefusal("rule", str(error)) from error
            self._load(terms)  # terms that the records do not fit are not pinned
        except DataError as error:
            # Not "data": whoever proposes 2, 3, 4, ... classes must not learn from the answers which number fits.
            raise TermsRefusal("consent", str(error)) from error
        with self.terms_path.open("x", encoding="utf-8") as file:
            file.write(terms_to_toml(terms))
        self.terms = terms

    def _load(self, terms: PartyTerms) -> Dataset:
        try:
            return check_task(self.load_records(terms.agreed_task), terms.agreed_task)
        except ConfigError as error:  # of the task's settings; where the records are wrong it is a DataError
            raise TermsRefusal("task", str(error)) from error

    def _register_run(self, facts: PartyRunFacts) -> None:
        """Say in the ledger what the run is, once per process; before its first release."""
        assert self.terms is not None
        if facts in self._registered:
            return
        found = register_party_run(self.ledger, self.terms, self.dataset, facts, self.trainer.problem(facts))
        if found.staying and (found.new or found.gone):
            self.say(
                f"run {facts.run}: {found.staying} {self.terms.unit}s are known from earlier runs and keep what they "
                f"spent, {found.new} are new, {found.gone} are gone"
            )
        self._registered.add(facts)

    def _load_own_state(self, run: str, t: int, start: RuleState) -> RuleState:
        """The clipping state that this party keeps for itself in a run; `start` before its first round."""
        stored = self.replies.get_state(run, t)
        if stored is None:
            return start
        found = load_arrays(stored)
        return {name: found[name].to(value) for name, value in start.items()}

    def _reserve_round(self, run: str, t: int, events: tuple[Event, ...]) -> None:
        """Pay before anything is computed. What was reserved and never released is not paid again."""
        if any(entry.digest is not None for entry in self.ledger.list_round_entries(self.name, run, t)):
            raise TermsRefusal("lost")
        try:
            granted = self.ledger.reserve(run, t, {self.name: events})
        except BudgetError as error:  # reserved before, for something else
            raise TermsRefusal("repeated") from error
        if not granted[self.name]:
            raise TermsRefusal("budget")

    def write_party_statement(self, folder: Path) -> None:
        """Write PRIVACY.md and privacy.json of this party, over all runs of its ledger."""
        if self.terms is None:
            return
        content = make_party_statement(
            self.terms, self.dataset, self.trainer.units, self.ledger, simulation=self.simulation, finished=self.done
        )
        folder.mkdir(parents=True, exist_ok=True)
        record.write_file_atomically(folder / "PRIVACY.md", statement_to_markdown(content).encode())
        record.write_file_atomically(folder / "privacy.json", record.to_json_text(content).encode())

    def close(self) -> None:
        """Close the ledger and the stored replies, and forget the key of the run."""
        self._masked.forget()
        self.ledger.close()
        self.replies.close()


_ANSWERS_BY_KIND: dict[str, Callable[[PartyService, dict[str, Any], Envelope], Envelope]] = {
    "hello": PartyService.answer_hello,
    "round": PartyService.round,
    "manifest": PartyService.answer_manifest,
    "done": PartyService.answer_finish,
    "notice": PartyService.answer_notice,
}


def _state_to_bytes(state: RuleState) -> bytes:
    return save_arrays({name: value.detach().cpu().clone().contiguous() for name, value in state.items()})


def compute_stored_digest(reply: Envelope) -> str:
    """The ledger's fingerprint of a stored update: that of its numbers, as in a run in one process."""
    arrays = decode_own_arrays(reply.body)
    return compute_reply_digest(ClientReply(0, arrays["delta"], arrays["extra"], (), {}))


@contextlib.contextmanager
def open_party_service(
    name: str,
    load_records: LoadRecords,
    key: Path,
    ledger: Path,
    terms: PartyTerms | None,
    terms_path: Path,
    *,
    consent: ConsentFn | None = None,
    simulation: bool = False,
    device: torch.device | None = None,
    say: MessageFn = print,
    gate: RequestGate | None = None,
    canaries: int = 0,
) -> Iterator[PartyService]:
    """A party's service over its ledger and the replies beside it (LEDGER.replies); one process at a time."""
    if terms is not None and terms.party != name:
        raise ConfigError(f"{terms_path} was agreed to by party {terms.party!r}, not {name!r}; use that name.")
    if terms is not None:
        check_declared(terms.agreed_task)
    ledger.parent.mkdir(parents=True, exist_ok=True)
    with ledger.with_name(ledger.name + ".lock").open("w") as lock:
        if not _try_lock_file(lock):
            raise ConfigError(f"ledger {ledger} is in use by another party process; stop that one first.")
        service = PartyService(
            name=name,
            load_records=load_records,
            key=keys.load_private_key(key),
            ledger=Ledger.open(ledger),
            replies=ReplyStore(ledger.with_name(ledger.name + ".replies")),
            terms=terms,
            terms_path=terms_path,
            consent=consent,
            simulation=simulation,
            device=device or torch.device("cpu"),
            say=lambda words: say(clean_message(words)),  # it may quote what a coordinator sent
            gate=gate,
            canaries=PartyCanaries(canaries, ledger) if canaries else None,
        )
        try:
            service.replies.check_ledger(service.ledger)
            yield service
        finally:
            service.close()


def _try_lock_file(handle: IO[str]) -> bool:
    """Lock a file for this process; False where another process holds it.

    Without a lock two processes could each release an answer to the same round under one reservation, so a system
    that cannot lock is refused.
    """
    try:
        import fcntl
    except ImportError:
        raise ConfigError(
            "fulcrum party needs a POSIX system such as Linux or macOS, since it locks the ledger against a second "
            "process; run the party there."
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
