"""What a smaller batch and merged rounds do to the choice of a step: the same candidates on the same made-up tasks.

    python benchmarks/rehearsal_batches.py --batches 64,256 --records 6000 --played 200     # one cause at a time
    python benchmarks/rehearsal_batches.py --batches 64 --records 1500 --played 150          # as a rehearsal plays it

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epsilon", type=float, default=6.38)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--records", type=int, default=6000, help="records of the small run")
    parser.add_argument("--played", type=int, default=0, help="rounds that are played, the others merged; default: all")
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
    candidates += [Candidate("plain", 0.1, own * scale) for scale in (0.5, 1.0)]
    played = words.played or words.rounds
    print(f"| batch | task | {' | '.join(each.describe() for each in candidates)} |")
    print("|---" * (len(candidates) + 2) + "|")
    for batch in map(int, words.batches.split(",")):
        stage = Stage(dataclasses.replace(facts, batch=batch, examples=words.records))
        for how, seed in list_tasks(words.tasks, words.first):
            scores = stage.play(candidates, played, [(how, seed)])
            values = [next(iter(scores[each].values())) for each in candidates]
            print(f"| {batch} | {how.name}-{seed} | {' | '.join(f'{value:.1f}' for value in values)} |", flush=True)


if __name__ == "__main__":
    main()
