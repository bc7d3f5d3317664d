"""`fulcrum init`: a commented settings file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulcrum.cli.options import DebugOption
from fulcrum.errors import ConfigError
from fulcrum.settings.files import make_settings_template


def init(
    path: Annotated[Path, typer.Argument(help="File to write; - prints it.")] = Path("config.toml"),
    debug: DebugOption = False,
) -> None:
    """Write a settings file with every setting, its default and its meaning."""
    if str(path) == "-":
        typer.echo(make_settings_template(), nl=False)
        return
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(make_settings_template())
    except FileExistsError:
        raise ConfigError(f"{path} exists; choose another name, or remove it first.") from None
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} does not exist; make that folder first.") from None
    typer.echo(f"wrote {path}; start with: fulcrum run {path}")
