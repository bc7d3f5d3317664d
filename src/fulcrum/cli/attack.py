"""`fulcrum attack`: what a curious server, or whoever has the final model, learns of single records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, show_help_without_command, with_settings
from fulcrum.cli.study_options import split_comma_list
from fulcrum.errors import ConfigError

if TYPE_CHECKING:
    from fulcrum.analysis.attacks.membership import CellReport
    from fulcrum.settings.schema import Settings

app = typer.Typer(
    help="Attack simulated runs on public data: membership inference and gradient inversion.",
    invoke_without_command=True,
)
EpsilonsOption = Annotated[
    str, typer.Option("--epsilons", metavar="none|N,..", help="Cells: none for no privacy, and epsilons.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Public seed: records, coins, split, initial weights.")]


@app.callback()
def attack(context: typer.Context) -> None:
    """Attack simulated runs on public data: membership inference and gradient inversion."""
    show_help_without_command(context)


def parse_epsilons(text: str) -> list[float | None]:
    """ "none,1.64" -> [None, 1.64]."""
    try:
        found = [None if word == "none" else float(word) for word in split_comma_list(text)]
    except ValueError:
        raise ConfigError(f"--epsilons {text} is not a list; write for example none,1.64,3.61.") from None
    if not found or any(number is not None and not number > 0 for number in found):
        raise ConfigError(f"--epsilons {text}: give none or numbers above 0.")
    return found


def parse_plain(words: Sequence[str]) -> dict[str, Any]:
    """["steps=5"] -> {"steps": 5}, by the settings' own reader."""
    from fulcrum.settings.reading import parse_assignment_option

    found = dict(parse_assignment_option(f"train.{word}") for word in words)
    return {name.removeprefix("train."): value for name, value in found.items()}


@app.command()
@with_settings
def membership(
    make_settings: Callable[..., Any],
    epsilons: EpsilonsOption = "none,1.64,3.61,6.38",
    method: Annotated[str, typer.Option("--method", help="The private cells' method; see `fulcrum methods`.")] = "moo",
    seed: SeedOption = 0,
    shadows: Annotated[
        int, typer.Option("--shadows", min=4, help="Federations per cell; each is the target once.")
    ] = 64,
    candidates: Annotated[
        int, typer.Option("--candidates", min=4, help="Records per party that may be members.")
    ] = 100,
    controls: Annotated[int, typer.Option("--controls", min=1, help="Records per party that are never members.")] = 25,
    common: Annotated[
        int, typer.Option("--common", min=0, help="Records per party that are in every federation, not attacked.")
    ] = 0,
    known: Annotated[
        int | None,
        typer.Option("--known", min=0, help="Of these, on the list of the server that has one; default: all."),
    ] = None,
    plain_lr: Annotated[
        float | None, typer.Option("--plain-lr", help="Learning rate of the cell without privacy; default: train.lr.")
    ] = None,
    plain_train: Annotated[
        list[str] | None,
        typer.Option(
            "--plain", metavar="KEY=VALUE", help="A value of [train] of the cell without privacy, as steps=5."
        ),
    ] = None,
    stack: Annotated[int, typer.Option("--stack", min=1, help="Federations in one tensor program.")] = 64,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder that keeps every pool's scores; the same command goes on there."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="JSON file for the result; a page and figures go beside it.")
    ] = None,
    prepare: Annotated[
        Path | None,
        typer.Option("--prepare", help="Only write cells and records for another machine into this folder."),
    ] = None,
    no_records: Annotated[
        bool, typer.Option("--no-records", help="With --prepare: no records; the other machine has the data set.")
    ] = False,
    scored: Annotated[
        Path | None, typer.Option("--scored", help="Attack pools that another machine trained; no other settings.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print every attack, not the best of each view.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Membership inference: loss threshold, LiRA and RMIA, from the final model and from one party's releases.

    A pool of shadow federations per epsilon, each the target once, beside what (epsilon, delta) allows any attack.
    """
    from fulcrum.analysis.attacks import pages
    from fulcrum.analysis.attacks.membership import attack_membership, attack_pool, load_attack_data, prepare_cell
    from fulcrum.analysis.attacks.pool import PoolSize

    if scored is not None:
        reports = [attack_pool(scores) for scores in _read_pools(scored)]
    else:
        size, wanted = PoolSize(shadows, candidates, controls, common, known), parse_epsilons(epsilons)
        more = {"run.seed": seed, "privacy.epsilon": next((e for e in wanted if e is not None), 1.0)}
        settings: Settings = make_settings(method, more)
        plain = {**parse_plain(plain_train or []), **({} if plain_lr is None else {"lr": plain_lr})}
        if prepare is not None:
            from fulcrum.analysis.attacks.worker import pack_cells

            dataset = load_attack_data(settings)
            cells = [prepare_cell(settings, epsilon, size, dataset, plain) for epsilon in wanted]
            for path in pack_cells(prepare, cells, dataset, not no_records):
                view.print_line(str(path))
            view.print_message(f"next: python -m fulcrum.analysis.attacks.worker {prepare} --out FOLDER", quiet)
            return
        with _show_cells(quiet or as_json) as on_cell:
            reports = attack_membership(settings, wanted, size, plain=plain, out=out, stack=stack, on_cell=on_cell)
    _print_reports(reports, report, every, as_json, quiet, pages)


@app.command()
@with_settings
def inversion(
    make_settings: Callable[..., Any],
    epsilons: EpsilonsOption = "none,1.64,3.61,6.38",
    method: Annotated[
        str, typer.Option("--method", help="The private cells' method; see `fulcrum methods`.")
    ] = "dp-sgd",
    seed: SeedOption = 0,
    attacks: Annotated[
        str, typer.Option("--attacks", metavar="A,B", help="dlg, cosine, ratio, imprint; default: all.")
    ] = "dlg,cosine,ratio,imprint",
    images: Annotated[int, typer.Option("--images", min=1, help="Single records, one release each.")] = 4,
    batches: Annotated[int, typer.Option("--batches", min=1, help="Whole Poisson batches, one per party.")] = 2,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Their expected size.")] = 8,
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Steps of the attacks that search.")] = 200,
    report: Annotated[Path | None, typer.Option("--report", help="JSON file for the result.")] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="SVG file: reconstructed images beside the originals.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Gradient inversion: rebuild images, or tokens of texts, from what the server sees of first rounds."""
    from fulcrum.analysis.attacks import pages
    from fulcrum.analysis.attacks.inversion import InversionSize, attack_inversion, attack_tokens
    from fulcrum.analysis.attacks.membership import load_attack_data
    from fulcrum.analysis.attacks.pictures import draw_reconstructions
    from fulcrum.runs import folder as record

    wanted = parse_epsilons(epsilons)
    more = {"run.seed": seed, "privacy.epsilon": next((e for e in wanted if e is not None), 1.0)}
    settings: Settings = make_settings(method, more)
    dataset, size = load_attack_data(settings), InversionSize(images, batches, batch, iterations)

    def say(words: str) -> None:
        view.print_message(words, quiet or as_json)

    rows, texts = [], []
    if dataset.has_integers:
        texts = attack_tokens(settings, wanted, size, dataset=dataset, say=say)
    else:
        rows = attack_inversion(settings, wanted, size, split_comma_list(attacks), dataset=dataset, say=say)
    chosen = {name: vars(getattr(settings, name)) for name in ("train", "clip")}
    facts = pages.inversion_to_json(rows, texts, chosen, seed)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        record.write_file_atomically(report, record.to_json_text(facts).encode())
    if figure is not None and rows:
        figure.parent.mkdir(parents=True, exist_ok=True)
        figure.write_text(draw_reconstructions(rows, "1", f"{dataset.name}: one record per release", facts["command"]))
    if as_json:
        view.print_json(facts)
        return
    if rows:
        view.print_table(pages.INVERSION_COLUMNS, pages.make_inversion_rows(rows))
        view.print_line(
            "The attacker is told the labels, the number of records and C. mean image: PSNR and SSIM of the public "
            "test set's mean, for which nothing is attacked."
        )
    else:
        view.print_table(pages.TOKEN_COLUMNS, pages.make_token_rows(texts))
        view.print_line("The attacker is told how many different tokens a batch has.")
    for path in (report, figure if rows else None):
        if path is not None:
            view.print_message(f"wrote {path}", quiet)


def _read_pools(folder: Path) -> list[Any]:
    from fulcrum.analysis.attacks.cells import read_scores

    files = sorted(path for path in folder.glob("*.npz") if not path.name.endswith(".part.npz"))
    if not files:
        raise ConfigError(f"--scored {folder} holds no .npz files of the attack's worker.")
    found = [read_scores(path) for path in files]
    return sorted(found, key=lambda scores: (scores.cell.settings.data.source, scores.cell.epsilon or 0.0))


def _print_reports(
    reports: Sequence[CellReport], report: Path | None, every: bool, as_json: bool, quiet: bool, pages: Any
) -> None:
    written = pages.write_report(report, reports) if report is not None else []
    if as_json:
        view.print_json(pages.report_to_json(reports))
        return
    first = reports[0]
    view.print_table(
        pages.COLUMNS,
        pages.make_rows(reports, every),
        f"membership, {first.shadows} federations per cell, {first.records:,} records, 95% intervals over targets and "
        "records",
    )
    view.print_line(
        "AUC 0.5 is guessing. at most: what the accountant's curve allows any attack. twins: records that were in no "
        "federation, so their AUC must be 0.5 within its interval."
    )
    for cell in reports:
        for words in cell.violations:
            view.print_line(f"warning: epsilon = {view.format_epsilon(cell.cell.epsilon)} does not hold: {words}.")
    for path in written:
        view.print_message(f"wrote {path}", quiet)


@contextlib.contextmanager
def _show_cells(quiet: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Progress per cell: a bar on a terminal, a line per cell elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if quiet or not console.is_terminal:

        def say(name: str) -> Callable[[int, int], None]:
            view.print_message(f"training the federations of {name}", quiet)
            return lambda done, total: None

        yield say
        return
    with Progress(console=console, transient=True) as bar:

        def add(name: str) -> Callable[[int, int], None]:
            task = bar.add_task(name, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total)

        yield add
