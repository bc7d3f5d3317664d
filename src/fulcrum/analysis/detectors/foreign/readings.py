"""Every comparison of a check, in the order in which mistakes are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fulcrum.analysis.detectors.findings import LEVEL, Reading
from fulcrum.analysis.detectors.foreign import forms, mistakes
from fulcrum.analysis.detectors.foreign.mistakes import Measured

Reader = Callable[[Measured], Iterator[Reading]]

OF_RELEASES: tuple[Reader, ...] = (
    mistakes.read_clipping,
    forms.read_microbatches,
    mistakes.read_noise,
    forms.read_directions,
    forms.read_form,
    forms.read_empty_samples,
    mistakes.read_sampling,
    forms.read_scales,
    forms.read_outlier,
)
"""Those that take calls as independent of each other."""
OTHERS: tuple[Reader, ...] = (mistakes.read_statistics, mistakes.read_budget, mistakes.read_audit)


def list_readings(found: Measured) -> Iterator[Reading]:
    """All readings. Where calls share their noise, means and deviations of releases say nothing, and are left out."""
    seeds = list(mistakes.read_seeds(found))
    yield from seeds
    chosen = OTHERS if any(each.p <= LEVEL / 100 for each in seeds) else (*OF_RELEASES, *OTHERS)
    for read in chosen:
        yield from read(found)
