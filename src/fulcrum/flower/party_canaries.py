"""A party's own canaries (`fulcrum party --canaries N`): it audits what leaves it, and nobody else takes part in that.

N units are added to the party's records. They count in n_k, are sampled, clipped, noised and paid for like all others.
Half of them, by coins that only this party knows, contribute a gradient along a coordinate of their own. Beside the
ledger lie

    LEDGER.canaries            the seed of records, coins and directions, readable by this user alone
    LEDGER.canaries-RUN.npz    after every round: the releases along each direction, and the coins (with its .json); a
                               process that goes on with a run starts a file of its own, -2, -3, ...

`fulcrum audit --releases LEDGER.canaries-RUN.npz` bounds epsilon from it. What leaves the party is an update as always:
the file stays here, since whoever knows the coins knows more than the releases say.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fulcrum.data import Dataset
from fulcrum.engines.canaries import CanaryEngine, SeenRelease, add_canary_records, draw_canaries
from fulcrum.engines.canary_files import write_releases
from fulcrum.errors import ConfigError
from fulcrum.flower.party_data import make_single_party_partition
from fulcrum.privacy.accounting import compute_epsilon
from fulcrum.privacy.events import Gaussian, events_to_json
from fulcrum.training.problem import TrainingProblem


@dataclass
class PartyCanaries:
    """The canaries of one party over all its runs. ledger: the party's ledger, beside which the files lie."""

    count: int
    ledger: Path
    engines: dict[str, CanaryEngine] = field(default_factory=dict)
    _logs: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"--canaries {self.count} must be at least 1, or left out.")

    def add_records(self, dataset: Dataset) -> Dataset:
        """The party's records and its canaries, the same ones in every process."""
        one = make_single_party_partition(len(dataset.records), 0, dataset.name)
        generator = torch.Generator().manual_seed(self._read_seed())
        return add_canary_records(dataset, one, [0] * self.count, generator)[0]

    def make_engine(self, run: str, client: int, problem: TrainingProblem) -> CanaryEngine:
        """The engine of a run, with coins and directions of its own."""
        first = len(problem.dataset.records) - self.count
        mixed = hashlib.blake2b(f"{self._read_seed()}|{run}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "big"))
        canaries = draw_canaries([client] * self.count, first, problem.coordinates, "gradient", generator)
        self.engines[run], number = CanaryEngine(problem, canaries), 1
        while (path := self._name_log(run, number)).exists():
            number += 1
        self._logs[run] = path
        return self.engines[run]

    def write_log(self, run: str, delta: float) -> None:
        """Write what this party's releases in a run show so far. delta: of the terms."""
        engine = self.engines[run]
        seen = [each for each in engine.seen if all(isinstance(event, Gaussian) for event in each.events)]
        if not seen:
            return
        events = [event for each in seen for event in each.events]
        write_releases(
            self._logs[run],
            {
                "included": engine.canaries.included.numpy().astype(np.uint8),
                "projections": _spread(seen, [each.projections for each in seen]),
                "sampled": _spread(seen, [each.sampled for each in seen]),
            },
            {
                "delta": delta,
                "epsilon": compute_epsilon(events, delta),
                "events": events_to_json(events),
                "steps": seen[0].steps,
            },
        )

    def _name_log(self, run: str, number: int) -> Path:
        return self.ledger.with_name(f"{self.ledger.name}.canaries-{run}{f'-{number}' if number > 1 else ''}.npz")

    def _read_seed(self) -> int:
        """64 random bits, drawn once and kept beside the ledger."""
        path = self.ledger.with_name(self.ledger.name + ".canaries")
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(str(secrets.randbits(63)))
        text = path.read_text(encoding="utf-8").strip()
        if not text.isdigit():
            raise ConfigError(f"{path} was edited or damaged; remove it, and new canaries are drawn.")
        return int(text)


def _spread(seen: list[SeenRelease], values: list[torch.Tensor]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """[m, T]: a round of several local steps has one column per step, each with its part of what was seen."""
    columns = [value.double() / one.steps for one, value in zip(seen, values, strict=True) for _ in range(one.steps)]
    return torch.stack(columns, dim=1).numpy()
