"""`fulcrum check`: the detectors on other people's clients.

claims.py    what the code says that it does
adapters.py  a function, an Opacus script or a Flower app as a function of data and seed
replay.py    data sets that show a mechanism without its code
mistakes.py  the known mistakes; forms.py: those of the form of the noise and of one record among others
others.py    those beside other labels, huge records and numbers; epsilons.py: what the releases cost
readings.py  every comparison, in order
check.py     `check`
"""

from __future__ import annotations

from fulcrum.analysis.detectors.foreign.check import CheckResult, check
from fulcrum.analysis.detectors.foreign.claims import Claims

__all__ = ["CheckResult", "Claims", "check"]
