"""The options that settings have, made from the catalogue so that `run`, `plan` and the docs agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fulcrum.settings.catalogue import list_setting_fields
from fulcrum.settings.files import SHORT_NAMES, parse_assignment_option, parse_settings, read_settings

OPTION_TYPES: dict[Any, type] = {float | None: float, int | None: int}
"""What the command line reads for a setting that may be None: the other type."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no messages, the result only.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `settings` the argument CONFIG and an option for every short name.

    The other parameters of the function stay options of the command, before those of the settings.
    """
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "settings"]
    shared = [_make_config_argument(), _make_method_option(), *map(_make_short_option, SHORT_NAMES), _make_set_option()]

    def command(config: Path | None, method: str | None, set_: list[str], **names: Any) -> None:
        given = {path: names.pop(short) for short, path in SHORT_NAMES.items()}
        overrides = {path: value for path, value in given.items() if value is not None}
        overrides |= dict(parse_assignment_option(text) for text in set_)
        if config is not None and (config / "settings.toml").is_file():  # the folder of a run
            config = config / "settings.toml"
        settings = parse_settings({}, overrides, method) if config is None else read_settings(config, overrides, method)
        from fulcrum.runs.choices import check_choices

        function(settings=check_choices(settings), **names)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (shared[0], *own, *shared[1:])]
    command.__doc__, command.__name__ = function.__doc__, function.__name__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def show_help_without_command(context: typer.Context) -> None:
    """In the callback of a group: print its help where no command was given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _make_parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _make_config_argument() -> inspect.Parameter:
    words = "Settings file (TOML); `fulcrum init` writes one. Without it: the defaults and the options."
    info = typer.Argument(metavar="CONFIG.toml", help=words, show_default=False)
    return _make_parameter("config", Annotated[Path | None, info])


def _make_method_option() -> inspect.Parameter:
    info = typer.Option("--method", help="A preset; see `fulcrum methods`.", rich_help_panel="Settings")
    return _make_parameter("method", Annotated[str | None, info])


def _make_short_option(name: str) -> inspect.Parameter:
    field = list_setting_fields()[SHORT_NAMES[name]]
    kind = OPTION_TYPES.get(field.kind, field.kind)
    default = "" if field.default in (None, "") else f" Default {field.default}."
    info = typer.Option(
        f"--{name.replace('_', '-')}",
        help=escape(f"{field.words}{default}"),
        rich_help_panel="Settings",
    )
    return _make_parameter(name, Annotated[kind | None, info])


def _make_set_option() -> inspect.Parameter:
    words = "Any other setting, e.g. --set clip.kappa=0.01; repeat for more."
    info = typer.Option("--set", metavar="SECTION.NAME=VALUE", help=words, rich_help_panel="Settings")
    return _make_parameter("set_", Annotated[list[str], info], default=[])
