"""`fulcrum watch`: the report, live in a browser while runs go on."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN|FOLDER", help="Folder of a run, or a folder that holds runs, now or soon.")
    ] = Path("runs"),
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; by default only this machine reaches it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: any free one.")] = 0,
    seconds: Annotated[float, typer.Option("--seconds", min=0.2, max=3600, help="Time between two looks.")] = 2.0,
    browser: Annotated[bool, typer.Option("--open", help="Open it in the browser, too.")] = False,
    debug: DebugOption = False,
) -> None:
    """Watch a run, or all runs in a folder, in a browser: live curves, a list to search, comparison of those ticked."""
    from fulcrum.analysis.report.watch import RunWatch, WatchServer, is_loopback
    from fulcrum.errors import ConfigError, RunError

    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}; name the folder of a run, or one that holds runs.")
    try:
        server = WatchServer(RunWatch(folder), host, port, seconds)
    except OverflowError as error:
        raise ConfigError(f"--port = {port} is no port.") from error
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}; choose others.") from error
    with server, contextlib.suppress(KeyboardInterrupt):
        if not is_loopback(host):
            view.print_message(
                f"warning: {host} is reached from other machines, over plain HTTP: whoever has the address below, or "
                "reads it on the way, sees what these folders hold. An SSH tunnel to the default address is safer."
            )
        view.print_line(server.address)
        view.print_message(f"watching {folder}; Ctrl-C ends it.")
        if browser:
            import webbrowser

            webbrowser.open(server.address)
        server.serve_forever(poll_interval=0.2)
