"""Membership attacks, from kept scores to the page: reports, figures, and the tables of docs/attacks.md.

    python docs/attack_tables.py            # all of it, about two minutes of one core
    python docs/attack_tables.py --page     # only the page, from results/attacks/*.json
    python docs/attack_tables.py --check    # writes nothing; ends with 1 where the page differs from the files

results/attacks/scores/NAME/*.npz are the scores of a table's cells, as the attack's worker wrote them, less the
statistics that no report uses. New ones are kept by

    python docs/attack_tables.py --keep CELL.npz ... --as NAME [--fact KEY=TEXT ...]

where a fact (command, commit, date, prepared, note) is added to what the files say of themselves.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fulcrum.analysis.attacks.cells import MODEL, name_epsilon, read_scores, write_scores
from fulcrum.analysis.attacks.membership import (
    JOINT_STATISTIC,
    PLAIN_STATISTIC,
    PRIVATE_STATISTIC,
    CellReport,
    attack_pool,
)
from fulcrum.analysis.attacks.pages import write_report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "attacks"
PAGE = ROOT / "docs" / "attacks.md"
VIEWS = {"model": "final model", "releases": "one party's releases", "releases-joint": "releases, candidates listed"}
COLUMNS = ("epsilon", "view", "attack", "AUC", "at most", "TPR at 0.1% FPR, in %", "at most", "twins' AUC")
MACHINE = ("device", "processor", "cores", "python", "torch")


# --- scores ---------------------------------------------------------------------------------------


def keep_scores(files: Sequence[Path], name: str, added: Mapping[str, str]) -> None:
    """Copy cells into results/attacks/scores/NAME, with the scores that reports use and the added facts."""
    for path in files:
        held = read_scores(path)
        used = {MODEL, JOINT_STATISTIC, PLAIN_STATISTIC if held.cell.epsilon is None else PRIVATE_STATISTIC}
        scores = {view: values for view, values in held.scores.items() if view in used}
        write_scores(RESULTS / "scores" / name / path.name, replace(held, scores=scores, facts={**held.facts, **added}))


def read_reports(name: str) -> list[CellReport]:
    """All attacks on a table's cells, no privacy first."""
    held = [read_scores(path) for path in sorted((RESULTS / "scores" / name).glob("*.npz"))]
    return [attack_pool(scores) for scores in sorted(held, key=lambda scores: scores.cell.epsilon or 0.0)]


def describe_scores(reports: Sequence[CellReport]) -> dict[str, Any]:
    """Where the scores were made: what all cells agree on, the latest date, the commands of all.

    Commands that differ by the cell's name alone are one, with CELL for it.
    """
    facts = [report.facts for report in reports]
    commands = [str(r.facts["command"]).replace(f"--cells {r.cell.name} ", "--cells CELL ") for r in reports]
    found: dict[str, Any] = {
        "command": "; ".join(dict.fromkeys(commands)),
        "prepared": "; ".join(dict.fromkeys(str(each["prepared"]) for each in facts if each.get("prepared"))),
        "date": max(str(each["date"]) for each in facts),
        "commit": ", ".join(dict.fromkeys(str(each["commit"]) for each in facts)),
        "machine": {key: facts[0][key] for key in MACHINE},
        "note": "; ".join(dict.fromkeys(str(each["note"]) for each in facts if each.get("note"))),
        "reported_by": "python docs/attack_tables.py",
    }
    return {key: value for key, value in found.items() if value}


# --- the page -------------------------------------------------------------------------------------


def make_table(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each cell and view the attack with the largest AUC."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for cell in cells:
        limit = cell["limit"] or {"auc": 1.0, "tpr": {"0.001": 1.0}}
        for view, words in VIEWS.items():
            best = max(
                (each for each in cell["attacks"] if each["view"] == view), key=lambda each: each["auc"]["value"]
            )
            row = [name_epsilon(cell["epsilon"]), words, best["attack"]]
            row += [_format(best["auc"], 3), f"{limit['auc']:.3f}", _format(best["tpr"]["0.001"], 2, 100)]
            row += [f"{100 * limit['tpr']['0.001']:.2f}", _format(best["control_auc"], 3)]
            lines.append(f"| {' | '.join(row)} |")
    return lines


def _format(found: Mapping[str, float], digits: int, scale: float = 1.0) -> str:
    value, low, high = (f"{scale * found[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def make_section(table: str, facts: Mapping[str, Any]) -> str:
    """What the page says of a table: its cells, the rows, how they were made, the figures."""
    cells = facts["cells"]
    plain = next(cell for cell in cells if cell["epsilon"] is None)
    private = next(cell for cell in cells if cell["epsilon"] is not None)
    size, train, other = private["size"], private["settings"]["train"], plain["settings"]["train"]
    common = f", {size['common']:,} records that every federation has" if size.get("common") else ""
    listed = ""
    if common and size.get("known") is not None:
        listed = (
            f" The server's list has the candidates, the twins and {size['known']} of the records of every federation."
        )
    steps = f"{other['steps']} local steps" if other["steps"] > 1 else "one local step"
    named = [("no privacy" if cell["epsilon"] is None else name_epsilon(cell["epsilon"]), cell) for cell in cells]
    scores = ", ".join(f"{100 * cell['metrics']['accuracy']:.1f}% ({name})" for name, cell in named)
    rates = ", ".join(f"{cell['settings']['train']['lr']:g} ({name})" for name, cell in named)
    members = size["candidates"] // 2 + size.get("common", 0)
    lines = [
        f"{private['shadows']} federations per cell, {private['settings']['data']['parties']} parties with about "
        f"{members:,} records each: {size['candidates']} candidates of which half are members{common}; "
        f"{size['controls']} twins.{listed}",
        f"{train['rounds']} rounds, one step per round at rate {train['rate']:g}; without privacy {steps} per round at "
        f"rate {other['rate']:g}.",
        f"Learning rates: {rates}.",
        f"Mean test accuracy: {scores}.",
        "",
        *make_table(cells),
        "",
    ]
    lines += [f"Prepared by `{facts['prepared']}`."] if facts.get("prepared") else []
    machine = facts["machine"]
    device = machine["device"] if "NVIDIA" in machine["device"] else machine["processor"]
    seeds = ", ".join(map(str, facts["seeds"]))
    lines.append(f"Trained by `{facts['command']}` ({facts['date']}, {facts['commit']}; {device}; seed {seeds}).")
    lines += [facts["note"]] if facts.get("note") else []
    folder = "../results/attacks"
    lines.append(f"[All attacks]({folder}/{table}.md), [JSON with the curves]({folder}/{table}.json).")
    for view, words in (("releases-joint", "one party's releases, candidates listed"), ("model", "the final model")):
        lines += ["", f"![{table}: ROC of attacks on {words}]({folder}/{table}-{view}.svg)"]
    return "\n".join(lines)


INVERSION_EPSILONS = {"no privacy": None, "6.38": 6.38, "3.61": 3.61, "1.64": 1.64}


def make_inversion_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """PSNR and SSIM of each attack, epsilons side by side; the mean image is that of the cell without privacy."""
    columns = ("data", "model", "attack", "batch", *INVERSION_EPSILONS, "mean image")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    keys = [(row["data"], row["model"].partition(",")[0], row["attack"], row["batch"]) for row in rows]
    for key in dict.fromkeys(keys):
        found = {row["epsilon"]: row for row, own in zip(rows, keys, strict=True) if own == key}
        psnr, ssim = (found[None]["mean_image"][name] for name in ("psnr", "ssim"))
        cells = [
            f"{found[e]['psnr']['mean']:.1f} ± {found[e]['psnr']['half']:.1f}, {found[e]['ssim']['mean']:.2f}"
            for e in INVERSION_EPSILONS.values()
        ]
        lines.append(f"| {' | '.join([*key, *cells, f'{psnr:.1f}, {ssim:.2f}'])} |")
    return "\n".join(lines)


def make_token_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Shares of tokens found."""
    lines = ["| epsilon | batch | batches | tokens found | guessing |", "|---|---|---|---|---|"]
    for row in rows:
        share = f"{row['tokens_found']['mean']:.3f} ± {row['tokens_found']['half']:.3f}"
        words = [name_epsilon(row["epsilon"]), row["batch"], str(row["batches"]), share, f"{row['guessing']:.3f}"]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def fill_page(text: str, sections: Mapping[str, str]) -> str:
    """The page with what is between `<!-- attacks-NAME -->` and its end replaced."""
    for name, section in sections.items():
        mark = f"attacks-{name}"
        found = re.search(rf"<!-- {mark} -->\n.*?<!-- end {mark} -->", text, re.DOTALL)
        if found is None:
            raise SystemExit(f"docs/attacks.md has no place <!-- {mark} --> for results/attacks/{name}.json.")
        text = text.replace(found[0], f"<!-- {mark} -->\n\n{section}\n\n<!-- end {mark} -->")
    return text


def make_sections(folder: Path = RESULTS) -> dict[str, str]:
    """The sections of all stored reports."""
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}
    sections = {name: make_section(name, facts) for name, facts in found.items() if facts["kind"] == "membership"}
    inversion = found["inversion"]
    sections["inversion"] = make_inversion_table(inversion["images"])
    sections["tokens"] = make_token_table(inversion["tokens"])
    return sections


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", action="store_true", help="only the page, from the stored reports")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page differs")
    parser.add_argument("--keep", type=Path, nargs="+", default=[], help="files of the worker to keep")
    parser.add_argument("--as", dest="name", default="", help="name of the table that they belong to")
    parser.add_argument("--fact", action="append", default=[], metavar="KEY=TEXT", help="added to the kept files")
    words = parser.parse_args(argv)
    if words.keep:
        if not words.name or any("=" not in fact for fact in words.fact):
            parser.error("--keep needs --as NAME, and facts are KEY=TEXT")
        keep_scores(words.keep, words.name, dict(fact.split("=", 1) for fact in words.fact))
        return 0
    if not words.page and not words.check:
        for folder in sorted((RESULTS / "scores").iterdir()):
            reports = read_reports(folder.name)
            for path in write_report(RESULTS / f"{folder.name}.json", reports, made=describe_scores(reports)):
                print(f"wrote {path.relative_to(ROOT)}")
            for report in reports:
                for line in report.violations:
                    print(f"warning: {report.cell.name}: {line}")
    text = PAGE.read_text("utf-8")
    filled = fill_page(text, make_sections())
    if words.check:
        print("docs/attacks.md agrees with results/attacks" if filled == text else "run python docs/attack_tables.py")
        return int(filled != text)
    PAGE.write_text(filled, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
