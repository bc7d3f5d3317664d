"""Log lines, metrics and health of one process: `Monitor`, and an HTTP endpoint that only this machine reaches."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fulcrum.errors import ConfigError
from fulcrum.runs import folder as record

SILENT_SECONDS = 600.0
"""A process that is neither at work on a round nor has passed through its loop for so long is called unhealthy."""
Labels = tuple[tuple[str, str], ...]


class JsonLog:
    """A file of JSON lines. Every line is on disk when `write` returns; "-" writes to standard error."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        if path != "-":
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with Path(path).open("a", encoding="utf-8"):
                    pass
            except OSError as error:
                raise ConfigError(f"log {path} cannot be written: {error.strerror}; choose another file.") from None

    def write(self, line: dict[str, Any]) -> None:
        """Append one line. A full disk ends no round: it is said once on standard error."""
        text = json.dumps(line, allow_nan=False, default=str) + "\n"
        with self._lock:
            if self.path == "-":
                sys.stderr.write(text)
                sys.stderr.flush()
                return
            try:
                append_durably(Path(self.path), text)
            except OSError as error:
                sys.stderr.write(f"warning: log {self.path} cannot be written: {error.strerror}\n")


def append_durably(path: Path, text: str) -> None:
    """Append to a file; the text is on disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class Monitor:
    """What an operator sees of one process. role: "coordinator" or "party"; ready: (whether it can work now, why)."""

    def __init__(self, role: str, log: JsonLog | None = None, **facts: Any) -> None:
        self.role, self.log, self.facts = role, log, facts
        self.ready: Callable[[], tuple[bool, str]] = lambda: (True, "running")
        self._values: dict[tuple[str, Labels], float] = {}
        self._lock = threading.Lock()
        self._beat = time.monotonic()
        self._busy = ""

    def event(self, kind: str, **fields: Any) -> None:
        """One line of the log; numbers that are not finite become null."""
        if self.log is not None:
            line = {"time": record.current_utc_time(), "role": self.role, "event": kind, **self.facts, **fields}
            self.log.write(_only_finite(line))

    def set(self, name: str, value: float, **labels: str) -> None:
        """The present value of a metric."""
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] = float(value)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Raise a counter; its name ends in _total."""
        key = name, tuple(sorted(labels.items()))
        with self._lock:
            self._values[key] = self._values.get(key, 0.0) + value

    def clear(self, name: str) -> None:
        """Forget a metric under all its labels, before its labels are set anew."""
        with self._lock:
            for key in [key for key in self._values if key[0] == name]:
                del self._values[key]

    def beat(self) -> None:
        """The process's loop has come round."""
        self._beat = time.monotonic()

    @contextlib.contextmanager
    def work_on(self, what: str) -> Iterator[None]:
        """Around work that may take long, such as a round's training."""
        self._busy = what
        try:
            yield
        finally:
            self._busy = ""
            self.beat()

    def describe_health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the process lives, and what it does."""
        silent = time.monotonic() - self._beat
        alive = bool(self._busy) or silent < SILENT_SECONDS
        return alive, {
            "role": self.role,
            "alive": alive,
            "doing": self._busy or "waiting",
            "silent_s": round(silent, 1),
        }

    def render(self) -> str:
        """All metrics in Prometheus' text format."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.set("process_cpu_seconds_total", usage.ru_utime + usage.ru_stime)
        self.set("process_resident_memory_bytes", read_resident_bytes())
        self.set("fulcrum_ready", float(self.ready()[0]))
        with self._lock:
            rows = sorted(self._values.items())
        lines: list[str] = []
        told = ""
        for (name, labels), value in rows:
            if name != told:
                lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
                told = name
            words = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
            lines.append(f"{name}{{{words}}} {value!r}" if words else f"{name} {value!r}")
        return "\n".join(lines) + "\n"


def _only_finite(value: Any) -> Any:
    """The value as JSON has it: numbers that are not finite are null, also in lists and tables."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _only_finite(each) for name, each in value.items()}
    return [_only_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def read_resident_bytes() -> int:
    """Memory of this process that is in RAM, in bytes; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


class _Handler(BaseHTTPRequestHandler):
    monitor: Monitor
    timeout = 10

    def do_GET(self) -> None:
        found = _PAGES.get(self.path)
        status, kind, body = (
            found(self.monitor) if found else (404, "text/plain", "try /metrics, /healthz or /readyz\n")
        )
        content = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: every scrape would be a line."""


def _show_health(monitor: Monitor) -> tuple[int, str, str]:
    alive, words = monitor.describe_health()
    return (200 if alive else 503), "application/json", json.dumps(words) + "\n"


def _show_ready(monitor: Monitor) -> tuple[int, str, str]:
    ready, why = monitor.ready()
    return (200 if ready else 503), "application/json", json.dumps({"ready": ready, "why": why}) + "\n"


_PAGES: dict[str, Callable[[Monitor], tuple[int, str, str]]] = {
    "/metrics": lambda monitor: (200, "text/plain; version=0.0.4", monitor.render()),
    "/healthz": _show_health,
    "/readyz": _show_ready,
}


@contextlib.contextmanager
def serve_monitor(monitor: Monitor, port: int | None) -> Iterator[int]:
    """/metrics, /healthz and /readyz on 127.0.0.1:port while the block runs; port None: nothing listens.

    Yields the port; 0 chooses a free one.
    """
    if port is None:
        yield 0
        return
    if not 0 <= port < 65536:
        raise ConfigError(f"--metrics {port} is not a port; choose one from 1 to 65535, such as 9464.")
    handler = type("Handler", (_Handler,), {"monitor": monitor})
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise ConfigError(f"--metrics {port}: cannot listen on 127.0.0.1:{port}: {error.strerror}.") from None
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2)
