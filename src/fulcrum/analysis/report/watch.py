"""`fulcrum watch`: the page of a run, or a list of runs, served while they go on.

Loopback by default. Every request needs the token that is part of the address. What can be asked for is the list, and
the runs on it by their names there: no path is ever taken from a request. Nothing is written.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import fulcrum
from fulcrum.analysis.report import several
from fulcrum.analysis.report.discovery import find_runs
from fulcrum.analysis.report.html import Html, tag
from fulcrum.analysis.report.model import RunView, is_run_folder, read_run
from fulcrum.analysis.report.page import LivePage, assemble_page, make_page
from fulcrum.analysis.report.reading import is_locked
from fulcrum.analysis.report.sections import make_section
from fulcrum.analysis.report.study_page import is_study_folder, make_study_page
from fulcrum.study.store import list_shards

SEEN_FILES = (
    *("run.json", "summary.json", "metrics.jsonl", "settings.toml", "privacy.json", "split.json", "rehearsal.json"),
    "theory.json",
    "audit.json",
    *("environment.json", "parties.jsonl", "status.json"),
)
"""The files of a run that its page is made from."""
MAX_COMPARED = 60
"""The largest number of runs on one page."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass
class RunWatch:
    """The runs below a folder, each read again only when one of its files changed."""

    target: Path
    _known: dict[Path, tuple[str, RunView]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_single(self) -> bool:
        """Whether a run is watched, not a folder of runs."""
        return is_run_folder(self.target)

    def list_folders(self) -> dict[str, Path]:
        """The runs by their names in addresses: their places below the target."""
        if self.is_single:
            return {self.target.name: self.target}
        return {folder.relative_to(self.target).as_posix(): folder for folder in find_runs(self.target)}

    def read(self, folder: Path) -> tuple[str, RunView]:
        """A run, and a digest of what its files were then."""
        state = compute_state(folder)
        with self._lock:
            known = self._known.get(folder)
        if known is None or known[0] != state:
            known = state, read_run(folder)
            with self._lock:
                self._known[folder] = known
        return known


def compute_state(folder: Path) -> str:
    """Changes whenever a file of the run does, or the process that runs it ends."""
    facts: list[object] = [is_locked(folder / "lock")]
    for name in SEEN_FILES:
        try:
            found = (folder / name).stat()
            facts.append((name, found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            facts.append(name)
    return hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()


@dataclass(frozen=True)
class Answer:
    """What a request gets: a status, and a page."""

    status: HTTPStatus
    page: str = ""


def answer_request(watch: RunWatch, query: str, token: str, seconds: float = 2.0) -> Answer:
    """The answer to a query: the list, a run (`run=NAME`) or several; 204 where `state` says that nothing changed."""
    wanted = parse_qs(query, max_num_fields=MAX_COMPARED + 8)
    given = wanted.get("token", [""])[0]
    if not hmac.compare_digest(given.encode(), token.encode()):
        return Answer(HTTPStatus.FORBIDDEN, "This address lacks the token that `fulcrum watch` printed.")
    if not is_run_folder(watch.target) and is_study_folder(watch.target):
        return _answer_about_study(watch.target, wanted.get("state", [""])[0], seconds)
    folders = watch.list_folders()
    names = list(dict.fromkeys(wanted.get("run", [])))[:MAX_COMPARED]
    if any(name not in folders for name in names):
        return Answer(HTTPStatus.NOT_FOUND, "There is no such run here.")
    listing = not names and not watch.is_single
    shown = list(folders) if listing or not names else names
    read = [(name, *watch.read(folders[name])) for name in shown]
    digest = hashlib.blake2b(digest_size=12)
    for name, state, _ in read:
        digest.update(f"{name}\0{state}\0".encode())
    state, before = digest.hexdigest(), wanted.get("state", [""])[0]
    if before == state:
        return Answer(HTTPStatus.NO_CONTENT)
    back = "" if listing or watch.is_single else "?" + urlencode({"token": token})
    live = LivePage(state, seconds, back, next=bool(before))
    runs = [(name, run) for name, _, run in read]
    if listing:
        return Answer(HTTPStatus.OK, make_listing(watch.target, runs, token, live))
    return Answer(HTTPStatus.OK, make_page([run for _, run in runs], live=live))


def _answer_about_study(folder: Path, before: str, seconds: float) -> Answer:
    """The page of a study or a comparison, or nothing where no run ended since."""
    facts = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in list_shards(folder)]
    state = hashlib.blake2b(repr(facts).encode(), digest_size=12).hexdigest()
    if before == state:
        return Answer(HTTPStatus.NO_CONTENT)
    return Answer(HTTPStatus.OK, make_study_page(folder, live=LivePage(state, seconds, next=bool(before))))


def make_listing(target: Path, runs: Sequence[tuple[str, RunView]], token: str, live: LivePage) -> str:
    """The page with the list of runs."""
    empty = tag("p", f"There is no run in {target} yet; it appears here as soon as it starts.")
    going = sum(run.state == "running" for _, run in runs)
    words = f"{len(runs)} runs, {going} in progress" if going else f"{len(runs)} runs"
    body: Html = several.make_picker(runs, token) if runs else tag("div", empty, class_="card")
    meta = tag("div", tag("span", words), class_="meta")
    return assemble_page(f"Runs in {target}", meta, make_section("runs", "Runs", body), live=live)


class WatchServer(ThreadingHTTPServer):
    """Serves the watched runs. token: what an address must have; hosts: what a browser may call this server."""

    daemon_threads = True

    def __init__(self, watch: RunWatch, host: str = "127.0.0.1", port: int = 0, seconds: float = 2.0) -> None:
        self.watch, self.seconds, self.token = watch, seconds, secrets.token_urlsafe(24)
        super().__init__((host, port), _Handler)
        self.bound = host
        shown = f"[{host}]" if ":" in host else host
        self.hosts = {f"{name}:{self.server_port}" for name in (shown, "localhost", "127.0.0.1", "[::1]")}

    @property
    def address(self) -> str:
        """The address to open, with its token."""
        host = f"[{self.bound}]" if ":" in self.bound else self.bound
        return f"http://{host}:{self.server_port}/?{urlencode({'token': self.token})}"

    @property
    def everywhere(self) -> bool:
        """Whether it is bound to all addresses of this machine, so that its own name is not known."""
        return self.bound in ("0.0.0.0", "::", "")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = f"fulcrum/{fulcrum.__version__}", ""
    timeout = 30

    def do_GET(self) -> None:
        """The one page there is, in its variants."""
        self._send(self._find_answer())

    do_HEAD = do_GET

    def _find_answer(self) -> Answer:
        # Another page in the same browser may point a name of its own at this address; it cannot know the token, and
        # its requests carry its own name.
        if not self.server.everywhere and self.headers.get("Host", "") not in self.server.hosts:
            return Answer(HTTPStatus.FORBIDDEN, "This server does not go by that name.")
        asked = urlsplit(self.path)
        if asked.path != "/":
            return Answer(HTTPStatus.NOT_FOUND, "There is nothing at this address.")
        try:
            return answer_request(self.server.watch, asked.query, self.server.token, self.server.seconds)
        except ValueError:
            return Answer(HTTPStatus.BAD_REQUEST, "This address asks for too much.")

    def _send(self, answer: Answer) -> None:
        page = answer.status == HTTPStatus.OK
        content = answer.page.encode("utf-8", "replace")
        self.send_response(answer.status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8" if page else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD" and answer.status != HTTPStatus.NO_CONTENT:
            self.wfile.write(content)

    def log_message(self, format: str, *words: object) -> None:
        """Nothing is printed: addresses hold the token."""
