"""`fulcrum watch`: what it answers, to whom, and that a browser follows a run with it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from fulcrum.analysis.report.model import read_run
from fulcrum.analysis.report.page import make_page
from fulcrum.analysis.report.watch import RunWatch, WatchServer, answer_request, compute_state, is_loopback
from fulcrum.cli import main
from support.browser import needs_browser, open_browser
from support.run_folders import make_line, make_run_folder

TOKEN = "secret-token"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with two runs, beside one that is not watched."""
    make_run_folder(tmp_path / "runs" / "a")
    make_run_folder(tmp_path / "runs" / "deep" / "b", epsilon=2.0, method="dp-sgd")
    make_run_folder(tmp_path / "elsewhere", source="not-watched")
    return tmp_path / "runs"


def ask(watch: RunWatch, *runs: str, token: str = TOKEN, state: str = "") -> tuple[HTTPStatus, str]:
    query = "&".join([f"token={token}", *(f"run={quote(run)}" for run in runs), f"state={state}"])
    answer = answer_request(watch, query, TOKEN)
    return answer.status, answer.page


def test_the_list_a_run_and_a_comparison(runs: Path) -> None:
    watch = RunWatch(runs)
    status, page = ask(watch)
    assert status == HTTPStatus.OK
    assert "deep/b" in page
    assert "dp-sgd" in ask(watch, "deep/b")[1]
    both = ask(watch, "a", "deep/b")[1]
    assert "Privacy and utility" in both
    assert "all runs" in both
    single = ask(RunWatch(runs / "a"))[1]
    assert "What epsilon" in single
    assert "all runs" not in single


def test_without_the_token_there_is_nothing(runs: Path) -> None:
    for query in ("", "token=", "token=wrong", f"token={TOKEN}x", "token=%ff", f"run=a&Token={TOKEN}"):
        answer = answer_request(RunWatch(runs), query, TOKEN)
        assert answer.status == HTTPStatus.FORBIDDEN
        assert "dp-sgd" not in answer.page


@pytest.mark.parametrize(
    "name",
    ["../elsewhere", "a/../../elsewhere", "/etc", "..", ".", "a/", "deep", "deep/../a", "a\0", "%2e%2e/elsewhere", ""],
)
def test_no_path_leads_out(runs: Path, name: str) -> None:
    (runs / "link").symlink_to(runs.parent / "elsewhere")
    watch = RunWatch(runs)
    status, page = ask(watch, name)
    assert status == HTTPStatus.NOT_FOUND or (name == "" and status == HTTPStatus.OK and "not-watched" not in page)
    assert ask(watch, "link")[0] == HTTPStatus.NOT_FOUND, "links are not followed"
    assert "not-watched" not in ask(watch)[1]


def test_nothing_is_sent_again_until_something_changed(runs: Path) -> None:
    watch = RunWatch(runs)
    page = ask(watch, "a")[1]
    state = page.split('name="fulcrum-live" content="')[1].split('"')[0]
    assert ask(watch, "a", state=state) == (HTTPStatus.NO_CONTENT, "")
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 21, "metrics": {"accuracy": 0.5}}) + "\n")
    status, after = ask(watch, "a", state=state)
    assert status == HTTPStatus.OK
    assert len(after) < len(page) / 4, "scripts and style are not sent again"
    assert ask(watch, "deep/b", state=state)[0] == HTTPStatus.OK, "another page's state is no state of this one"


def test_runs_are_read_again_only_when_they_changed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def count(folder: Path):
        read.append(folder)
        return read_run(folder)

    monkeypatch.setattr("fulcrum.analysis.report.watch.read_run", count)
    watch = RunWatch(runs)
    ask(watch)
    ask(watch)
    assert len(read) == 2
    os.utime(runs / "a" / "summary.json", ns=(1, 1))
    ask(watch)
    assert read[2:] == [runs / "a"]


def test_a_new_run_and_a_deleted_one(runs: Path) -> None:
    watch = RunWatch(runs)
    make_run_folder(runs / "late", rounds=5, done=0, finished=False)
    assert "late" in ask(watch)[1]
    before = compute_state(runs / "late")
    (runs / "late" / "metrics.jsonl").unlink()
    assert compute_state(runs / "late") != before
    assert ask(watch, "late")[0] == HTTPStatus.OK
    empty = runs / "empty"
    empty.mkdir()
    assert "There is no run in" in ask(RunWatch(empty))[1]


# --- over HTTP ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serve(folder: Path, seconds: float = 0.2) -> Iterator[WatchServer]:
    with WatchServer(RunWatch(folder), seconds=seconds) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_over_http(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serve(runs) as server:
        place, query = urlsplit(server.address).netloc, urlsplit(server.address).query

        def fetch(path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
            connection = http.client.HTTPConnection(place, timeout=30)
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            found = answer.status, answer.read().decode(), dict(answer.getheaders())
            connection.close()
            return found

        status, page, headers = fetch(f"/?{query}")
        assert status == 200
        assert "deep/b" in page
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert fetch("/")[0] == 403
        assert fetch(f"/?{query}", Host="evil.example")[0] == 403  # a name that another page points here
        for path in ("/../../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd", "/a/run.json", "/favicon.ico"):
            assert fetch(f"{path}?{query}")[0] == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert fetch(f"/?{query}", method)[0] == 501
        assert fetch(f"/?{query}" + "&run=a" * 500)[0] == 400
        assert fetch(f"/?{query}", "HEAD")[1] == ""
    said = capfd.readouterr()
    assert server.token not in said.out + said.err


def test_each_server_has_its_own_token_and_stays_on_this_machine(runs: Path) -> None:
    with serve(runs) as one, serve(runs) as other:
        assert one.token != other.token
        assert len(one.token) >= 32
        assert one.server_address[0] == "127.0.0.1"
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "name")] == [
        *(True, True, True, False, False, False)
    ]


def test_wrong_input_is_one_sentence(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(runs / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with serve(runs) as server:
        assert main(["watch", str(runs), "--port", str(server.server_port)]) == 2
    assert "cannot listen" in capsys.readouterr().err
    assert main(["watch", str(runs), "--host", "203.0.113.1"]) == 2


@pytest.mark.slow
def test_the_command_prints_its_address_and_ends_with_ctrl_c(runs: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "fulcrum", "watch", str(runs)], stdout=subprocess.PIPE, text=True, stderr=-1
    )
    assert process.stdout is not None
    try:
        address = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(address.netloc, timeout=30)
        connection.request("GET", f"/?{address.query}")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 0


# --- a federation --------------------------------------------------------------------------------------------

STATUS = {
    "format": 1,
    "time": "2026-11-16T10:00:00+00:00",
    "needed": 2,
    "parties": [
        {"party": "north", "state": "online", "since": "2026-11-16T09:00:00+00:00", "why": "", "answered": 7},
        {"party": "<b>east", "state": "late", "why": "answered 30 s after the round ended", "answered": 4},
        {"party": "south", "state": "refused", "why": "its <key> is not in the register", "answered": 0},
        {"party": "west", "state": "out of budget", "why": "its own ledger refused to go on", "answered": 5},
    ],
}


def test_who_is_online_late_refused_or_out_of_budget_and_why(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "served", done=7, finished=False)
    (folder / "status.json").write_text(json.dumps(STATUS))
    (folder / "parties.jsonl").write_text(json.dumps({"time": "t", "party": "south", "what": "was refused"}) + "\n")
    page = make_page([read_run(folder)])
    for words in (
        "1 online, 1 late, 1 out of budget, 1 refused",
        "its &lt;key&gt; is not",
        "&lt;b&gt;east",
        "was refused",
    ):
        assert words in page, words
    assert page.index('<th scope="row">south') < page.index('<th scope="row">north'), "what needs somebody comes first"


def test_parties_that_are_still_joining(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "status.json").write_text(json.dumps(STATUS))
    (tmp_path / "served" / "parties.jsonl").write_text("")
    run = read_run(tmp_path / "served")
    assert (run.state, run.problems) == ("stopped", ())
    assert "1 online" in make_page([run])


def test_with_unit_client_nobody_learns_who_answered(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "served", unit="client", public=False)
    (folder / "status.json").write_text(json.dumps(STATUS).replace('"answered": 7', '"answered": 98127634'))
    assert "98127634" not in make_page([read_run(folder)])
    assert "online" in make_page([read_run(folder)])
    other = make_run_folder(tmp_path / "other", public=False)
    (other / "status.json").write_text((folder / "status.json").read_text())
    assert "98127634" in make_page([read_run(other)])


# --- in a browser ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_browser
def test_a_browser_follows_a_run(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "runs" / "growing", rounds=30, done=3, finished=False)
    make_run_folder(tmp_path / "runs" / "other", epsilon=2.0)
    names = [f"party-{k}" for k in range(5)]
    with serve(tmp_path / "runs") as server, open_browser(tmp_path / "profile") as browser:
        browser.open(server.address)
        assert browser.run("return document.querySelectorAll('#run-table tbody tr').length") == 2
        browser.run("const i = document.querySelector('input[data-filter]'); i.value = 'growing'; i.oninput()")
        assert browser.run("return document.querySelectorAll('#run-table tbody tr:not([hidden])').length") == 1
        browser.run("const i = document.querySelector('input[data-filter]'); i.value = ''; i.oninput()")
        browser.click("a[href*='run=growing']")
        browser.wait("return document.title.includes('growing') && document.documentElement.dataset.ready")
        browser.click("figure[data-group=metrics] .axes button:nth-child(2)")
        for t in range(4, 9):
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(make_line(t, 30, 5, 0.9, 4.0, names)) + "\n")
            browser.wait(f"return document.querySelector('main').textContent.includes('{t} of 30 rounds')")
        axis = "return document.querySelector('figure[data-group=metrics] .axes button:nth-child(2)').ariaPressed"
        assert browser.run(axis) == "true", "what was chosen stays chosen"
        assert browser.run("return document.getElementById('live').textContent") == "live"
        # Back to the list, tick both, compare.
        browser.click("header a")
        browser.wait("return document.querySelector('[data-compare]') && document.documentElement.dataset.ready")
        for name in ("growing", "other"):
            browser.click(f"input[data-run='{name}']")
        browser.click("[data-compare]")
        browser.wait("return document.querySelector('figure[data-group=tradeoff] svg')")
        assert browser.read_errors() == []
    # The server is gone; an open page says so. (Nothing to check with a closed browser.)


@needs_browser
@pytest.mark.slow
def test_a_browser_follows_a_real_run(tmp_path: Path) -> None:
    words = ["run", "--data", "digits", "--epsilon", "4", "--rounds", "400", "--parties", "3", "--quiet"]
    process = subprocess.Popen([sys.executable, "-m", "fulcrum", *words, "--out", str(tmp_path / "runs" / "real")])
    (tmp_path / "runs").mkdir(exist_ok=True)
    try:
        with serve(tmp_path / "runs") as server, open_browser(tmp_path / "profile") as browser:
            browser.open(server.address)
            browser.wait("return document.querySelector('#run-table .badge.good')?.textContent === 'running'", 120)
            browser.open(f"{server.address}&run=real")
            read = "return Number(document.querySelector('#progress p')?.textContent.match(/^\\d+/)?.[0] ?? 0)"
            first = browser.wait(read, 60)
            end = time.monotonic() + 60
            while browser.run(read) <= first:
                assert time.monotonic() < end, "the page stands still"
                time.sleep(0.1)
            browser.wait("return document.querySelector('.meta .badge').textContent === 'finished'", 240)
            assert browser.read_errors() == []
    finally:
        process.terminate()
        process.wait(60)
