"""Three real processes over TLS with pairwise masks; one drops out and comes back. Takes a minute or two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")

from fulcrum.privacy.ledger import Ledger
from support.flower_processes import PARTIES, Federation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ROUNDS = 200
CONFIG = f"""
method = "moo"
[data]
source = "public.npz"
parties = 3
[model]
name = "linear"
[train]
rounds = {ROUNDS}
rate = 0.05
min_parties = 2
[privacy]
sigma = 1.5
delta = 1e-4
aggregation = "pairwise"
colluders = 1
"""


def count_entries(folder: Path, name: str) -> int:
    with Ledger.open(folder / name / "ledger.sqlite") as ledger:
        return len(ledger.entries(name))


def test_a_party_that_drops_out_of_a_masked_run_comes_back(tmp_path: Path) -> None:
    made = Federation(tmp_path, CONFIG)
    for name in PARTIES:  # each got the others' keys from themselves
        (tmp_path / name / "terms.toml").unlink()
        made.command(
            *("terms", "config.toml", "--party", name, "--classes", "10", "--peers", "register"),
            *("--budget", "1000", "--out", f"{name}/terms.toml"),
        )
    deadline = ["8" if word == "30" else word for word in made.transport]
    try:
        made.serve("config.toml", "--out", "run", *deadline)
        for name in PARTIES:
            made.party(name)
        made.wait_for(lambda: len(made.rounds()) >= 3)
        made.kill("c")  # in whichever moment of a round
        after = len(made.rounds())
        made.wait_for(lambda: len(made.rounds()) >= after + 2)
        made.party("c")
        seen = made.log("c").count("masked")
        made.wait_for(lambda: made.log("c").count("masked") > seen or made.running["serve"].poll() is not None)
        made.wait_for(lambda: made.running["serve"].poll() is not None)
        for name in PARTIES:
            made.wait_for(lambda name=name: made.running[name].poll() is not None, 60)
    finally:
        made.close()
    assert made.running["serve"].returncode == 0, made.log("serve")
    taking_part = [len(line["participants"]) for line in made.rounds()]
    assert len(taking_part) == ROUNDS
    assert taking_part[0] == 3
    assert 2 in taking_part  # without c, with other shares of noise
    assert taking_part[-1] == 3, taking_part  # c is back
    facts = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert facts["aggregation"] == "pairwise"
    assert "only relays keys" in facts["pairwise"]["text"]
    paid = {name: count_entries(tmp_path, name) for name in PARTIES}
    assert ROUNDS <= paid["a"] <= ROUNDS + 2  # a void round is paid by who sent
    assert paid["c"] < ROUNDS + 2
    own = json.loads((tmp_path / "a" / "privacy.json").read_text())
    assert {key["party"] for key in own["pairwise"]["keys"]} == {"b", "c"}
    accuracy = made.rounds()[-1]["accuracy"]
    assert accuracy > 0.5
