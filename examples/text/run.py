"""A text classifier on private messages: authors are protected, and held-out authors score it (docs/example-text.md).

    python examples/text/run.py [--json] [--seeds 0 1 2] [--out FILE]

Made-up messages, treated as private: noise from the operating system, no public test data. Accuracy, confusion and
baselines come from one noised release per site, which the held-out authors pay for. A seed makes the messages; the
noise is new in every run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fulcrum
from fulcrum.data import Dataset, Schema, make_table_dataset
from fulcrum.settings.files import read_settings
from fulcrum.study.repeats import parse_example_options, repeat, report

HERE = Path(__file__).parent
SEEDS = range(3)
TOPICS = {
    "billing": ["invoice", "charge", "refund", "payment", "card", "price", "twice", "amount", "bank", "receipt"],
    "delivery": ["parcel", "courier", "late", "address", "tracking", "door", "missing", "arrived", "neighbour", "box"],
    "repair": ["broken", "screen", "battery", "noise", "button", "repair", "warranty", "stopped", "crack", "heat"],
}
COMMON = [
    "hello",
    "please",
    "the",
    "my",
    "since",
    "today",
    "i",
    "it",
    "was",
    "not",
    "and",
    "again",
    "help",
    "with",
    "order",
    "week",
    "you",
    "still",
    "for",
    "thanks",
]
SITES = ("north", "south", "west")


def make_messages(seed: int, authors: int = 3000) -> dict[str, list[str]]:
    """Columns author, site, words, department: one to six messages per author, who mostly writes about one thing."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[str]] = {name: [] for name in ("author", "site", "words", "department")}
    for author in range(authors):
        usual = rng.choice(list(TOPICS), p=(0.5, 0.3, 0.2))
        for _ in range(int(rng.integers(1, 7))):
            topic = str(usual if rng.random() < 0.7 else rng.choice(list(TOPICS)))
            others = [word for name in TOPICS if name != topic for word in TOPICS[name]]
            words = [*rng.choice(COMMON, 8), *rng.choice(TOPICS[topic], 3), *rng.choice(others, 1)]
            rng.shuffle(words)
            found["author"].append(f"author {author}")
            found["site"].append(SITES[author % len(SITES)])
            found["words"].append(" ".join(map(str, words)))
            found["department"].append(topic)
    return found


def load_messages(seed: int, authors: int = 3000) -> Dataset:
    """The messages as a private table."""
    return make_table_dataset(make_messages(seed, authors), Schema.read(HERE / "messages.schema.toml"), name="messages")


def train(seed: int, authors: int = 3000) -> fulcrum.Result:
    """One run with the settings beside this file."""
    return fulcrum.train(load_messages(seed, authors), settings=read_settings(HERE / "settings.toml"))


def main() -> None:
    """Train once per seed and print the means."""
    options = parse_example_options(__doc__ or "", SEEDS)
    repeats = repeat(lambda seed: train(seed, 300 if options.quick else 3000), options.seeds)
    spent = repeats.results[0].settings.privacy.evaluation_epsilon
    report("text", repeats, options, data="made up", evaluation_epsilon=spent)


if __name__ == "__main__":
    main()
