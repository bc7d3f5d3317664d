"""What a party can answer beside an update: one of fixed sentences, which never carry anything about its data."""

from __future__ import annotations

from fulcrum.errors import FulcrumError

REFUSAL_TEXTS: dict[str, str] = {
    "message": "the message could not be read",
    "version": "the message is of another version of Fulcrum; install the same version at coordinator and parties",
    "party": "the request is for another party",
    "signature": "the request is not signed by the coordinator",
    "signer": "the request is signed with a key that this party does not know as the coordinator's",
    "expired": "the request has expired",
    "no-terms": "this party has agreed to no terms yet",
    "consent": "this party did not agree to the proposed terms",
    "rule": "the clipping rule is not one this party agreed to, or is not sound",
    "clip": "the clipping rule's settings are not the agreed ones",
    "arithmetic": "the run asks for proven arithmetic, and this party agreed to fast",
    "unit": "the unit of privacy is not the agreed one",
    "groups": "the grouping of parameters is not the agreed one",
    "model": "the model or its parameters are not the agreed ones",
    "params": "the weights are not finite or beyond any honest ones",
    "task": "the task (its loss, classes or ranges) is not the agreed one",
    "data": "the party's records do not fit the agreed task; its own log says why",
    "rate": "the sampling rate is above the agreed one, or beyond any honest one",
    "steps": "the local steps are more than agreed, or none",
    "sigma": "the noise multiplier is below the agreed one, or beyond any honest one",
    "rounds": "the round is beyond the agreed number of rounds",
    "C": "the clipping norm is not finite or outside the agreed range",
    "state": "the clipping state holds numbers beyond any honest ones",
    "lr": "the learning rate or weight decay is outside the agreed range",
    "interval": "the clipping rule's statistics are asked for in steps that were not agreed",
    "shared-noise": "the noise is to be shared with other parties, and this party's own noise must protect it",
    "aggregation": "the run's aggregation is not the agreed one, or covers fewer colluders",
    "manifest": "the manifest of the round is not one that this party can mask for",
    "stale": "the manifest does not hold the nonce that this party just drew",
    "peers": "the other participants' keys are not those that this party pinned, or too many are not pinned",
    "colluders": "the manifest covers fewer colluding parties than agreed, or leaves no honest one",
    "field": "the request asks for something that the terms do not cover",
    "seed": "a seed was asked for, and this party draws its own randomness",
    "no-seed": "this party simulates, and no seed was given",
    "seen-seed": "another run in this party's ledger had the seed of this simulation",
    "run": "this run's id stands for another run in this party's ledger",
    "repeated": "this round was answered before, to a different request",
    "lost": "this round was answered before, and the stored answer is gone",
    "budget": "the party's privacy budget is spent",
    "internal": "the party failed; its own log says why",
}
"""Everything that a party can answer beside an update: code -> words, known to both sides."""


class TermsRefusal(FulcrumError):
    """A party refuses. `code` is all that the coordinator gets to know."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{REFUSAL_TEXTS[code]}{f' ({detail})' if detail else ''}.")
        self.code = code
