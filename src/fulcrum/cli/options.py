"""The options that settings have, made from the catalogue so that `run`, `plan` and the docs agree."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.markup import escape

from fulcrum.settings.catalogue import list_setting_fields
from fulcrum.settings.files import SHORT_NAMES, parse_assignment_option, parse_settings, read_settings
from fulcrum.settings.schema import Settings

OPTION_TYPES: dict[Any, type] = {float | None: float, int | None: int}
"""What the command line reads for a setting that may be None: the other type."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no messages, the result only.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes `settings` the argument CONFIG and an option for every short name.

    The other parameters of the function stay options of the command, before those of the settings. A function that
    takes `make_settings` in place of `settings` gets a function of (method, settings that take precedence), and no
    options for what its calls decide. One that takes `run_folder` gets the folder where CONFIG is that of a run.
    """
    taken = inspect.signature(function, eval_str=True).parameters
    own = [p for p in taken.values() if p.name not in ("settings", "make_settings", "run_folder")]
    several = "make_settings" in taken
    names_shown = [name for name in SHORT_NAMES if not (several and name in ("epsilon", "seed"))]
    method_option = [] if several else [_make_method_option()]  # a function may have one of its own
    shared = [_make_config_argument(), *method_option, *map(_make_short_option, names_shown), _make_set_option()]

    def command(config: Path | None, set_: list[str], method: str | None = None, **names: Any) -> None:
        given = {SHORT_NAMES[short]: names.pop(short) for short in names_shown}
        overrides = {path: value for path, value in given.items() if value is not None}
        overrides |= dict(parse_assignment_option(text) for text in set_)
        is_run = config is not None and (config / "settings.toml").is_file()
        if "run_folder" in taken:
            names["run_folder"] = config if is_run else None
        if config is not None and is_run:  # the folder of a run
            config = config / "settings.toml"

        def make_settings(method: str | None, more: Mapping[str, Any] = MappingProxyType({})) -> Settings:
            from fulcrum.runs.choices import check_choices

            words = {**overrides, **more}
            found = parse_settings({}, words, method) if config is None else read_settings(config, words, method)
            return check_choices(found)

        if several:
            function(make_settings=make_settings, **names, **({"method": method} if "method" in taken else {}))
        else:
            function(settings=make_settings(method), **names)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (shared[0], *own, *shared[1:])]
    command.__doc__, command.__name__ = function.__doc__, function.__name__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def hide_flag_types(command: Any) -> Any:
    """The command, and those below it, with flags that show no type in `--help`: they take no value."""
    list_parameters = command.get_params

    def get_params(context: Any) -> Any:
        found = list_parameters(context)
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found

    command.get_params = get_params
    for below in getattr(command, "commands", {}).values():
        hide_flag_types(below)
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
