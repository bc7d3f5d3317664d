"""What a client's code claims about itself, as a declared input: options, a TOML file, or keywords."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulcrum.errors import ConfigError
from fulcrum.settings.registry import suggest_nearest_names

SAMPLINGS = ("poisson", "shuffle", "full")
OUTPUTS = ("update", "params")
MOST_RECORDS = 2000
KINDS = ("auto", "function", "opacus", "flower")


@dataclass(frozen=True)
class Claims:
    """What the code says that it does.

    sigma: noise multiplier, the noise's deviation over the clipping norm. rate: sampling rate q. steps: releases in the
    whole training. epsilon, delta: the total that is promised; epsilon None: no promise. sampling: "poisson", "shuffle"
    (batches of one size) or "full". clip: the clipping norm; the check measures without it, and shows it only.

    How the code is called: kind: "function", "opacus", "flower" or "auto". output: whether a function returns an
    "update" (or gradient) or new "params". examples: records of a data set; features and classes: of made-up records;
    data: "package.module:function" that returns (x [n, ...], y [n]) instead. parameters: numbers in `params`, which are
    zeros; 0: as many as the code returns. local_steps: noised steps in one call, of which the sum is released; each of
    them is one of `steps`.
    """

    sigma: float
    rate: float = 1.0
    steps: int = 1
    delta: float = 1e-5
    epsilon: float | None = None
    sampling: str = "poisson"
    clip: float | None = None
    kind: str = "auto"
    output: str = "update"
    examples: int = 0
    features: int = 20
    classes: int = 2
    data: str = ""
    parameters: int = 0
    local_steps: int = 1

    def __post_init__(self) -> None:
        for name, right, rule in (
            ("sigma", _is_number(self.sigma) and self.sigma > 0, "a number above 0"),
            ("rate", _is_number(self.rate) and 0 < self.rate <= 1, "a number above 0 and at most 1"),
            ("steps", isinstance(self.steps, int) and self.steps >= 1, "a whole number of at least 1"),
            ("delta", _is_number(self.delta) and 0 < self.delta < 1, "a number above 0 and below 1"),
            ("epsilon", self.epsilon is None or (_is_number(self.epsilon) and self.epsilon > 0), "a number above 0"),
            ("clip", self.clip is None or (_is_number(self.clip) and self.clip > 0), "a number above 0"),
            ("sampling", self.sampling in SAMPLINGS, f"one of {', '.join(SAMPLINGS)}"),
            ("kind", self.kind in KINDS, f"one of {', '.join(KINDS)}"),
            ("output", self.output in OUTPUTS, f"one of {', '.join(OUTPUTS)}"),
            ("examples", isinstance(self.examples, int) and self.examples >= 0, "a whole number of at least 0"),
            ("features", isinstance(self.features, int) and self.features >= 1, "a whole number of at least 1"),
            ("classes", isinstance(self.classes, int) and self.classes >= 2, "a whole number of at least 2"),
            ("parameters", isinstance(self.parameters, int) and self.parameters >= 0, "a whole number of at least 0"),
            (
                "local_steps",
                isinstance(self.local_steps, int) and self.local_steps >= 1,
                "a whole number of at least 1",
            ),
            ("data", isinstance(self.data, str), "package.module:function"),
        ):
            if not right:
                raise ConfigError(f"claims: {name} = {getattr(self, name)!r}; it must be {rule}.")

    @property
    def records(self) -> int:
        """Records of a data set: so many that the number of sampled ones varies more than the noise does."""
        varying = 6 * self.sigma**2 / (self.rate * (1 - self.rate)) if self.rate < 1 else 0.0
        return self.examples or min(MOST_RECORDS, max(16, math.ceil(8 / self.rate), math.ceil(varying)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


FIELDS = {field.name for field in dataclasses.fields(Claims)}


def make_claims(given: Mapping[str, Any]) -> Claims:
    """Claims from names and values; ConfigError names what is unknown or missing."""
    for name in given:
        if name not in FIELDS:
            raise ConfigError(f"claims: {name} is not known; {suggest_nearest_names(name, FIELDS)}")
    if "sigma" not in given:
        raise ConfigError("claims: sigma is missing; it is the noise multiplier that the code says it uses.")
    values: dict[str, Any] = dict(given)
    for name in ("sigma", "rate", "delta"):
        if _is_number(values.get(name)):
            values[name] = float(values[name])
    return Claims(**values)


def read_claims(path: Path, overrides: Mapping[str, Any]) -> Claims:
    """Claims from a TOML file, with some values replaced."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the claims {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the claims {path} are not TOML: {error}.") from error
    return make_claims({**found, **overrides})
