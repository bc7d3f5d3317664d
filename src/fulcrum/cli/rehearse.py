"""`fulcrum rehearse`: what public facts decide about the step, measured on made-up data."""

from __future__ import annotations

from typing import Annotated

import typer

from fulcrum.cli import view
from fulcrum.cli.options import DebugOption, JsonOption, QuietOption, with_settings
from fulcrum.errors import ConfigError
from fulcrum.settings.schema import Settings

REHEARSED_FIELDS = ("clip.step", "clip.C0", "clip.search", "clip.eta_C", "train.lr", "train.schedule")
"""Settings that a rehearsal chooses."""


@with_settings
def rehearse(
    settings: Settings,
    again: Annotated[bool, typer.Option("--again", help="Rehearse even where the answer is known.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Choose step, C, learning rate and schedule on made-up data, and print them as options for `fulcrum run`.

    It sees settings, model, declared sizes and shapes, never a value of a private record, so it costs no privacy. With
    --set clip.rehearse_on=SOURCE it plays on public records of yours in place of made-up ones. `fulcrum run`
    and `fulcrum serve` do the same before they train.
    """
    from fulcrum import runs as api
    from fulcrum.runs.rehearsal import choose_settings, find_refusal, memory, read_rehearsal_facts
    from fulcrum.runs.rehearsal import rehearse as play
    from fulcrum.runs.rehearsal.public_set import fit_facts, load_public_set

    federation = api.prepare_unrehearsed(settings.replace(clip={"rehearse": False}))
    refusal = find_refusal(federation, patient=True)
    if refusal:
        raise ConfigError(
            f"clip.rehearse: nothing can be rehearsed here, for {refusal}; `fulcrum run` uses moo's own first step."
        )
    public = load_public_set(federation)
    facts = fit_facts(read_rehearsal_facts(federation), public)
    if again:
        memory.forget(facts.digest())
    answer = None if again else memory.recall(facts.digest())
    if answer is None:
        with view.show_part_done("rehearsing", quiet) as tell:
            answer = play(facts, public=public, log=memory.open_log(facts, tell))
        memory.remember(answer)
        view.print_message(f"rehearsed in {answer.seconds:.0f} s", quiet)
    chosen = choose_settings(federation, facts, answer)
    words = {
        path: getattr(getattr(chosen, path.partition(".")[0]), path.partition(".")[2]) for path in REHEARSED_FIELDS
    }
    if as_json:
        view.print_json({**answer.to_json(), "settings": words})
        return
    view.print_table(
        ("candidate", "regret on made-up data, points"), [(name, f"{v:.2f}") for name, v in answer.regrets.items()]
    )
    typer.echo(f"chosen: {answer.candidate.describe()}")
    typer.echo(" ".join(f"--set {path}={str(value).lower()}" for path, value in words.items()))
