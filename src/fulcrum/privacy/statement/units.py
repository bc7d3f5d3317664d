"""What epsilon protects, from whom, and what it does not cover: the texts of the statement, one entry per unit.

Each unit is a different guarantee. The texts are side by side here so that they stay consistent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ZERO_OUT_ADJACENCY = (
    "zero-out: two data sets are neighbours if in one of them a single {unit} contributes nothing. The number of "
    "{unit}s at each party is a declared public constant, the same on both sides. Accounted as add-or-remove."
)
SEES_EVERY_UPDATE = (
    "An honest-but-curious server that follows the protocol, sees every update of every party, every released model "
    "and every clipping norm C, and knows all settings, the code, and who takes part in which round. Outsiders see "
    "no more than the server does, so the same bound holds against them. Other parties see no more either."
)
SEES_MODELS_ONLY = (
    "Whoever sees every released model and every clipping norm C and knows all settings and the code, but NOT who "
    "took part in which round: outsiders, users of the model, and other parties (each of which knows of its own part "
    "only). THE SERVER IS TRUSTED: it draws the participants in secret, sees every update as it is, and adds the "
    "noise. Nothing here protects a party from the server, nor from someone who watches which parties talk to it."
)
SEES_SUMS_ONLY = (
    "An honest-but-curious server that follows the protocol and sees, of each round, NOTHING BUT THE WEIGHTED SUM "
    "of all parties' updates: through an IDEAL SECURE AGGREGATION, which is ASSUMED and SIMULATED here, NOT "
    "IMPLEMENTED. It also sees every released model and every clipping norm C, and knows all settings, the code and "
    "who takes part. All parties are honest, take part in every round, and none colludes with the server or with "
    "another party: each colluder takes its part of the noise away. Whoever sees a single party's update sees it "
    "under-noised: by itself it is NOT private at this epsilon. Outsiders, who see only models, are covered under "
    "the same assumption."
)
STEPS_COMPOSE_TEXT = (
    "The releases of a party compose over all its rounds and steps; what a round costs is written to the party's "
    "ledger before anything is released. Poisson sampling lowers the cost because nobody learns who was sampled. The "
    "epsilon of the federation is the largest of its parties'."
)
ROUNDS_COMPOSE_TEXT = (
    "Each round the server makes one release, a noised mean over the parties that joined; each party joins "
    "independently with probability q_c. EVERY party is charged for every round, whether it joined or not, and the "
    "charge is written to its ledger before anything is released. Sampling lowers the cost because nobody but the "
    "server learns who joined: publishing the participants would undo it."
)
SUMS_COMPOSE_TEXT = (
    "Each round releases one thing, the weighted sum over all parties of one step each. Every party adds 1/K of the "
    "noise's variance, so that the sum carries it whole; an example, at whichever party, moves the sum by at most C. "
    "Each party's ledger is charged what the sum costs, before anything is released. Poisson sampling lowers the cost "
    "because nobody learns who was sampled."
)
SEVERAL_PARTIES = (
    "A person with data at several parties adds up the epsilons (and the deltas) of those parties. Otherwise the "
    "parties' data is taken to be disjoint, and the epsilon of the federation is the largest of its parties'."
)
UPDATE_TIMING_NOTE = "Timing: how long a party takes, and whether it answers, is not hidden."
ROUND_TIMING_NOTE = (
    "Timing: how long a round takes (`seconds` in metrics.jsonl) tells roughly how many joined it; do not publish it."
)
PUBLIC_SIZES = (
    "Public constants: who the parties are, how many units each holds, who takes part in which round, the number of "
    "classes, the shape of the data, and the constants that scale it. None of them may be computed from private data."
)
PUBLIC_TOTALS = (
    "Public constants: who the parties are and how many, the rate q_c at which they join, the cap on a party's weight "
    "and the total weight W, the number of classes, the shape of the data, and the constants that scale it. None of "
    "them may be computed from private data; where W or the cap come from the parties' true sizes, those sizes count "
    "as public."
)
SPREAD_DATA_NOTE = (
    "Data of one person that is spread over several units or parties, beyond the arithmetic stated above."
)
NOT_COVERED = (
    "Side channels of the machines: memory, caches, power, logs, debuggers, swap.",
    "Choosing settings: if several runs were made on the same data and the best was kept, the others count too. Only a "
    "ledger kept over all of them adds them up.",
    "Copies: a folder or ledger that was copied and continued twice has two histories, and each tells of its own.",
    "A malicious server or party that departs from the protocol, poisons the model, or changes the code.",
    "What the model teaches about the population: the guarantee bounds what one unit adds, not what can be inferred "
    "about people in general.",
)


@dataclass(frozen=True)
class UnitTexts:
    """The texts of one unit of privacy.

    short: for "epsilon of one ...". protected: the start of a sentence. relation, adversary, counted, not_covered and
    adds_up: sentences. several: the heading of the table for m units together; "" for no table. alike: whether all
    parties are charged the same, so that parties with the same line share one line.
    """

    short: str
    protected: str
    relation: str
    adversary: str
    counted: str
    adds_up: tuple[str, ...]
    not_covered: tuple[str, ...]
    several: str = ""
    alike: bool = False


UNIT_TEXTS: dict[str, UnitTexts] = {
    "example": UnitTexts(
        short="example",
        protected="One example at one party.",
        relation=ZERO_OUT_ADJACENCY.format(unit="example"),
        adversary=SEES_EVERY_UPDATE,
        counted=STEPS_COMPOSE_TEXT,
        adds_up=(
            "The unit is one example. A person with m examples at one party is covered by group privacy only: m times "
            "epsilon, with delta growing to m exp((m-1) epsilon) delta, as listed. Where people have several records, "
            "use the unit `person` instead.",
            SEVERAL_PARTIES,
        ),
        not_covered=(UPDATE_TIMING_NOTE, *NOT_COVERED, PUBLIC_SIZES, SPREAD_DATA_NOTE),
        several="examples of one person",
    ),
    "person": UnitTexts(
        short="person",
        protected="One person at one party.",
        relation=ZERO_OUT_ADJACENCY.format(unit="person"),
        adversary=SEES_EVERY_UPDATE,
        counted=STEPS_COMPOSE_TEXT,
        adds_up=(
            "The unit is the person: all records of one person at one party are sampled together and clipped as one, "
            "so epsilon holds for all of them together.",
            SEVERAL_PARTIES,
        ),
        not_covered=(UPDATE_TIMING_NOTE, *NOT_COVERED, PUBLIC_SIZES, SPREAD_DATA_NOTE),
    ),
    "client": UnitTexts(
        short="whole party",
        protected="One whole party: all its records together, and whether it took part at all.",
        relation=(
            "zero-out: two federations are neighbours if in one of them a single party contributes nothing, in any "
            "round. The number of parties K, the cap on weights and the total weight W are declared public constants, "
            "the same on both sides. Accounted as add-or-remove."
        ),
        adversary=SEES_MODELS_ONLY,
        counted=ROUNDS_COMPOSE_TEXT,
        adds_up=(
            "The unit is the whole party, so epsilon holds for all records at one party together, and for each of "
            "them. It is another promise than the epsilon of one example or person: the two must not be compared.",
            "A person with data at m parties, or m parties that belong together, are covered by group privacy only: m "
            "times epsilon, with delta growing to m exp((m-1) epsilon) delta, as listed.",
        ),
        not_covered=(ROUND_TIMING_NOTE, *NOT_COVERED, PUBLIC_TOTALS, SPREAD_DATA_NOTE),
        several="parties together",
        alike=True,
    ),
}

SECURE_SUM_TEXTS = replace(
    UNIT_TEXTS["example"],
    protected="One example at one party, within the sum over all parties.",
    adversary=SEES_SUMS_ONLY,
    counted=SUMS_COMPOSE_TEXT,
    adds_up=(
        "The unit is one example. A person with m examples, at one party or at several, is covered by group privacy "
        "only: m times epsilon, with delta growing to m exp((m-1) epsilon) delta, as listed. All of them are in the "
        "same sums.",
    ),
    not_covered=(
        "Single updates: the secure aggregation that would hide them is assumed. Nothing in this software provides it.",
        "Colluding parties, parties that leave out their part of the noise, and parties that drop out.",
        *UNIT_TEXTS["example"].not_covered,
    ),
)
"""Texts for unit example where the parties share one noise vector (privacy.aggregation = "ideal-secagg")."""


SEES_MASKED_SUMS = (
    "The server together with up to {colluders} of the parties, whichever they are; they may pool all they see and "
    "know: the masked messages, every released model and clipping norm C, all settings, the code, who takes part, and "
    "the colluders' own masks, noise and data. Of the honest parties' messages they learn the sum and nothing else, as "
    "long as ChaCha20, X25519, SHA-256 and the parties' signatures are not broken: THE GUARANTEE IS COMPUTATIONAL. The "
    "others follow the protocol, and hold each other's true keys. With more colluders the epsilons below hold "
    "instead. Outsiders, who see only models, see less."
)
NO_COLLUDERS_TEXT = (
    "With 0 colluders the server alone is covered, and outsiders who hold no party's message. NO PARTICIPANT IS: a "
    "party that reads the model and takes its own message off the sum has one dose less in what is left."
)
MASKED_SUMS_COMPOSE_TEXT = (
    "Each round releases one thing, the weighted sum over the participants of one step each. A participant's own noise "
    "is large enough that the honest participants' noises add up to sigma_eff, whichever parties collude (docs/"
    "pairwise.md); a unit, at whichever party, moves the sum by at most its own bound. Each party's ledger is charged "
    "what the sum costs, before anything is released. A round that is void, because a message was missing, is paid by "
    "whoever had sent its own. Poisson sampling lowers the cost because nobody learns who was sampled."
)
SAME_SUMS = (
    "A person with records at several parties is in the same sums several times, so the epsilons of those parties do "
    "not simply add up: the sum moves by 0, 1 or 2 contributions in a round. The table of colluding parties has what "
    "holds for records at two parties."
)


def _make_masked_texts(unit: str) -> UnitTexts:
    plain = UNIT_TEXTS[unit]
    return replace(
        plain,
        protected=f"{plain.protected.removesuffix('.')}, within the sum over the participants.",
        adversary=SEES_MASKED_SUMS,
        counted=MASKED_SUMS_COMPOSE_TEXT,
        adds_up=tuple(SAME_SUMS if text == SEVERAL_PARTIES else text for text in plain.adds_up),
        not_covered=(
            "Whether a party spoils a round: single messages look random, so nobody can tell.",
            *plain.not_covered,
        ),
    )


MASKED_SUM_TEXTS = {unit: _make_masked_texts(unit) for unit in ("example", "person")}
"""Texts where messages are masked in pairs (privacy.aggregation = "pairwise"), by unit."""


def find_unit_texts(unit: str, aggregation: str = "plain", colluders: int = 1) -> UnitTexts:
    """The texts for a unit and an aggregation. colluders: with pairwise masks, how many are covered."""
    if aggregation == "pairwise":
        texts = MASKED_SUM_TEXTS[unit]
        adversary = texts.adversary.format(colluders=colluders)
        return replace(texts, adversary=adversary if colluders else f"{adversary} {NO_COLLUDERS_TEXT}")
    return SECURE_SUM_TEXTS if aggregation == "ideal-secagg" else UNIT_TEXTS[unit]
