"""The part of `fulcrum plan` that says how layers are computed, how long a run will take and what will travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulcrum.cli import view
from fulcrum.errors import ConfigError

if TYPE_CHECKING:
    from fulcrum.gradients.costs import LikeLayers
    from fulcrum.runs import Forecast
    from fulcrum.runs.forecast import TimeEstimate, Traffic
    from fulcrum.training.federation import Federation

MAX_LAYERS_SHOWN = 30
"""More rows of layers than this are left to --json."""
LAYER_COLUMNS = ("layer", "way", "FLOP plain", "private", "memory plain", "private", "why")

RECORDS_NOTE = (
    "layers and time follow from how many records the parties hold, which unit {unit} protects: for your eyes, not to "
    "be published"
)


def forecast_run(federation: Federation, timing: bool) -> Forecast:
    """The forecast, with the bytes of messages across machines where these settings can be served."""
    from fulcrum.flower.traffic import measure_message_traffic
    from fulcrum.runs import make_forecast

    try:
        messages, note = measure_message_traffic(federation), ""
    except ConfigError as refusal:
        messages, note = None, f"not offered across machines: {refusal}"
    return make_forecast(federation, timing, messages, note)


def print_forecast(forecast: Forecast) -> None:
    """Engine, layers, time and traffic."""
    from fulcrum.gradients.compiled import explain_missing_kernels
    from fulcrum.gradients.costs import merge_like_layers

    at_once = f", {forecast.workers} parties at a time" if forecast.workers > 1 else ""
    view.print_sentence(f"engine  {forecast.engine} on {forecast.device}{at_once}")
    if forecast.device == "cpu" and (missing := explain_missing_kernels()):
        view.print_sentence(f"kernels  not compiled: {missing}; a step takes up to half more time (docs/gpu.md)")
    if forecast.layers:
        print_layers(merge_like_layers(forecast.layers), forecast.batch)
    else:
        view.print_sentence(f"layers  not known: {forecast.untimed}")
    for line in describe_time(forecast.time, forecast.untimed):
        view.print_sentence(line)
    if forecast.privacy.unit != "example":
        view.print_sentence(RECORDS_NOTE.format(unit=forecast.privacy.unit))
    for line in describe_traffic(forecast.traffic):
        view.print_sentence(line)


def print_layers(rows: list[LikeLayers], batch: float) -> None:
    """One line per kind of layer, and what all of them take together."""
    from fulcrum.gradients.costs import format_count

    view.print_sentence(f"per-example gradients, one local step of the largest party ({batch:.4g} records)")
    table: list[tuple[view.TableValue, ...]] = []
    for row in rows[:MAX_LAYERS_SHOWN]:
        cost, more = row.cost, len(row.names) - 1
        table.append(
            (
                row.names[0] + (f" and {more} more" if more else ""),
                cost.way,
                format_count(cost.flop_plain),
                format_count(cost.flop_private),
                view.format_bytes(cost.bytes_plain),
                view.format_bytes(cost.bytes_private),
                cost.because,
            )
        )
    view.print_table(LAYER_COLUMNS, table, fit=True)
    if len(rows) > MAX_LAYERS_SHOWN:
        view.print_sentence(f"and {len(rows) - MAX_LAYERS_SHOWN} more kinds of layers: fulcrum plan --json lists all")
    plain, private = (
        sum(len(row.names) * value for row, value in zip(rows, values, strict=True))
        for values in ([r.cost.flop_plain for r in rows], [r.cost.flop_private for r in rows])
    )
    if plain:
        view.print_sentence(
            f"all layers  {format_count(plain)} FLOP in plain training, {format_count(private)} in private training "
            f"({private / plain:.2f} times); products only"
        )


def describe_time(time: TimeEstimate | None, untimed: str) -> list[str]:
    """How long the run will take, in two lines; or why that is not known."""
    if time is None:
        return [f"time  not estimated: {untimed}"]
    where = f"{time.device}, engine {time.engine}" + (f", {time.workers} at a time" if time.workers > 1 else "")
    each = f"{view.format_seconds(time.per_round)} per round ({view.format_seconds(time.training)} of it local steps)"
    scored = f" and {view.format_seconds(time.per_evaluation)} per evaluation" if time.per_evaluation else ""
    return [
        f"time  about {view.format_seconds(time.total)} for {time.rounds} rounds: {each}{scored}",
        f"an estimate on this machine ({where}), from {time.timed} on made-up records after warm-up",
    ]


def describe_traffic(traffic: Traffic) -> list[str]:
    """What will travel, in two lines."""
    per_party = f"to each party {view.format_bytes(traffic.down)}, from each {view.format_bytes(traffic.up)} per round"
    in_all = (
        f"{view.format_bytes(traffic.down_per_round + traffic.up_per_round)} per round, "
        f"{view.format_bytes(traffic.total)} in the run"
    )
    if traffic.counted == "messages":
        on_top = "if the parties are on other machines (fulcrum serve); Flower's own framing and TLS come on top"
    else:
        on_top = f"the arrays alone; {traffic.note}" if traffic.note else "the arrays alone"
    return [f"travels  {per_party}; all parties {in_all}", on_top]
