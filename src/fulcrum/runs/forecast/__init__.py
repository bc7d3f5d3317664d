"""Before a run: which way each layer takes and what it costs, how long the run will take, how many bytes will travel.

    forecast = fulcrum.plan(data="mnist", parties=10, epsilon=1.64, rounds=200)
    forecast.privacy, forecast.layers, forecast.time.total, forecast.traffic.total

made_up.py  a federation of the same shape over made-up records
layers.py   the way and the cost of each layer
timing.py   seconds, from a short dry run
traffic.py  bytes
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from fulcrum.data import Dataset
from fulcrum.engines import choose_engine
from fulcrum.errors import FulcrumError
from fulcrum.gradients.costs import LayerCost
from fulcrum.privacy.plan import Plan
from fulcrum.runs.forecast.layers import count_step_records, list_layers
from fulcrum.runs.forecast.timing import TimeEstimate, estimate_time
from fulcrum.runs.forecast.traffic import Traffic, estimate_traffic
from fulcrum.runs.one_call import resolve_keywords
from fulcrum.runs.preparation import prepare_unrehearsed
from fulcrum.settings.schema import Settings
from fulcrum.training.federation import Federation
from fulcrum.training.traffic import RoundTraffic
from fulcrum.types import make_short_repr


@dataclass(frozen=True)
class Forecast:
    """What a run will do and cost, before it starts.

    privacy: every party's terms and epsilon. layers: one local step of the largest party, `batch` records. time: None
    where it was not measured; untimed says why (and why layers are not known, where there are none). traffic: bytes.
    """

    __repr__ = make_short_repr

    privacy: Plan
    dim: int
    engine: str
    workers: int
    device: str
    batch: float
    layers: tuple[LayerCost, ...]
    traffic: Traffic
    time: TimeEstimate | None = None
    untimed: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `fulcrum plan --json` prints them."""
        paths = {"vmap": "vmap", "frozen": "frozen"}
        traffic = {
            **dataclasses.asdict(self.traffic),
            "down_per_round": self.traffic.down_per_round,
            "up_per_round": self.traffic.up_per_round,
            "total": self.traffic.total,
        }
        return {
            **self.privacy.to_json(self.dim),
            "engine": self.engine,
            "workers": self.workers,
            "device": self.device,
            "batch": self.batch,
            "layers": [{**vars(row), "path": paths.get(row.way, "book")} for row in self.layers],
            "traffic": traffic,
            "time": None if self.time is None else dataclasses.asdict(self.time),
            **({"untimed": self.untimed} if self.untimed else {}),
        }


def make_forecast(
    federation: Federation, timing: bool = True, messages: RoundTraffic | None = None, note: str = ""
) -> Forecast:
    """The forecast of a prepared run. timing: whether a dry run of some seconds is timed.

    messages: bytes of a round's messages across machines, where they are known; note: what to know about them.
    """
    layers: tuple[LayerCost, ...] = ()
    time, untimed = None, "" if timing else "not asked for"
    try:
        layers = list_layers(federation)
        time = estimate_time(federation) if timing else None
    except FulcrumError:
        raise
    except Exception as problem:  # a user's model may raise anything on records that it was not made for
        words = (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
        untimed = f"the model failed on made-up records: {words}"
    return Forecast(
        privacy=federation.plan,
        dim=federation.problem.layout.dim,
        engine=choose_engine(federation.settings.run.engine, federation.problem),
        workers=getattr(federation.engine, "workers", 1),
        device=str(federation.problem.device),
        batch=count_step_records(federation),
        layers=layers,
        traffic=estimate_traffic(federation, messages, note),
        time=time,
        untimed=untimed,
    )


def plan(
    data: str | Dataset | None = None,
    model: str | nn.Module | None = None,
    *,
    settings: Settings | None = None,
    timing: bool = True,
    **names: Any,
) -> Forecast:
    """What `train` with the same arguments would cost, without training.

        forecast = fulcrum.plan(data="mnist", epsilon=1.64, parties=10, rounds=200)
        forecast.privacy.party(0).sigma, forecast.time.total, forecast.traffic.total
        [(row.layer, row.way, row.flop_private / row.flop_plain) for row in forecast.layers]

    timing: times a few steps on made-up records of the same shapes; some seconds. Private records are not read by it.
    """
    return make_forecast(prepare_unrehearsed(*resolve_keywords(data, model, settings, names)), timing)


__all__ = ["Forecast", "LayerCost", "TimeEstimate", "Traffic", "make_forecast", "plan"]
