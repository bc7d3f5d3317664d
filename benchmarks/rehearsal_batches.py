"""What a shrunken batch does to the choice of a step: the same candidates on the same made-up tasks, batch by batch.

    python benchmarks/rehearsal_batches.py --epsilon 6.38 --batches 64,256,1024 --tasks 3     # a minute per 256 records

The shape is the robustness study's: the MNIST CNN, ten parties, rate 0.05; noise in units of C is the real run's
whatever the batch. Steps are multiples of moo's own first one. Needs the sizes of MNIST (FULCRUM_DATA), not its values.
"""

from __future__ import annotations

import argparse
import dataclasses

from fulcrum.runs import prepare_unrehearsed
from fulcrum.runs.rehearsal import Candidate, read_rehearsal_facts
from fulcrum.runs.rehearsal.choice import list_tasks
from fulcrum.runs.rehearsal.stage import Stage
from fulcrum.settings.schema import Settings

RECORDS_PER_BATCH = 24
"""Records of a small run per record of its batch: as many epochs as the real run has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epsilon", type=float, default=6.38)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--first", type=int, default=20, help="seed of the first task")
    words = parser.parse_args()
    settings = Settings(method="moo").replace(
        data={"source": "mnist", "parties": 10, "partition": "dirichlet", "alpha": 0.5},
        train={"rounds": words.rounds, "rate": 0.05},
        clip={"rule": "moo", "rehearse": False},
        privacy={"epsilon": words.epsilon, "delta": 1e-5},
    )
    facts = read_rehearsal_facts(prepare_unrehearsed(settings))
    own = facts.default_step
    candidates = [Candidate("moo", 1.0, own * scale) for scale in (0.5, 1.0, 2.0)]
    candidates += [Candidate(mode, 0.1, own * scale) for mode in ("follow", "plain") for scale in (0.5, 1.0)]
    print(f"| batch | task | {' | '.join(each.describe() for each in candidates)} |")
    print("|---" * (len(candidates) + 2) + "|")
    for batch in map(int, words.batches.split(",")):
        stage = Stage(dataclasses.replace(facts, batch=batch, examples=RECORDS_PER_BATCH * batch))
        for how, seed in list_tasks(words.tasks, words.first):
            scores = stage.play(candidates, words.rounds, [(how, seed)])
            values = [next(iter(scores[each].values())) for each in candidates]
            print(f"| {batch} | {how.name}-{seed} | {' | '.join(f'{value:.1f}' for value in values)} |", flush=True)


if __name__ == "__main__":
    main()
