"""`fulcrum report`: one page about one run or several, to look at, to mail, to print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption

FIGURE_FORMATS = ("svg", "png", "pdf")


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold such folders.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The page, an HTML file.")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", help="Its title; default: what was run.")] = "",
    csv: Annotated[Path | None, typer.Option("--csv", help="Folder for the numbers as CSV files.")] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Folder for the figures; needs fulcrum-fl[figures].")
    ] = None,
    formats: Annotated[
        str, typer.Option("--formats", help="Formats of the figures: svg, png, pdf, with commas between them.")
    ] = "svg,png",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write one page about runs: score, privacy, curves, parties, settings. It opens anywhere, without a network."""
    from fulcrum.analysis.report.charts import make_charts
    from fulcrum.analysis.report.discovery import expand_folders
    from fulcrum.analysis.report.files import write_numbers, write_page
    from fulcrum.analysis.report.model import is_run_folder, read_run
    from fulcrum.analysis.report.page import make_page
    from fulcrum.analysis.report.study_page import is_study_folder, make_study_page
    from fulcrum.errors import ConfigError, RunError

    wanted = tuple(dict.fromkeys(word.strip().lower() for word in formats.split(",") if word.strip()))
    wrong = [word for word in wanted if word not in FIGURE_FORMATS]
    if wrong or not wanted:
        given = wrong[0] if wrong else formats
        raise ConfigError(f"--formats = {given!r} is not known; choose from {', '.join(FIGURE_FORMATS)}.")
    if len(folders) == 1 and not is_run_folder(folders[0]) and is_study_folder(folders[0]):
        write_page(out, make_study_page(folders[0], title))
        view.print_line(f"{out}: a study, {view.format_bytes(out.stat().st_size)}; open it in a browser.")
        return
    runs = [read_run(folder) for folder in expand_folders(folders)]
    if all(run.state in ("missing", "unreadable") for run in runs):
        raise RunError(runs[0].problems[0])
    for run in runs:
        for problem in run.problems:
            view.print_message(f"warning: {run.name}: {problem}")
    write_page(out, make_page(runs, title))
    written = [out]
    if csv is not None:
        written += write_numbers(csv, runs, make_charts(runs))
    if figures is not None:
        from fulcrum.analysis.report.figures import write_figures

        written += write_figures(figures, make_charts(runs), wanted)
    if as_json:
        view.print_json(
            {"page": str(out), "runs": [run.folder for run in runs], "files": [str(file) for file in written]}
        )
        return
    what = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    view.print_line(f"{out}: {what}, {view.format_bytes(out.stat().st_size)}; open it in a browser.")
    if len(written) > 1:
        view.print_line(f"{len(written) - 1} more files in {', '.join(str(each) for each in (csv, figures) if each)}")
