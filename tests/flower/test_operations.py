"""The operator's side: log lines, metrics, health, status, checks, a party's file, keys, a run from an old model."""

from __future__ import annotations

import dataclasses
import datetime
import json
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="parties sign with cryptography: pip install 'fulcrum-fl[flower]'")

from fulcrum.cli import main
from fulcrum.errors import ConfigError, RunError
from fulcrum.flower import certs, keys
from fulcrum.flower.messages import Envelope, pack_envelope
from fulcrum.flower.operations import checks, reach, status_page
from fulcrum.flower.operations.key_changes import accept_rotation, revoke_key, rotate_key
from fulcrum.flower.operations.monitor import JsonLog, Monitor, serve_monitor
from fulcrum.flower.operations.party_checks import PartyChecks
from fulcrum.flower.operations.party_file import EXAMPLE, PartyOptions, merge_party_options, read_party_file
from fulcrum.flower.operations.party_status import PartyStatus, read_loosely
from fulcrum.flower.operations.server_checks import ServerChecks
from fulcrum.flower.proposals import accept_proposal, make_proposal
from fulcrum.flower.run import ListenAddress
from fulcrum.flower.terms import terms_to_toml
from fulcrum.models.layout import ParameterLayout
from fulcrum.settings.schema import Settings
from support.flower import NAMES, serve, toy_federation, toy_party, toy_request, toy_settings


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# --- monitor ------------------------------------------------------------------------------------


def test_metrics_health_and_readiness_are_served_on_loopback(tmp_path):
    monitor = Monitor("party", JsonLog(str(tmp_path / "log" / "party.jsonl")), party="a")
    monitor.set("fulcrum_party_epsilon", 1.25)
    monitor.add("fulcrum_party_refusals_total", code='we"ird\n')
    monitor.event("round", round=3, epsilon=float("nan"), C=[float("inf"), 1.0], loss=-float("inf"))
    monitor.ready = lambda: (False, "away: nobody answers")
    with serve_monitor(monitor, 0) as port:
        status, text = get(port, "/metrics")
        assert status == 200
        assert "# TYPE fulcrum_party_epsilon gauge\nfulcrum_party_epsilon 1.25" in text
        assert 'fulcrum_party_refusals_total{code="we\\"ird\\n"} 1.0' in text
        assert "process_resident_memory_bytes" in text
        assert get(port, "/healthz")[0] == 200
        assert get(port, "/readyz") == (503, '{"ready": false, "why": "away: nobody answers"}\n')
        assert get(port, "/etc/passwd")[0] == 404
        monitor._beat -= 1e6
        assert get(port, "/healthz")[0] == 503
        with monitor.work_on("round 4"):
            assert get(port, "/healthz")[0] == 200, "a long round is no fault"
        with pytest.raises(ConfigError, match="cannot listen"), serve_monitor(monitor, port):
            pass
    with pytest.raises(urllib.error.URLError):
        get(port, "/metrics")
    line = json.loads((tmp_path / "log" / "party.jsonl").read_text())
    assert (line["role"], line["party"], line["round"], line["epsilon"]) == ("party", "a", 3, None)
    assert (line["C"], line["loss"]) == ([None, 1.0], None), "a loss that is infinite ends no run"


def test_a_log_that_cannot_be_written_is_named_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        JsonLog(str(tmp_path / "file" / "log"))


# --- coordinator --------------------------------------------------------------------------------


def test_a_served_run_keeps_log_lines_metrics_and_status(tmp_path, monkeypatch, capsys):
    settings = toy_settings(3)
    monitor = Monitor("coordinator", JsonLog(str(tmp_path / "c.jsonl")))
    with toy_federation(tmp_path, settings) as bus:
        serve(bus, settings, tmp_path / "run", monkeypatch, monitor=monitor)
    lines = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if line["event"] == "round"]
    assert [line["round"] for line in rounds] == [1, 2, 3]
    assert rounds[0]["parties_answered"] == list(NAMES)
    assert rounds[-1]["epsilon"] > 0
    text = monitor.render()
    assert "fulcrum_round 3.0" in text
    assert 'fulcrum_parties{state="online"} 3.0' in text
    assert 'fulcrum_party_state{party="party-1",state="online"} 1.0' in text
    assert monitor.ready() == (True, "3 of at least 1 parties are online")
    assert main(["status", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "round 3 of 3" in shown
    assert "party-2  online" in shown
    assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parties"][0]["answered"] == 3
    assert main(["status", str(tmp_path)]) == 2


def test_a_status_names_those_that_need_somebody_first_and_an_old_process():
    rows = [
        {"party": "a", "state": "online", "since": "t", "why": ""},
        {"party": "b", "state": "refused", "since": "t", "why": "does not take part: terms"},
        {"party": "c", "state": "out of budget", "since": "t", "why": "its own ledger refused to go on"},
    ]
    status = {
        "run": "r",
        "rounds": 9,
        "needed": 2,
        "parties": rows,
        "time": "2020-01-01T00:00:00+00:00",
        "pid": 1,
        "host": "?",
    }
    lines = status_page.format_status(status)
    assert [line.split()[0] for line in lines[2:]] == ["b", "c", "a"]
    assert "the process hangs" in lines[0]
    now = datetime.datetime(2020, 1, 1, 0, 0, 5, tzinfo=datetime.UTC)
    assert status_page.describe_process(status, now) == "written 5 s ago"


def test_a_new_run_begins_with_an_old_runs_model(tmp_path, monkeypatch):
    settings = toy_settings(3)
    with toy_federation(tmp_path, settings, simulation=False) as bus:
        first = serve(bus, settings, tmp_path / "one", monkeypatch, simulation=False)
        sent: list[torch.Tensor] = []

        def keep(k, request, reply):
            from fulcrum.flower.party import load_arrays

            if b'"kind":"round"' in request.header:
                sent.append(load_arrays(request.body)["params"])
            return reply

        bus.tamper = keep
        second = serve(bus, settings, tmp_path / "two", monkeypatch, simulation=False, start=tmp_path / "one")
        other = dataclasses.replace(settings, model=dataclasses.replace(settings.model, name="mlp"))
        with pytest.raises(ConfigError, match="another model"):
            serve(bus, other, tmp_path / "three", monkeypatch, simulation=False, start=tmp_path / "one")
    old = ParameterLayout.of(first.model).flatten(first.model)
    torch.testing.assert_close(sent[0], old)
    assert json.loads((tmp_path / "two" / "privacy.json").read_text())["start"]["run"]
    assert second.summary["status"] == "finished"


# --- party --------------------------------------------------------------------------------------


def test_a_party_keeps_log_lines_metrics_and_status(tmp_path):
    settings = toy_settings(3)
    monitor = Monitor("party", JsonLog(str(tmp_path / "p.jsonl")), party="party-0")
    with toy_party(tmp_path, settings) as service:
        status = PartyStatus(tmp_path, service, monitor)
        answer = status.watch(lambda request, expired: service.answer(request))
        answer(toy_request(service, settings), False)
        answer(toy_request(service, settings, round=1, sigma=0.01), False)
        answer(Envelope(b"\xff" * 10), False)
        health = SimpleNamespace(connected=False, cause="clock", words="wrong", since=0.0, clock_ahead=9.0)
        status.attach(SimpleNamespace(health=health))
        assert monitor.ready() == (False, "clock: wrong")
        status.refresh(force=True)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["round", "round", "unknown", "connection"]
    assert lines[0]["round"] == 1
    assert lines[0]["epsilon"] > 0
    assert lines[1]["refused"] == "sigma"
    text = monitor.render()
    assert "fulcrum_party_rounds_total 1.0" in text
    assert 'fulcrum_party_refusals_total{code="sigma"} 1.0' in text
    assert "fulcrum_party_connected 0.0" in text
    shown = "\n".join(status_page.format_status(status_page.read_status(tmp_path)))
    assert "NOT connected (clock): wrong" in shown
    assert "epsilon: " in shown
    # Another cause is written at once, not when the file is due again.
    health.cause, health.words = "revoked", "the key"
    status.refresh()
    shown = "\n".join(status_page.format_status(status_page.read_status(tmp_path)))
    assert "NOT connected (revoked): the key" in shown


def test_a_header_is_read_for_the_log_without_trust():
    assert read_loosely(Envelope(b"[1]")) == {}
    assert read_loosely(pack_envelope({"kind": "round\x1b[2J", "round": 1, "rounds": True})) == {
        "kind": "round[2J",
        "round": 1,
    }


def test_a_partys_file_is_read_with_paths_beside_it(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "party.toml").write_text(EXAMPLE + "until-done = true\n")
    (tmp_path / "site" / "records.npz").write_text("")
    monkeypatch.chdir(tmp_path)
    from pathlib import Path

    found = merge_party_options(Path("site/party.toml"), {"server": "other:1", "data": None, "insecure": False})
    assert found.server == "other:1"
    assert (found.key, found.ledger, found.data) == ("site/a", "site/ledger.sqlite", "site/records.npz")
    assert found.until_done
    assert found.metrics == 9465
    for text, words in (
        ("sever = 'x'", "did you mean server"),
        ("metrics = 'x'", "metrics: "),
        ("= 3", "not TOML"),
    ):
        (tmp_path / "wrong.toml").write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_party_file(tmp_path / "wrong.toml")
    with pytest.raises(ConfigError, match="--data, --server, --key, --ledger missing"):
        merge_party_options(None, {})


# --- checks -------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with what a party and a coordinator need, and a coordinator that seems to be there."""
    monkeypatch.setenv("FULCRUM_KEY_FILE", str(tmp_path / "record.key"))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.normal(size=(60, 4)).astype("f4"), y=np.arange(60) % 3)
    np.savez(tmp_path / "public.npz", x_test=rng.normal(size=(9, 4)).astype("f4"), y_test=np.arange(9) % 3, classes=3)
    settings = Settings().replace(
        data={"source": str(tmp_path / "public.npz")},
        model={"name": "linear"},
        train={"rounds": 3, "rate": 0.2},
        privacy={"sigma": 1.5, "delta": 1e-3},
    )
    keys.make_key_pair(tmp_path / "register", "a")
    certs.make_certificate_authority(tmp_path / "certs", ["127.0.0.1"])
    terms = accept_proposal("a", make_proposal(settings, 3))
    (tmp_path / "terms.toml").write_text(terms_to_toml(terms))
    return tmp_path, settings


def make_checks(folder) -> PartyChecks:
    from fulcrum.flower.party_data import load_party_data

    options = PartyOptions(
        data=str(folder / "a.npz"),
        server="127.0.0.1:1",
        key=str(folder / "register" / "a"),
        ledger=str(folder / "ledger.sqlite"),
        ca=str(folder / "certs" / "ca.crt"),
        terms=str(folder / "terms.toml"),
    )
    return PartyChecks(options, lambda task: load_party_data(options.data, task=task), torch.device("cpu"))


def test_a_partys_check_finds_everything_right_and_releases_nothing(site, monkeypatch):
    folder, _ = site
    before = sorted(path.name for path in folder.iterdir())
    monkeypatch.setattr(reach, "look_at_coordinator", lambda *given: reach.CoordinatorLook(True, "reached", 9.0))
    found = {each.what: each for each in make_checks(folder).run()}
    levels = {what: each.level for what, each in found.items()}
    wrong = {what for what, level in levels.items() if level == checks.WRONG}
    assert not wrong, found
    assert levels["coordinator"] == checks.WARNING
    assert "this clock is off by 9 s" in found["coordinator"].words
    assert "60 examples" in found["data"].words
    assert "thrown away" in found["dry round"].words
    assert "364 days" in found["certificate"].words
    assert sorted(path.name for path in folder.iterdir()) == before, "no ledger was begun"


@pytest.mark.parametrize(
    ("break_it", "what", "words"),
    [
        (lambda f: np.savez(f / "a.npz", x=np.zeros((9, 4), "f4"), y=np.arange(9)), "data", "labels hold"),
        (lambda f: (f / "terms.toml").unlink(), "terms", "there is no"),
        (lambda f: (f / "certs" / "ca.crt").write_text("x"), "certificate", "no certificate"),
        (lambda f: (f / "register" / "a").write_text("x"), "key", "not a private key"),
        (lambda f: (f / "ledger.sqlite").write_text("x" * 4096), "ledger", "ledger"),
    ],
)
def test_a_partys_check_names_what_is_wrong_and_goes_on(site, monkeypatch, break_it, what, words):
    folder, _ = site
    break_it(folder)
    monkeypatch.setattr(reach, "look_at_coordinator", lambda *given: reach.CoordinatorLook(False, "away"))
    found = list(make_checks(folder).run())
    assert len(found) == 9
    at = {each.what: each for each in found}
    assert at[what].level == checks.WRONG
    assert words in at[what].words
    assert at["coordinator"].level == checks.WRONG


def check_server(folder, settings, **changes):
    address = ListenAddress("127.0.0.1", 0, folder / "certs" / "server.crt", folder / "certs" / "server.key")
    address = dataclasses.replace(address, **changes.pop("address", {}))
    given = {"keys": folder / "register", "out": folder / "run", **changes}
    return {each.what: each for each in ServerChecks(settings, given["keys"], address, given["out"], False).run()}


def test_a_servers_check_finds_everything_right_and_what_is_wrong(site):
    folder, settings = site
    found = check_server(folder, settings)
    assert not [each for each in found.values() if each.level == checks.WRONG], found
    assert "for 127.0.0.1" in found["certificate"].words
    assert "1 party in" in found["register"].words
    assert "one run costs each party at most epsilon" in found["settings"].words
    assert not (folder / "run").exists()
    (folder / "run").mkdir()
    (folder / "run" / "mine").write_text("")
    certs.make_certificate_authority(folder / "other", ["example.org"])
    found = check_server(
        folder, settings.replace(train={"min_parties": 5}), address={"key": folder / "other" / "server.key"}
    )
    wrong = {what for what, each in found.items() if each.level == checks.WRONG}
    assert wrong == {"register", "key", "folder"}


def test_expiry_is_told_in_days(tmp_path):
    certs.make_certificate_authority(tmp_path, ["h"])
    found = checks.load_certificates(tmp_path / "server.crt")
    now = datetime.datetime.now(datetime.UTC)
    at = {days: checks.check_expiry(found, "c", now + datetime.timedelta(days=days)) for days in (-1, 0, 350, 400)}
    assert [at[days].level for days in (-1, 0, 350, 400)] == ["WRONG", "ok", "warning", "WRONG"]
    assert "renew it" in at[350].words
    assert "expired" in at[400].words


def test_the_command_line_prints_checks_and_ends_with_two(site, capsys, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: name == "flwr" or found(name, *more))
    folder, _ = site
    monkeypatch.chdir(folder)
    (folder / "party.toml").write_text(
        'data = "a.npz"\nserver = "127.0.0.1:1"\nkey = "register/a"\nledger = "ledger.sqlite"\nca = "certs/ca.crt"\n'
    )
    assert main(["party", "party.toml", "--check"]) == 2, "nobody answers at that address, or flwr is not installed"
    shown = capsys.readouterr()
    assert "ok       data         60 examples" in shown.out
    assert "WRONG    coordinator" in shown.out
    assert "check(s) went wrong" in shown.err


# --- keys ---------------------------------------------------------------------------------------


def test_a_rotation_is_accepted_when_the_present_key_signed_it_and_not_otherwise(tmp_path, capsys):
    private, public = keys.make_key_pair(tmp_path / "a", "a")
    register = tmp_path / "register"
    register.mkdir()
    (register / "a.pub").write_bytes(public.read_bytes().rstrip() + b" units=480\n")
    before = keys.load_private_key(private)
    note, kept = rotate_key(private)
    assert keys.public_key_to_pem(keys.load_private_key(kept).public_key()) == keys.public_key_to_pem(
        before.public_key()
    )
    with pytest.raises(ConfigError, match="rotation is under way"):
        rotate_key(private)
    forged = json.loads(note.read_text())
    keys.make_key_pair(tmp_path / "thief", "a")
    forged["public_key"] = (tmp_path / "thief" / "a.pub").read_text()
    (tmp_path / "forged.json").write_text(json.dumps(forged))
    with pytest.raises(ConfigError, match="not signed by a's present key"):
        accept_rotation(register, tmp_path / "forged.json")
    assert accept_rotation(register, note) == "a"
    assert (register / "a.pub").read_text().endswith(" a units=480\n"), "what was fixed with the key stays"
    now = keys.load_public_keys(register)["a"]
    assert keys.public_key_to_pem(now) == keys.public_key_to_pem(keys.load_private_key(private).public_key())
    with pytest.raises(ConfigError, match="present key"):
        accept_rotation(register, note)  # it is the present key by now
    place = revoke_key(register, "a")
    assert place.parent.name == "revoked"
    assert not list(register.glob("*.pub"))
    with pytest.raises(ConfigError, match=r"no a\.pub"):
        revoke_key(register, "a")
    with pytest.raises(ConfigError, match="a new party"):
        accept_rotation(register, note)


def test_a_damaged_status_and_no_status_are_named(tmp_path):
    with pytest.raises(RunError, match=r"holds no status\.json"):
        status_page.read_status(tmp_path)
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(RunError, match="damaged"):
        status_page.read_status(tmp_path)


def test_a_disk_that_is_full_ends_neither_the_log_of_parties_nor_the_status(tmp_path, monkeypatch):
    from fulcrum.flower.run import PartyLog

    said: list[str] = []
    log = PartyLog(said.append, tmp_path / "gone", Monitor("coordinator"))
    log("a", "has joined")
    assert said[0] == "a: has joined"
    assert "cannot be written" in said[1]
    with toy_party(tmp_path, toy_settings(3)) as service:
        (tmp_path / "file").write_text("")
        PartyStatus(tmp_path / "file", service, Monitor("party")).refresh(force=True)
