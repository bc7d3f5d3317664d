"""`fulcrum status` and `fulcrum keys`: who takes part and why not, and keys that change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fulcrum.cli.flower import require_flower
from fulcrum.cli.options import DebugOption, JsonOption

keys_app = typer.Typer(help="Change a party's key, or revoke it.", no_args_is_help=True)


def status(
    folder: Annotated[Path, typer.Argument(help="Folder of fulcrum serve, or the one with a party's ledger.")],
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show who is online, late, refused or out of budget and why; at a party, its own connection and budget."""
    from fulcrum.flower.operations.status_page import format_status, read_status

    found = read_status(folder)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    for line in format_status(found):
        typer.echo("".join(c if c.isprintable() else " " for c in line))


@keys_app.command("rotate")
def rotate(
    key: Annotated[Path, typer.Argument(help="The party's private key; stop fulcrum party first.")],
    debug: DebugOption = False,
) -> None:
    """At a party: make a new pair in place of KEY, and a note for the coordinator that the old key signs."""
    require_flower()
    from fulcrum.flower.operations.key_changes import rotate_key

    note, kept = rotate_key(key)
    typer.echo(f"{note}  send this to the coordinator: fulcrum keys accept REGISTER {note.name}")
    typer.echo(f"{kept}  the old key; delete it once the coordinator has accepted the note")


@keys_app.command("accept")
def accept(
    register: Annotated[Path, typer.Argument(help="Folder with one NAME.pub for each party.")],
    note: Annotated[Path, typer.Argument(help="NAME.rotation.json, from the party.")],
    debug: DebugOption = False,
) -> None:
    """At the coordinator: take a party's new key, if its present one signed the note. A running serve notices."""
    require_flower()
    from fulcrum.flower.operations.key_changes import accept_rotation

    name = accept_rotation(register, note)
    typer.echo(f"{register / f'{name}.pub'}  is {name}'s new key; the former one is in {register / 'revoked'}")


@keys_app.command("revoke")
def revoke(
    register: Annotated[Path, typer.Argument(help="Folder with one NAME.pub for each party.")],
    name: Annotated[str, typer.Argument(help="The party's name.")],
    debug: DebugOption = False,
) -> None:
    """At the coordinator: let a party's key in no more. A running serve notices within seconds."""
    require_flower()
    from fulcrum.flower.operations.key_changes import revoke_key

    typer.echo(f"{revoke_key(register, name)}  {name} is turned away from now on")
