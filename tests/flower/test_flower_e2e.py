"""Real processes on loopback, with TLS and node keys. Takes minutes: `make test-flower`, or FULCRUM_FLOWER=1 pytest.

Three parties, twenty rounds; one party is killed and started again, then the coordinator; a node that
nobody knows and one with a wrong key knock all the while.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

import fulcrum.flower

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")
import httpx

from fulcrum.flower import keys, run
from fulcrum.flower.coordinator import WaitPolicy
from fulcrum.flower.flwr141 import FLEET_PATHS, LocalSuperlink, TlsFiles, find_free_port, make_app_bundle
from fulcrum.privacy.accounting import Spend
from fulcrum.privacy.ledger import Ledger
from support.flower_processes import CONFIG, PARTIES, ROUNDS, Federation

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("hospitals"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def played(federation):
    """The whole story, once; the tests below look at what it left."""
    folder = federation.folder
    # A node with the right CA and terms but a key that nobody knows, and one that claims to be c with another key.
    keys.make_key_pair(folder / "stranger", "d")
    shutil.copy(folder / "c" / "terms.toml", folder / "stranger" / "terms.toml")
    text = (folder / "stranger" / "terms.toml").read_text().replace('party = "c"', 'party = "d"')
    (folder / "stranger" / "terms.toml").write_text(text)
    keys.make_key_pair(folder / "impostor", "c")
    shutil.copy(folder / "c" / "terms.toml", folder / "impostor" / "terms.toml")

    federation.serve("config.toml", "--out", "run", *federation.transport)
    for name in PARTIES:
        federation.party(name)
    federation.party("d", home="stranger", data="a.npz")
    federation.party("c", home="impostor", data="a.npz")

    federation.wait_for(lambda: len(federation.rounds()) >= 4)
    stranger_saw = knock(federation)
    federation.kill("b")
    federation.party("b")
    federation.wait_for(lambda: "round" in federation.log("b").rpartition("error")[2] and len(federation.rounds()) >= 9)
    federation.kill("serve")
    at_crash = len(federation.rounds())
    assert at_crash < ROUNDS, "the coordinator was to be killed in the middle"
    federation.serve("--resume", "run")
    federation.wait_for(lambda: federation.running["serve"].poll() is not None)
    for name in PARTIES:
        federation.wait_for(lambda name=name: federation.running[name].poll() is not None, 60)
    federation.close()
    return {"stranger_saw": stranger_saw, "at_crash": at_crash}


def knock(federation) -> dict[str, int]:
    """What somebody with nothing but the public CA gets for every way in."""
    trust = ssl.create_default_context(cafile=str(federation.folder / "certs" / "ca.crt"))
    ways = ["control/start-run", "control/register-node", "runtime/acquire-task", "runtime/pull-task-input"]
    ways += ["runtime/push-messages", "fleet/register-node", *(f"fleet/{path}" for path in FLEET_PATHS)]
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    with httpx.Client(verify=trust, base_url=f"https://127.0.0.1:{federation.port}/v1/") as client:
        return {way: client.post(way, content=b"", headers=headers).status_code for way in ways}


def test_the_run_ends_although_a_party_and_the_coordinator_were_killed(federation, played):
    assert federation.running["serve"].returncode == 0, federation.log("serve")
    lines = federation.rounds()
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
    assert all(len(line["participants"]) >= 2 for line in lines)
    assert sum(len(line["participants"]) == 3 for line in lines) >= ROUNDS // 2
    assert [p["name"] for p in json.loads((federation.folder / "run/run.json").read_text())["flower"]["parties"]] == [
        *PARTIES
    ]
    assert lines[-1]["accuracy"] > 0.5


@pytest.mark.parametrize("name", PARTIES)
def test_every_ledger_is_right(federation, played, name):
    run_id = json.loads((federation.folder / "run" / "run.json").read_text())["id"]
    with Ledger.open(federation.folder / name / "ledger.sqlite") as ledger:
        entries = ledger.entries(name)
        spent, budget = ledger.epsilon(name), ledger.accounts()[name].budget
    with Ledger.open(federation.folder / "run" / "ledger.sqlite") as ledger:
        mirror = {entry.round: entry for entry in ledger.entries(name)}
    assert {entry.run for entry in entries} == {run_id}
    rounds = [entry.round for entry in entries]
    assert len(rounds) == len(set(rounds)), "no round is paid twice"
    assert all(entry.attempt == 0 for entry in entries)
    own = {entry.round: entry for entry in entries}
    taken = [line["round"] - 1 for line in federation.rounds() if PARTIES.index(name) in line["participants"]]
    assert len(taken) >= ROUNDS // 2
    for t in taken:  # none is free: what the coordinator used was paid for, and is what was paid for
        assert own[t].digest is not None
        assert own[t].digest == mirror[t].digest
    events = [event for entry in entries for event in entry.events]
    assert spent == pytest.approx(Spend.empty().add_events(events).epsilon(1e-4, "rdp"))
    assert budget is not None
    assert spent <= budget


@pytest.mark.parametrize("name", PARTIES)
def test_every_party_has_its_own_statement(federation, played, name):
    assert federation.running[name].returncode == 0, federation.log(name)
    facts = json.loads((federation.folder / name / "privacy.json").read_text())
    assert facts["randomness"]["mode"] == "secure"
    assert [party["name"] for party in facts["parties"]] == [name]
    with Ledger.open(federation.folder / name / "ledger.sqlite") as ledger:
        assert facts["epsilon"] == pytest.approx(ledger.epsilon(name))
    assert "Privacy statement" in (federation.folder / name / "PRIVACY.md").read_text()


@pytest.mark.parametrize(("home", "name"), [("stranger", "d"), ("impostor", "c")])
def test_unknown_nodes_and_wrong_keys_are_turned_away(federation, played, home, name):
    with Ledger.open(federation.folder / home / "ledger.sqlite") as ledger:
        assert ledger.entries(name) == [], "nothing was ever asked of it"
    assert "not connected (key): the coordinator does not know this party's key" in federation.log(home)
    assert "connected to" not in federation.log(home)


def test_a_stranger_with_the_public_CA_finds_no_way_in(played):
    for way, status in played["stranger_saw"].items():
        closed = way.startswith("fleet/") and way != "fleet/register-node"
        assert status == (401 if closed else 404), way


def test_nothing_is_left_running(federation, played):
    assert federation.children() == []


# --- a method whose statistics do not go out with every step ------------------------------------


def test_dc_sgd_is_served_to_its_end(tmp_path):
    """Its histogram goes out with every fourth step, so the rounds of a run differ in what they release."""
    config = CONFIG.replace('"moo"', '"dc-sgd"').replace(f"rounds = {ROUNDS}", "rounds = 6")
    made = Federation(tmp_path, config.replace("rate = 0.05", "rate = 0.25"))
    try:
        made.serve("config.toml", "--out", "run", *made.transport)
        for name in PARTIES:
            made.party(name)
        for name in ("serve", *PARTIES):
            made.wait_for(lambda name=name: made.running[name].poll() is not None)
    finally:
        made.close()
    assert made.running["serve"].returncode == 0, made.log("serve")
    assert [len(line["participants"]) for line in made.rounds()] == [3] * 6
    for name in PARTIES:
        own = _entries(tmp_path / name / "ledger.sqlite", name)
        with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
            mirror = ledger.entries(name)
        assert [(e.round, e.events, e.digest) for e in own] == [(e.round, e.events, e.digest) for e in mirror]
        assert [e.events[0].sigma == 1.5 for e in own] == [True, False, False, False, True, False]


# --- code that the server sends -----------------------------------------------------------------


def test_a_server_that_pushes_code_finds_the_parties_running_theirs(tmp_path):
    """The pushed app writes a file when it runs. A party of ours never runs it; Flower's own SuperNode does."""
    made = Federation(tmp_path)
    settings = run.settings_file.read_settings(
        tmp_path / "config.toml",
        {"train.rounds": 2, "train.min_parties": 1, "data.source": str(tmp_path / "public.npz")},
    )
    pushed = f"""
import os
from pathlib import Path
Path({str(tmp_path)!r}, "pushed-" + os.environ["WHO"]).write_text("ran")
from flwr.clientapp import ClientApp
app = ClientApp()
"""

    @contextlib.contextmanager
    def evil_link(address, register, report):
        tls = TlsFiles(address.certificate, address.key)
        nodes = {name: keys.public_key_to_pem(key) for name, key in register.items()}
        with LocalSuperlink("127.0.0.1", made.port, tls, nodes, make_app_bundle({"pushed.py": pushed})) as link:
            yield link.transport

    os.environ["WHO"] = "ours"
    try:
        made.party("a")
        os.environ["WHO"] = "stock"
        stock = ["flower-supernode", "--superlink", f"127.0.0.1:{made.port}", "--root-certificates", "certs/ca.crt"]
        stock += ["--auth-supernode-private-key", "b/b", "--port", str(find_free_port())]
        environment = {**os.environ, **fulcrum.flower.FLOWER_ENVIRONMENT, "FLWR_HOME": str(tmp_path / "flwr-stock")}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with (tmp_path / "stock.log").open("wb") as log:
            victim = subprocess.Popen(
                stock, cwd=tmp_path, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            files = (tmp_path / "certs" / "server.crt", tmp_path / "certs" / "server.key")
            address = run.ListenAddress("127.0.0.1", made.port, *files)
            register = keys.load_public_keys(tmp_path / "register")
            wait_policy = WaitPolicy(round_timeout=60, join_timeout=40, min_parties=1)
            result = run.serve_run(
                settings,
                tmp_path / "run",
                address,
                register,
                wait_policy=wait_policy,
                say=lambda _: None,
                open_transport=evil_link,
            )
        finally:
            os.killpg(victim.pid, signal.SIGKILL)
            victim.wait()
    finally:
        os.environ.pop("WHO")
        made.close()
    assert result.summary["rounds"] == 2
    assert [entry.round for entry in _entries(tmp_path / "a" / "ledger.sqlite", "a")] == [0, 1]
    assert not (tmp_path / "pushed-ours").exists()
    assert (tmp_path / "pushed-stock").exists(), "the wrong case: a stock SuperNode ran what it was sent"


def _entries(path: Path, party: str):
    with Ledger.open(path) as ledger:
        return ledger.entries(party)
