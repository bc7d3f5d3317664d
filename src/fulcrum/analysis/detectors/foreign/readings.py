"""Every comparison of a check, in the order in which mistakes are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fulcrum.analysis.detectors.findings import LEVEL, Reading
from fulcrum.analysis.detectors.foreign import epsilons, forms, mistakes, others
from fulcrum.analysis.detectors.foreign.mistakes import Measured

Reader = Callable[[Measured], Iterator[Reading]]

OF_RELEASES: tuple[Reader, ...] = (
    mistakes.read_clipping,
    others.read_huge,
    forms.read_microbatches,
    mistakes.read_noise,
    others.read_missing_noise,
    forms.read_directions,
    others.read_twin_numbers,
    forms.read_form,
    forms.read_empty_samples,
    mistakes.read_sampling,
    forms.read_scales,
    forms.read_outlier,
    others.read_sum,
)
"""Those that take calls as independent of each other."""
OTHERS: tuple[Reader, ...] = (
    mistakes.read_statistics,
    others.read_numbers_beside,
    epsilons.read_budget,
    epsilons.read_audit,
)


def list_readings(found: Measured) -> Iterator[Reading]:
    """All readings. Where calls share their noise, means and deviations of releases say nothing, and are left out."""
    seeds = list(mistakes.read_seeds(found))
    yield from seeds
    chosen = OTHERS if any(each.p <= LEVEL / 100 for each in seeds) else (*OF_RELEASES, *OTHERS)
    for read in chosen:
        yield from read(found)
