"""What FLamby's differentially private heart-disease runs cost truly, per hospital (docs/heart.md).

    python examples/heart/flamby_cost.py [--epsilon 1] [--delta 1e-4] [--json]

FLamby (owkin/FLamby, flamby/dp_example/create_fed_heart_disease_dp_results.py and flamby/strategies/utils.py at commit
edacf54) calibrates the noise of each hospital with Opacus for `epochs = nrounds` passes over its records, and then
trains `nrounds * num_updates` steps there. The numbers below are those of that code.
"""

from __future__ import annotations

import argparse
import json
import math

from fulcrum.privacy.accounting import calibrate_sigma, compute_epsilon
from fulcrum.privacy.events import Gaussian

HOSPITALS = {"cleveland": 199, "hungarian": 172, "switzerland": 30, "va": 85}
BATCH = 4
UPDATES = 100
ROUNDS = (486 // 4 // BATCH) * 50 // UPDATES
"""get_nb_max_rounds(100) of fed_heart_disease/common.py: 15."""


def account_hospital(records: int, epsilon: float, delta: float, accountant: str) -> dict[str, float]:
    """What the code calibrates for, and what its steps cost at one hospital.

    planned: steps that the noise was calibrated for, ROUNDS passes. steps: those that are run. poisson: their epsilon
    if every batch were a Poisson sample, as the calibration assumes. shuffled: an epsilon that holds for what is run,
    batches of a shuffled pass, in which every record is used once per pass: no amplification is claimed.
    """
    batches = math.ceil(records / BATCH)
    planned, steps = ROUNDS * batches, ROUNDS * UPDATES
    sigma = calibrate_sigma(lambda value: [Gaussian(1 / batches, value, planned)], epsilon, delta, accountant)
    passes = math.ceil(steps / batches)
    return {
        "records": records,
        "planned": planned,
        "steps": steps,
        "sigma": sigma,
        "nominal": compute_epsilon([Gaussian(1 / batches, sigma, planned)], delta, accountant),
        "poisson": compute_epsilon([Gaussian(1 / batches, sigma, steps)], delta, "pld"),
        "shuffled": compute_epsilon([Gaussian(1.0, sigma, passes)], delta, "pld"),
    }


def main() -> None:
    """Print the table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=1.0, help="the nominal epsilon")
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--accountant", default="pld", help="that calibrates, as Opacus's default does: pld or rdp")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    rows = {
        name: account_hospital(records, options.epsilon, options.delta, options.accountant)
        for name, records in HOSPITALS.items()
    }
    if options.json:
        print(json.dumps({"epsilon": options.epsilon, "delta": options.delta, "hospitals": rows}))
        return
    print(
        f"{'hospital':<14}{'records':>8}{'planned':>9}{'run':>7}{'sigma':>8}{'nominal':>9}{'Poisson':>9}{'shuffled':>10}"
    )
    for name, row in rows.items():
        counts = f"{row['records']:>8}{row['planned']:>9}{row['steps']:>7}"
        costs = f"{row['nominal']:>9.2f}{row['poisson']:>9.2f}{row['shuffled']:>10.2f}"
        print(f"{name:<14}{counts}{row['sigma']:>8.2f}{costs}")


if __name__ == "__main__":
    main()
