"""The statement's sentences: the guarantee, its assumptions, composition, and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fulcrum.models.checkpoints import WeightOrigin
from fulcrum.models.pretrain import SYNTHETIC_INIT_NAME, ZERO_INIT_NAME
from fulcrum.privacy.accounting import format_epsilon
from fulcrum.privacy.plan import Plan
from fulcrum.privacy.statement.coverage import UNKNOWN, Coverage, name_runs
from fulcrum.privacy.statement.units import find_unit_texts
from fulcrum.settings.schema import Settings

RANDOMNESS_TEXTS = {
    "secure": (
        "Sampling and noise come from the stream cipher ChaCha20, under a key of 256 bits from the operating system's "
        "entropy that is never written down; nothing can be replayed. The guarantee relies on that entropy and on the "
        "cipher."
    ),
    "seeded": (
        "Sampling and noise come from the stream cipher ChaCha20 under a key made from a seed. Whoever knows or "
        "guesses the seed can subtract the noise: epsilon holds only while the seed is secret, and a small number is "
        "soon guessed. A run whose settings and seed are published is a simulation and protects nobody."
    ),
    "recorded": "Sampling and noise were replayed from a recording: this is a test and protects nobody.",
    UNKNOWN: (
        "The ledger does not say where the sampling and the noise of all its runs came from: rows of earlier versions "
        "have no such entry. Earlier versions drew seeded noise from a generator that is no cipher."
    ),
}
RANDOM_NUMBER_SOURCES = {
    "secure": ("ChaCha20", "operating system"),
    "seeded": ("ChaCha20", "seed"),
    "recorded": ("none", "recording"),
    UNKNOWN: (UNKNOWN, UNKNOWN),
}
"""Per randomness: the cipher, and where its key comes from."""
ARITHMETIC_TEXTS = {
    "proven": (
        "proven: from the gradients to the released integers every step is computed in float64 and has a written bound "
        "on its rounding (docs/privacy/), so a unit's contribution is at most what the noise was scaled to."
    ),
    "fast": (
        "fast: contributions are summed in float32. Their bound holds with margins that were measured in tests, not "
        "proven for every input."
    ),
    UNKNOWN: "unknown: rows of earlier versions do not say how sums were computed; those versions summed in float32.",
}
NOISE_TEXT = (
    "Exact Gaussian noise is added to each sum, and the result is rounded to a public grid of powers of two; what "
    "leaves is integers. Each rounding is certified: where float64 cannot decide it, more digits are computed. "
    "Rounding comes after the noise and costs nothing."
)
OLDER_NOISE_TEXT = (
    "Earlier runs on this ledger may have added their noise in float32 without such rounding: for them, the noise is "
    "Gaussian up to rounding errors only."
)
FLOATING_POINT_NOTES = {
    "proven": (
        "Floating-point arithmetic is covered from the gradients on (see Arithmetic and noise). What remains is how "
        "long it takes, and faults of processors and libraries that break the rules of IEEE 754."
    ),
    "fast": (
        "Floating-point arithmetic of the sums: float32 rounding errors may move a contribution beyond its bound by "
        "more than the measured margin. The noise itself is exact."
    ),
    UNKNOWN: (
        "Floating-point arithmetic of earlier runs: neither their sums nor their noise have a bound on rounding errors."
    ),
}
TEST_DATA_NOTE = (
    "Test data that was handed over apart (x_test): it counts as public, and metrics on it are computed in the clear."
)
EVALUATION_TEXTS = {
    "none": "Nothing was scored: there are no test records.",
    "public": (
        "Test records that were handed over apart from the training records (x_test) count as public. They are scored "
        "in the clear, and no epsilon covers them. If they are private, do not hand them over as test records."
    ),
    "public, held-out": (
        "A part of the public data was held out (data.validation) and scored in the clear; no epsilon covers it."
    ),
    "held-out": (
        "Held-out records of the training data (data.validation) were scored in the clear: THEIR METRICS ARE NOT "
        "PROTECTED. No epsilon covers the held-out records; it covers the records that were trained on."
    ),
    "held-out, paid": (
        "Held-out records of the training data (data.validation) were scored through noised counts (of a regression or "
        "of tokens: noised sums of clipped errors). They are a release, paid in the held-out records' own account, and "
        "the metrics follow from it."
    ),
}
"""By kind of records that the model was scored on."""
SCOPE_TEXTS = {
    "run": "This run only. Whatever else was released about the same data, before or after, adds to it.",
    "ledger": (
        "All runs on record in this ledger, this one included. The statement takes the worst of them: it is no better "
        "than its worst run. Whatever was released outside the ledger adds to it."
    ),
}


def guarantee_sentence(plan: Plan, coverage: Coverage, own: str, numbers: str, held_out: str = "") -> str:
    """The statement's main sentence. own: the id of this run. numbers: "epsilon = 4 (RDP; ...), delta = 1e-05".

    held_out: a sentence on private records that were held out and scored; "" where there are none.
    """
    short = find_unit_texts(plan.unit).short
    worth = coverage.level(plan.shares_noise)
    if worth == "none":
        bad = coverage.list_runs(lambda run: run.private is False)
        where = "" if name_runs(bad, own) == "this run" else f" in {name_runs(bad, own)} of this ledger"
        return f"There is no privacy guarantee: the updates left the parties without noise{where}."
    if worth == "nominal":
        bad = coverage.list_runs(lambda run: run.sound is False)
        rules = ", ".join(repr(rule) for rule in dict.fromkeys(run.rule for run in bad))
        which = (
            f"The rule {rules}" if name_runs(bad, own) == "this run" else f"In {name_runs(bad, own)} the rule {rules}"
        )
        return (
            f"NOT A GUARANTEE. {which} sets the clipping norm from raw private values, so {numbers} is "
            "nominal: it is what the noise would give if C were public, and what was released may reveal more."
        )
    if worth == UNKNOWN:
        bad = coverage.list_runs(lambda run: run.sound is None or run.randomness == UNKNOWN)
        return (
            f"NOT KNOWN TO BE A GUARANTEE. The ledger does not say which rule and which random numbers "
            f"{name_runs(bad, own)} used: an earlier version of Fulcrum wrote those rows. If the rules were sound and "
            f"the random numbers secret, each {short} has {numbers}."
        )
    apart = " that was trained on" if held_out else ""
    if worth == "assumed":
        return (
            f"UNDER AN ASSUMPTION ONLY: if the server saw nothing but the sum of all {plan.parties} parties' "
            f"updates, and no party colluded, each {short}{apart} would have {numbers}, while the seed is secret. That "
            "secure aggregation is SIMULATED: it is not implemented, and each single update is under-noised and not "
            "private by itself."
        )
    rest = f" {held_out}" if held_out else ""
    if worth == "simulation":
        masked = f" {describe_masks(plan)}" if plan.is_pairwise else ""
        return (
            f"SIMULATION. Each {short}{apart} has {numbers}, only while the seed is secret (see Randomness)."
            f"{masked}{rest}"
        )
    margin = {
        "proven": "",
        "fast": " The bound on a contribution has a measured margin and is not proven (see Arithmetic and noise).",
        UNKNOWN: " How all sums were computed is not on record (see Arithmetic and noise).",
    }[coverage.arithmetic]
    masked = f" {describe_masks(plan)}" if plan.is_pairwise else ""
    return f"Each {short}{apart} has {numbers}.{masked}{margin}{rest}"


def describe_masks(plan: Plan) -> str:
    """What the epsilon of masked sums rests on, in a sentence."""
    covered = {0: "but no participant at all", 1: "and one colluding party"}
    whom = covered.get(plan.colluders, f"and up to {plan.colluders} colluding parties")
    return (
        f"It holds against the server {whom}, of {plan.parties + plan.peers}; it is computational, and rests on the "
        "parties' keys (see Colluding parties)."
    )


def composition_sentence(plan: Plan, private: bool, composition: str) -> list[str]:
    """How parties, records and runs add up. composition: how the ledger adds runs up; "" where it says nothing."""
    if not private:
        return ["Nothing adds up: there is no guarantee for any record."]
    return [*find_unit_texts(plan.unit, plan.aggregation).adds_up, *([composition] if composition else [])]


def describe_randomness(coverage: Coverage) -> str:
    """Where the random numbers came from, the worst run first."""
    counts = Counter(run.randomness for run in coverage.runs)
    mixed = [f"{count} {mode}" for mode, count in counts.items()]
    several = f"Of {len(coverage.runs)} runs: {', '.join(mixed)}. " if len(mixed) > 1 else ""
    return several + RANDOMNESS_TEXTS[coverage.randomness]


def describe_arithmetic(coverage: Coverage) -> str:
    """How sums were computed in the worst run, and what the noise is."""
    older = coverage.list_runs(lambda run: run.arithmetic == UNKNOWN)
    return f"{ARITHMETIC_TEXTS[coverage.arithmetic]} {NOISE_TEXT}{' ' + OLDER_NOISE_TEXT if older else ''}"


REHEARSAL_TEXT = (
    "Before the run, the first step length, C, the learning rate and its schedule were chosen by training on made-up "
    "records (clip.rehearse). The choice saw the settings, the model, the declared numbers of records and the shape of "
    "a record, and no value of any record: it would be the same whatever the records say, so it costs no privacy."
)
"""How a rehearsed run's settings were chosen."""
PUBLIC_REHEARSAL_TEXT = (
    "Before the run, the first step length, C, the learning rate and its schedule were chosen by training on records "
    "that the user declared public: {source} (clip.rehearse_on). The choice saw their values, the settings, the model, "
    "the declared numbers of private records and the shape of a record, and no value of a private record, so it costs "
    "the parties no privacy. No epsilon covers the people in those public records."
)
"""The same, where public records took the place of made-up ones."""
PROPOSED_REHEARSAL_TEXT = (
    "The coordinator proposed a step length, C and a learning rate that it says were chosen by training on made-up "
    "records (clip.rehearse). Whether they were or not, they stood in the terms before this party read a record for "
    "this run: no value of its records moved them beyond what earlier releases, which its ledger has, may have told. "
    "So the choice costs no privacy."
)
"""The same, as far as a party across machines can know it."""


def describe_rehearsal(settings: Settings) -> str:
    """Why the choice of a rehearsed run's settings costs nothing."""
    source = settings.clip.rehearse_on
    return PUBLIC_REHEARSAL_TEXT.format(source=source) if source else REHEARSAL_TEXT


def is_rehearsed(settings: Settings) -> bool:
    """Whether a rehearsal chose the run's step."""
    return settings.clip.rehearse and settings.clip.step > 0


def describe_start(start: WeightOrigin, added: bool) -> str:
    """What was spent on the initial weights, and whether the numbers above hold it."""
    spent = f"epsilon = {format_epsilon(start.epsilon)}, delta = {start.delta:g} for one {start.unit}"
    counted = (
        "Both are added to those of this run: the sum holds for whoever has records in both. The parties' own numbers "
        "below are those of this run."
        if added
        else "This ledger has that run on record, and adds it up for every party."
    )
    return f"Training starts from the model of run {start.run}, on which {spent} was spent. {counted}"


def collect_warnings(
    settings: Settings, plan: Plan, coverage: Coverage, own: str, finished: bool, known_start: bool = False
) -> list[str]:
    """Warnings about the plan, the settings, the other runs of the scope, and the progress of the run.

    known_start: the initial weights are those of a run whose spend the statement tells.
    """
    found = list(plan.warnings)
    if not finished:
        whole = plan.accountant != "rdp"  # the ledger prices the plan, and counts it from its start
        found.append(
            "The run is not finished: this statement covers "
            + ("its whole plan, which counts from its start." if whole else "what has been reserved so far.")
        )
    unsound = coverage.list_runs(lambda run: run.sound is False and run.id != own)
    if unsound:
        found.append(f"A rule that is not sound was used in {name_runs(unsound, own)} of this ledger.")
    seeded = coverage.list_runs(lambda run: run.randomness in ("seeded", "recorded"))
    if seeded and coverage.private:
        which = "" if name_runs(seeded, own) == "this run" else f" in {name_runs(seeded, own)}"
        found.append(
            f"Simulation: the randomness{which} is {coverage.randomness}; for real data use privacy.randomness = "
            "secure."
        )
    unknown = coverage.list_runs(lambda run: run.sound is None or UNKNOWN in (run.randomness, run.arithmetic))
    if unknown:
        found.append(
            f"Rule, soundness, randomness or arithmetic of {name_runs(unknown, own)} is not on record: an earlier "
            "version wrote the ledger's rows."
        )
    if coverage.arithmetic == "fast" and not seeded and coverage.private:
        found.append(
            "Sums were computed in float32 with measured margins; for a proven bound use privacy.arithmetic = proven."
        )
    if settings.model.init not in ("random", SYNTHETIC_INIT_NAME, ZERO_INIT_NAME) and not known_start:
        what = "weights" if settings.model.coordinates == "plain" else "weights and facts about layers"
        found.append(
            f"Training starts from the {what} in {settings.model.init}, which are taken to be public. If private data "
            "went into them, what that training cost adds to this epsilon."
        )
    if settings.run.precision != "float32" and settings.run.engine in ("auto", "stacked"):
        found.append(
            f"run.precision = {settings.run.precision} rounds matrix products: clipping keeps a margin that held in "
            "every test, but the bound on a contribution is proved for float32 only. For simulations."
        )
    if settings.run.diagnostics:
        found.append("Non-private diagnostics were on: keep them inside the party, or turn run.diagnostics off.")
    return found


def format_numbers(epsilons: Mapping[str, str], delta: float) -> str:
    """ "epsilon = 4 (RDP; 3.6 by PLD), delta = 1e-05". epsilons: text of the largest of any party, by accountant."""
    first, *others = epsilons
    beside = ", ".join(f"{epsilons[name]} by {name.upper()}" for name in others)
    inside = first.upper() + (f"; {beside}" if beside else "")
    return f"epsilon = {epsilons[first]} ({inside}), delta = {delta:g}"
