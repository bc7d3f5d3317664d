"""PRIVACY.md: the facts as a page that a data-protection officer can read and sign."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fulcrum.privacy.accounting import format_epsilon
from fulcrum.privacy.statement.meaning import write_meaning
from fulcrum.privacy.statement.units import UnitTexts, find_unit_texts

MAX_PARTIES_ON_PAGE = 1000
"""The largest number of parties that PRIVACY.md lists; beyond, it gives a summary."""
SIGNATURE_ROLES = ("responsible for the run", "data-protection officer")


MAX_RUNS_ON_PAGE = 50
"""The largest number of covered runs that PRIVACY.md lists; privacy.json lists all."""

GUARANTEE_BANNERS = {
    "nominal": "a clipping rule within the scope is not sound. The epsilon is NOMINAL, not a guarantee.",
    "unknown": "an earlier version wrote rows of this ledger without what makes an epsilon a guarantee.",
    "simulation": (
        "SIMULATION. The random numbers follow from a seed: whoever knows or guesses it can subtract the noise. For "
        "real data use privacy.randomness = secure."
    ),
    "assumed": (
        "SIMULATED SECURE AGGREGATION. The epsilon of this run is against a server that sees only SUMS over all "
        "parties, which nothing here enforces. Single updates are under-noised and NOT private."
    ),
    "none": "NOT PRIVATE: values left without noise. Nothing below protects anybody.",
}
"""The first warning on the page, where the guarantee is not "yes"."""


def statement_to_markdown(facts: Mapping[str, Any]) -> str:
    """The statement as a page that a data-protection officer can read and sign."""
    worth, unit = facts["guarantee"], find_unit_texts(facts["unit"], facts["aggregation"])
    protected = f"{unit.protected} Neighbouring relation: {facts['relation']}"
    released = [f"{item['kind']} ({item['times']}): {item['text']}" for item in facts["releases"]]
    title = "# Privacy statement" + (" of a simulation" if facts["simulation"] else "")
    arithmetic = facts["arithmetic"]["text"]
    lines = [
        *make_paragraph(title),
        *(make_paragraph(f"> **WARNING: {GUARANTEE_BANNERS[worth]}**") if worth != "yes" else ()),
        *make_paragraph(f"**{facts['guarantee_text']}**"),
        *_write_summary(facts),
        *(make_section("What this epsilon means", write_meaning(facts)) if "meaning" in facts else ()),
        *(make_section("Warnings", make_bullet_list(facts["warnings"])) if facts["warnings"] else ()),
        *make_section("What is protected", make_paragraph(protected)),
        *make_section("Against whom", make_paragraph(facts["adversary"])),
        *(make_section("Colluding parties", _write_colluders(facts["pairwise"])) if "pairwise" in facts else ()),
        *make_section("How it is counted", make_paragraph(_describe_accounting(facts, unit))),
        *make_section("Scope", make_paragraph(_describe_scope(facts["scope"], _list_accountants(facts)[0]))),
        *(make_section("Initial weights", make_paragraph(facts["start"]["text"])) if "start" in facts else ()),
        *make_section("Runs covered", _write_covered_runs(facts["runs_covered"])),
        *make_section("Randomness", make_paragraph(facts["randomness"]["text"])),
        *make_section("Arithmetic and noise", make_paragraph(arithmetic[0].upper() + arithmetic[1:])),
        *make_section("Evaluation", make_paragraph(facts["evaluation"]["text"])),
        *(make_section("Rehearsal", make_paragraph(facts["rehearsal"])) if facts.get("rehearsal") else ()),
        *make_section("What was released", make_bullet_list(released)),
        *make_section("Parties", _write_parties(facts)),
        *make_section(
            "How parties and records add up", [*make_bullet_list(facts["adds_up"]), *_write_group_privacy(facts, unit)]
        ),
        *make_section("What is not covered", make_bullet_list(facts["not_covered"])),
        *make_section(
            "Signatures",
            make_page_table(("role", "name", "date", "signature"), [(who, "", "", "") for who in SIGNATURE_ROLES]),
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _write_colluders(masks: Mapping[str, Any]) -> list[str]:
    """What holds with the covered colluders and with more, for a person at two parties, and whose keys were pinned."""
    covered = {masks["colluders"]: " (covered)"}
    rows = [
        (
            f"{row['colluders']} of {masks['parties']}{covered.get(row['colluders'], '')}",
            format_short_value(row["sigma_eff"]),
            format_epsilon_value(row["epsilon"]),
        )
        for row in masks["table"]
    ]
    two = masks["two_parties"]
    mixture = (
        f"epsilon = {format_epsilon_value(two['epsilon'])} at delta = {format_short_value(two['delta'])} at the "
        "planned end (PLD of the mixture of shifts), and also "
        if two["epsilon"] is not None
        else ""
    )
    both = f"epsilon = {format_epsilon_value(two['composed_epsilon'])}"
    both += f" at delta = {format_short_value(two['composed_delta'])} (e1 + e2, d1 + exp(e1) d2)"
    keys = [(key["party"], f"`{key['fingerprint']}`", key["pinned"]) for key in masks["keys"]]
    header = ("parties that collude with the server", "sigma_eff, least", "epsilon at the planned end")
    return [
        *make_paragraph(masks["text"]),
        *make_page_table(header, rows),
        *make_paragraph(f"Records of one person at two parties: {mixture}{both}."),
        *(make_page_table(("party", "signing key", "pinned"), keys) if keys else ()),
    ]


def _write_summary(facts: Mapping[str, Any]) -> list[str]:
    """Summary of the run: its identity, target and spent epsilon."""
    run = facts["run"]
    first, *others = _list_accountants(facts)
    beside = [f", {format_epsilon_value(facts[f'epsilon_{name}'])} ({name.upper()})" for name in others]
    own, every = (", this run", ", all runs") if facts["scope"]["kind"] == "ledger" else ("", "")
    spent = f"epsilon = {format_epsilon_value(facts['epsilon'])} ({first.upper()}){''.join(beside)}"
    return make_page_table(
        ("", ""),
        [
            ("run", f"`{run['id']}`"),
            ("date", run["date"]),
            ("software", f"Fulcrum {run['version']}, {facts['accountant']['software']}"),
            ("data", run["dataset"]),
            ("method, rule", f"{run['method']}, {run['rule']}"),
            (f"rounds{own if 'total' in facts else ''}", _describe_rounds(run)),
            ("asked for", _describe_target(facts["target"]) if facts["private"] else "no privacy"),
            (f"planned at most{own}", f"epsilon = {format_epsilon_value(facts['planned']['epsilon'])}"),
            (f"spent{every}", spent + (", seen in sums only (assumed)" if facts["guarantee"] == "assumed" else "")),
            *_list_totals(facts),
            ("delta", format_short_value(facts["delta"])),
        ],
    )


def _describe_rounds(run: Mapping[str, Any]) -> str:
    """The rounds of one run beside the most that it may have."""
    end = "" if run["finished"] else " (not finished)"
    if run["rounds_done"] > run["rounds"]:  # the terms were agreed anew since
        return f"{run['rounds_done']}, before today's terms of at most {run['rounds']} per run{end}"
    return f"{run['rounds_done']} of {run['rounds']}{end}"


def _list_totals(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What one run spent, and the totals of all, where a statement has them."""
    if "total" not in facts:
        return []
    total, own = facts["total"], facts["scope"].get("run_epsilon")
    return [
        *([("spent, this run", f"epsilon = {format_epsilon_value(own)}")] if own is not None else []),
        ("runs and rounds, all runs", f"{total['runs']} run(s), {total['rounds']} rounds"),
        (
            "budget, all runs",
            "none" if total["budget"] is None else f"epsilon = {format_epsilon_value(total['budget'])}",
        ),
    ]


def _list_accountants(facts: Mapping[str, Any]) -> list[str]:
    """The names of the accountants in the facts, the headline first: each has a key per party."""
    return [key.removeprefix("epsilon_") for key in facts["parties"][0] if key.startswith("epsilon_")]


def _describe_target(target: Mapping[str, Any]) -> str:
    if target["epsilon"] is None:
        return f"noise multiplier sigma = {format_short_value(target['sigma'])}"
    own = f", {len(target['budgets'])} with a budget of their own" if target["budgets"] else ""
    return f"epsilon = {format_epsilon_value(target['epsilon'])} for each party{own}"


def _describe_accounting(facts: Mapping[str, Any], unit: UnitTexts) -> str:
    accountant = facts["accountant"]
    enforced, beside = accountant["enforced"].upper(), accountant["beside"].upper()
    which = "all" if "," in beside else "both"
    shown = f", {beside} is shown beside it; {which} are upper bounds" if beside else "; it is an upper bound"
    early = (
        " The value beside it is that of a plan that is carried out: whoever stops the run after looking at it counts "
        f"the planned one, {format_epsilon_value(facts['planned']['epsilon_pld'])} by PLD."
        if "PLD" in beside and not facts["run"]["finished"]
        else ""
    )
    return f"By {accountant['software']}: {enforced} is enforced{shown}.{early} {unit.counted}"


def _write_group_privacy(facts: Mapping[str, Any], unit: UnitTexts) -> list[str]:
    """The guarantee for several units together, where it applies."""
    if not facts["private"] or not unit.several:
        return []
    rows = [
        (str(g["records"]), format_epsilon_value(g["epsilon"]), _format_group_delta(g["delta"]))
        for g in facts["groups_of_records"]
    ]
    return make_page_table((unit.several, "epsilon", "delta"), rows)


def _write_parties(facts: Mapping[str, Any]) -> list[str]:
    parties, names = facts["parties"], _list_accountants(facts)
    columns = [f"epsilon ({name.upper()})" for name in names]
    costs = [f"epsilon_{name}" for name in names]
    if find_unit_texts(facts["unit"]).alike:
        return _write_equal_parties(parties, columns, costs)
    sigma = "sigma" if facts["schedule"]["name"] == "constant" else "sigma (first round)"
    sigma += {"ideal-secagg": " of the sum", "pairwise": "_eff"}.get(facts["aggregation"], "")
    header = ("party", f"{facts['unit']}s", "rate", sigma, "releases", *columns, "budget of this run")
    shown = parties
    lines: list[str] = []
    if len(parties) > MAX_PARTIES_ON_PAGE:
        units = [p["units"] for p in parties]
        lines = [
            f"{len(parties)} parties with {min(units)} to {max(units)} {facts['unit']}s each; every one is listed in "
            "privacy.json. The ten with the largest epsilon:",
            "",
        ]
        shown = sorted(parties, key=lambda p: (-float(p[costs[0]]), p["units"]))[:10]
    keys = ("units", "rate", "sigma", "releases", *costs, "budget")
    return lines + make_page_table(
        header, [(escape_table_cell(p["name"]), *(_format_party_value(p, key) for key in keys)) for p in shown]
    )


def _format_party_value(party: Mapping[str, Any], key: str) -> str:
    """A cell of the table of parties; an epsilon is rounded up."""
    return (format_epsilon_value if key.startswith("epsilon_") else format_short_value)(party[key])


def _write_covered_runs(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per run within the scope; the last ones of many."""
    shown = runs[-MAX_RUNS_ON_PAGE:]
    more = f"The last {len(shown)} of {len(runs)} runs; every one is in privacy.json."
    sound = {True: "yes", False: "NO", None: "not on record"}
    more_facts = any("epsilon" in run for run in shown)
    rows = [
        (
            f"`{run['id']}`",
            escape_table_cell(run["rule"]),
            sound[run["sound"]],
            run["randomness"],
            run["arithmetic"],
            *(
                (str(run["rounds"]), format_epsilon_value(run["epsilon"]))
                if "epsilon" in run
                else ("", "")[: 2 * more_facts]
            ),
        )
        for run in shown
    ]
    return [
        *(make_paragraph(more) if len(shown) < len(runs) else ()),
        *make_page_table(
            ("run", "rule", "sound", "randomness", "arithmetic", *(("rounds", "epsilon alone") if more_facts else ())),
            rows,
        ),
    ]


def _write_equal_parties(
    parties: Sequence[Mapping[str, Any]], columns: Sequence[str], costs: Sequence[str]
) -> list[str]:
    """The table with one line for all parties that have the same values."""
    keys = ("rate", "sigma", "releases", *costs, "budget")
    lines: dict[tuple[str, ...], list[str]] = {}
    for party in parties:
        lines.setdefault(tuple(_format_party_value(party, key) for key in keys), []).append(party["name"])
    header = ("parties", "rate q_c", "sigma z", "releases", *columns, "budget of this run")
    who = {values: names[0] if len(names) == 1 else f"{len(names)} parties" for values, names in lines.items()}
    return make_page_table(header, [(escape_table_cell(who[values]), *values) for values in lines])


def _describe_scope(scope: Mapping[str, Any], accountant: str) -> str:
    own = (
        f" This run alone: epsilon = {format_epsilon_value(scope['run_epsilon'])} ({accountant.upper()})."
        if "run_epsilon" in scope
        else ""
    )
    head = scope.get("ledger")
    bound = (
        f" Ledger `{head['identity']}` with {head['sequence']} rows, the last one with digest `{head['digest']}`."
        if head
        else ""
    )
    return f"{scope['text']}{own}{bound}"


def _format_group_delta(delta: float) -> str:
    return format_short_value(delta) if delta < 1 else "1 (no guarantee)"


# --- Markdown elements as lines, each ending in an empty line; values as text of table cells ---


def format_short_value(value: float | str | None) -> str:
    """A value as short text: five digits of a number, "none" for None, "infinite" for JSON's "inf"."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return "infinite" if value == "inf" else value
    return f"{value:d}" if isinstance(value, int) else f"{value:.5g}"


def format_epsilon_value(value: float | str) -> str:
    """An epsilon as text, rounded up; "infinite" for JSON's "inf"."""
    return "infinite" if value == "inf" else format_epsilon(float(value))


def escape_table_cell(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def make_section(title: str, lines: Iterable[str]) -> list[str]:
    """A heading and its lines."""
    return [f"## {title}", "", *lines]


def make_paragraph(text: str) -> list[str]:
    """A paragraph."""
    return [text, ""]


def make_bullet_list(items: Iterable[str]) -> list[str]:
    """A list."""
    return [*(f"- {item}" for item in items), ""]


def make_page_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table."""
    rule = "|".join("---" for _ in header)
    return [f"| {' | '.join(header)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows), ""]
