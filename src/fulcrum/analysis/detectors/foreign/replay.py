"""Replays a client on data sets that were made for it, and measures its mechanism without knowing its code.

In a data set of copies of one extreme record every sampled record adds the same clipped gradient c. So a release is

    a (K c + sigma |c| z),     K the number of sampled records, a an unknown scale,

and three things can be read off many of them: the mean a n q |c| along c, the deviation a sigma |c| across c, and how
much K varies. Their ratios need neither the scale nor the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fulcrum.analysis.detectors.foreign.adapters import Client, Data, Floats, Released
from fulcrum.analysis.detectors.foreign.claims import Claims
from fulcrum.errors import InputError
from fulcrum.settings.registry import import_named_attribute

EXTREME = 1e3
SIZES = (EXTREME, 30.0, 2.0)
"""Largest features of extreme records: a model whose units saturate moves further at smaller ones."""
FURTHER = 1.25
"""By how much a smaller record must move a release further, to be preferred."""
LARGER = 30.0
HUGE = 1e5
"""Of an extreme record: beyond the numbers of half precision, far within those of single precision."""
OUTLYING = 1e4
"""Size of one outlying record, as a multiple of an extreme one."""
START_ERROR = 0.1
"""The most that the measured start of a client may be off, beside what copies of a record move a release: in quarters
of a direction of its own, so that a length is off by half a percent."""
MOST_STARTS = 40
"""Calls without records, in multiples of the calls per data set."""


class Replayer:
    """Calls a client with a new seed each time."""

    def __init__(self, client: Client, first_seed: int = 1) -> None:
        self._client, self._seed = client, first_seed
        self.calls = 0
        self.kept: npt.NDArray[np.bool_] | None = None
        """Which of the released numbers are looked at; None: all."""
        self.start: Floats | None = None
        """What is taken off every release; None: nothing."""
        self.thawed = 0
        """How many of the numbers that are left out as unchanging have changed since."""
        self._frozen: tuple[npt.NDArray[np.bool_], Floats] | None = None

    def measure_start(self, data: Data, count: int) -> None:
        """Take the mean release of a data set without records as the start that every release is counted from.

        Its error is part of every release. So it is measured with more calls until it is small beside what ordinary
        records move, and refused where that takes too many.
        """
        empty, told = (data[0][:0], data[1][:0]), "it fails on a data set without records"
        try:
            vectors = self._call(empty, count)
            if np.isfinite(vectors).all() and (moved := self._measure_move(data, vectors.mean(axis=0))) > 0:
                error = float(np.square(vectors.std(axis=0, ddof=1)).sum())
                needed = math.ceil(error / (START_ERROR * moved) ** 2)
                if needed > MOST_STARTS * count:
                    vectors, told = np.full((1, 1), np.nan), "without records its noise is too large for that"
                elif needed > count:
                    vectors = np.concatenate([vectors, self._call(empty, needed - count)])
        except (InputError, ValueError):
            vectors = np.full((1, 1), np.nan)
        if not np.isfinite(vectors).all():
            raise InputError(
                f"the client returns new params (claims: output), and where it starts from cannot be measured: {told}. "
                "Let it return the update, the new params less those before."
            )
        self.start = vectors.mean(axis=0)

    def _call(self, data: Data, count: int) -> Floats:
        found = [self._client((data[0].copy(), data[1].copy()), self._seed + i).vector for i in range(count)]
        self._seed += count
        self.calls += count
        return np.stack(found)

    def _measure_move(self, data: Data, start: Floats) -> float:
        """How far copies of one extreme record move a release from the start."""
        record = EXTREME * data[0][0] / max(float(np.abs(data[0][0]).max()), 1e-6)
        copies = np.broadcast_to(record, data[0].shape).astype(data[0].dtype)
        lengths = []
        for label in np.unique(data[1])[:2]:
            rows = self._call((copies, np.full(len(copies), label, dtype=data[1].dtype)), 20)
            # The product of two halves' means has no part of the noise in it.
            lengths.append(float((rows[::2].mean(axis=0) - start) @ (rows[1::2].mean(axis=0) - start)))
        return math.sqrt(max(0.0, *lengths))

    def freeze(self, columns: npt.NDArray[np.bool_], values: Floats) -> None:
        """Leave out these of the released numbers [d], which have had these values [d] so far."""
        self._frozen = columns, values

    def play(self, data: Data, count: int) -> Sample:
        """`count` releases of a data set."""
        found: list[Released] = []
        for _ in range(count):
            found.append(self._client((data[0].copy(), data[1].copy()), self._seed))
            self._seed += 1
        self.calls += count
        sizes = {each.vector.shape for each in found}
        if len(sizes) != 1:
            raise InputError("the client returned vectors of different lengths; it must return one length.")
        vectors = np.stack([each.vector for each in found])
        if self.start is not None and self.start.shape == vectors.shape[1:]:
            vectors = vectors - self.start
        if vectors.shape[1] < 2:
            raise InputError("the client returned fewer than two numbers; its noise cannot be told from its signal.")
        if self._frozen is not None:
            columns, values = self._frozen
            numbers = vectors[np.isfinite(vectors).all(axis=1)]
            self.thawed = max(self.thawed, int(((numbers != values).any(axis=0) & columns).sum()))
        names = dict.fromkeys(name for each in found for name in each.beside)
        beside = {name: np.array([each.beside.get(name, np.nan) for each in found]) for name in names}
        return Sample(vectors, beside) if self.kept is None else Sample(vectors[:, self.kept], beside)


@dataclass(frozen=True)
class Sample:
    """Releases of one data set: vectors [T, d], and numbers beside them [T]. Some may be no numbers (empty batches)."""

    vectors: Floats
    beside: dict[str, Floats]

    @cached_property
    def finite(self) -> Floats:
        """The vectors that are numbers throughout."""
        return self.vectors[np.isfinite(self.vectors).all(axis=1)]

    def keep(self, columns: npt.NDArray[np.bool_]) -> Sample:
        """The same with some of the released numbers only."""
        return Sample(self.vectors[:, columns], self.beside)


def find_still_columns(sample: Sample) -> npt.NDArray[np.bool_]:
    """Released numbers that are the same in every call [d]."""
    rows = sample.finite
    still: npt.NDArray[np.bool_] = rows.max(axis=0) == rows.min(axis=0)
    return still


def find_clear_columns(one: Sample, two: Sample) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Released numbers without noise: those that depend on the records [d], and those that do not [d] (frozen layers).

    None where nothing has noise. one, two: releases of copies of one record each.
    """
    still = find_still_columns(one) & find_still_columns(two)
    differ = one.finite[0] != two.finite[0]
    none = np.zeros_like(still)
    return (none, none) if still.all() else (still & differ, still & ~differ)


def refuse_rescaled(sample: Sample) -> None:
    """Refuse releases whose numbers all have one size: an optimizer rescales them, and no deviation is left to see."""
    sizes = np.abs(sample.finite)
    sizes = sizes[:, ~find_still_columns(sample)]
    sizes = sizes[sizes > 0]
    if len(sizes) < 8:
        return
    low, high = np.quantile(sizes, [0.02, 0.98])
    if high < 1.05 * low:
        raise InputError(
            "every released number has the same size: an optimizer that rescales each coordinate (Adam, signs) hides "
            "what it was given. Let the client return the noised gradient, or take one step of plain SGD."
        )


def refuse_weights(first: Sample, second: Sample) -> None:
    """Refuse releases whose mean is hardly that of the records: weights were returned, and updates are looked at."""
    one, two = first.finite, second.finite
    if len(one) < 8 or len(two) < 8:
        return
    means = one.mean(axis=0), two.mean(axis=0)
    lengths = [float(np.linalg.norm(mean)) for mean in means]
    noise = float(np.sqrt(one.var(axis=0).sum()))
    alike = float(means[0] @ means[1]) / max(lengths[0] * lengths[1], 1e-300)
    if alike > 0.98 and min(lengths) > 2 * noise and float(np.linalg.norm(means[0] - means[1])) < 0.3 * min(lengths):
        raise InputError(
            "releases of two different records are almost the same vector: the client seems to return weights, not "
            'an update. Say so (claims: output = "params"), or let it return the update.'
        )


@dataclass(frozen=True)
class Line:
    """Releases of copies of one record, taken apart. direction [d]: of the mean, from the first half of the releases.

    along [T/2]: the second half along it. across [T/2, d-1]: the second half in an orthonormal basis of the rest.
    """

    direction: Floats
    along: Floats
    across: Floats

    @property
    def mean(self) -> float:
        """How far copies of the record move a release."""
        return float(self.along.mean())

    @property
    def noise(self) -> float:
        """The deviation of the noise in one direction; 0 where it is rounding alone."""
        centred = self.across - self.across.mean(axis=0)
        found = float(np.sqrt(np.square(centred).sum() / self.freedom))
        return found if found > 1e-9 * abs(self.mean) else 0.0

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the noise's deviation."""
        return (len(self.across) - 1) * int(self.across.shape[1])

    @property
    def multiple(self) -> float:
        """The mean as a multiple of the noise; infinite without noise."""
        return self.mean / self.noise if self.noise > 0 else np.inf

    @property
    def error(self) -> float:
        """Standard error of the multiple."""
        return float(self.along.std(ddof=1) / np.sqrt(len(self.along)) / self.noise) if self.noise > 0 else 0.0


def take_apart(sample: Sample) -> Line:
    """The line of a sample. The directions come from one half, the numbers from the other."""
    rows = sample.finite
    if len(rows) < 8:
        raise InputError("most releases of the client are no finite numbers; it cannot be checked like this.")
    half = len(rows) // 2
    mean = rows[:half].mean(axis=0)
    length = float(np.linalg.norm(mean))
    direction = mean / length if length > 0 else np.eye(rows.shape[1])[0]
    basis = np.linalg.svd(direction[None, :], full_matrices=True)[2][1:]
    second = rows[half:]
    return Line(direction, second @ direction, second @ basis.T)


# --- data sets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """Ordinary records, from the user or made up: x [n, ...] and y [n]."""

    x: npt.NDArray[np.floating]
    y: npt.NDArray[np.int64]

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The different labels."""
        found: npt.NDArray[np.int64] = np.unique(self.y)
        return found

    def copies(self, record: npt.NDArray[np.floating], label: int, count: int) -> Data:
        """A data set of copies of one record."""
        x = np.broadcast_to(record, (count, *record.shape)).astype(self.x.dtype)
        return x.copy(), np.full(count, label, dtype=self.y.dtype)

    def share(self, one: Target, other: Target, count: int) -> Data:
        """A data set of a quarter of copies of one record, and else copies of another."""
        x, y = self.copies(other.x, other.label, count)
        x[: count // 4], y[: count // 4] = one.x, one.label
        return x, y

    def relabel(self, one: Target, other: Target) -> Target:
        """The record with another label; where there is only one label, the other record."""
        labels = self.labels[self.labels != one.label]
        return Target(one.x, int(labels[0])) if len(labels) else other

    def mix(self, one: Target, count: int) -> Data:
        """A data set of a record, and of its opposite with another label, in turn: both pull a linear model alike."""
        x, y = self.copies(one.x, one.label, count)
        others = self.labels[self.labels != one.label]
        x[1::2], y[1::2] = -one.x, others[0] if len(others) else one.label
        return x, y


def make_records(claims: Claims) -> Records:
    """The user's records, or made-up ones: standard normal features, labels in turn."""
    if claims.data:
        made = import_named_attribute(claims.data, "claims: data")
        x, y = made() if callable(made) else made
        x, y = np.asarray(x), np.asarray(y)
        if not np.issubdtype(x.dtype, np.floating) or len(x) != len(y) or len(x) < 2:
            raise InputError(f"{claims.data} must return x [n, ...] of floating-point numbers and y [n], n at least 2.")
        return Records(x, y)
    generator = np.random.default_rng(0)
    count = claims.records
    return Records(
        generator.standard_normal((count, claims.features)).astype(np.float32),
        (np.arange(count) % claims.classes).astype(np.int64),
    )


@dataclass(frozen=True)
class Target:
    """An extreme record: its features and label."""

    x: npt.NDArray[np.floating]
    label: int


def choose_targets(replayer: Replayer, records: Records, claims: Claims) -> tuple[Target, Target]:
    """Two extreme records in different directions, each with the size and label that move a release furthest."""
    found = []
    for shape in (records.x[0], -records.x[1]):
        best: tuple[float, Target] | None = None
        for size in SIZES:
            record = size * shape / max(float(np.abs(shape).max()), 1e-6)
            for label in records.labels[:10]:
                few = replayer.play(records.copies(record, int(label), claims.records), 6).finite
                moved = float(np.linalg.norm(few.mean(axis=0))) if len(few) else 0.0
                wanted = FURTHER if best is not None and size < float(np.abs(best[1].x).max()) * 0.99 else 1.0
                if best is None or moved > wanted * best[0]:
                    best = (moved, Target(record, int(label)))
        assert best is not None
        found.append(best[1])
    return found[0], found[1]
