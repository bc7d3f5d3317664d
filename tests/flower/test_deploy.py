"""deploy/: units that systemd accepts, an image that is not root, a starter that continues a run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
HARDENED = ("NoNewPrivileges=true", "ProtectSystem=strict", "User=fulcrum", "PrivateTmp=true", "CapabilityBoundingSet=")


def has_runtime() -> str:
    """The container runtime that answers on this machine; "" where there is none."""
    for name in ("docker", "podman"):
        if shutil.which(name):
            try:
                if subprocess.run([name, "ps"], capture_output=True, timeout=20, check=False).returncode == 0:
                    return name
            except subprocess.TimeoutExpired:
                continue
    return ""


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_run_as_an_ordinary_user_with_little_around_them(unit):
    text = unit.read_text()
    for line in HARDENED:
        assert f"\n{line}" in text, f"{unit.name} lacks {line}"
    assert "RestartPreventExitStatus=2" in text, "exit code 2 is a mistake in files, which a restart does not mend"
    commands = re.findall(r"^ExecStart\w*=-?(\S+) (\S+)", text, flags=re.MULTILINE)
    assert all(command.startswith("/opt/fulcrum/bin/fulcrum") for command, _ in commands)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_units(unit, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    text = re.sub(r"/opt/fulcrum/bin/[\w-]+", "/bin/true", unit.read_text())
    (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if unit.stem.rstrip("@") in line]
    assert not said, said
    (tmp_path / unit.name).write_text(text.replace("ProtectSystem=strict", "ProtectSystems=strict"))
    wrong = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "ProtectSystems" in wrong.stdout + wrong.stderr, "a mistake would be seen"


def test_the_image_is_not_root_has_the_cpu_build_and_holds_no_secret():
    text = (DEPLOY / "Containerfile").read_text()
    steps = [line for line in text.splitlines() if line and not line.startswith("#")]
    users = [line.split()[1] for line in steps if line.startswith("USER ")]
    assert users, "it would run as root"
    assert not users[-1].startswith(("0", "root"))
    assert "download.pytorch.org/whl/cpu" in text
    assert ":latest" not in text
    assert "HEALTHCHECK" in text
    copied = " ".join(line for line in steps if line.startswith(("COPY ", "ADD ")))
    assert not re.search(r"\.key|\.npz|ledger|register|COPY \. ", copied)


@pytest.mark.slow
def test_the_image_builds_and_says_its_version():
    runtime = has_runtime()
    if not runtime:
        pytest.skip("no container runtime answers on this machine; the Containerfile is linted only")
    build = [runtime, "build", "-f", str(DEPLOY / "Containerfile"), "-t", "fulcrum-test", str(DEPLOY.parent)]
    done = subprocess.run(build, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode and re.search(
        r"resolve|network|timeout|no such host|registry|denied", done.stderr, flags=re.IGNORECASE
    ):
        pytest.skip("the runtime cannot fetch the base image or packages from here")
    assert done.returncode == 0, done.stderr[-2000:]
    said = subprocess.run(
        [runtime, "run", "--rm", "fulcrum-test", "--version"], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith("fulcrum ")


def start(folder: Path, *words: str) -> list[str]:
    """What fulcrum-coordinate would run."""
    fake = folder / "fulcrum"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["sh", str(DEPLOY / "fulcrum-coordinate"), str(folder / "config"), str(folder / "state" / "run")],
        capture_output=True,
        text=True,
        check=True,
        env={"FULCRUM": str(fake), "PATH": "/usr/bin:/bin"},
    )
    return done.stdout.split("\n")[:-1]


def test_the_starter_begins_continues_and_leaves_a_finished_run_alone(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "serve.options").write_text("# more\n--listen\n0.0.0.0:9092\n--quorum\n0.8\n")
    first = start(tmp_path)
    assert first[:2] == ["serve", str(tmp_path / "config" / "config.toml")]
    assert first[first.index("--quorum") + 1] == "0.8"
    assert "--metrics" in first
    run = tmp_path / "state" / "run"
    run.mkdir(parents=True)
    (run / "parties.jsonl").write_text("")
    assert "--out" in start(tmp_path), "nothing was released yet: a new run"
    (run / "run.json").write_text("{}")
    assert start(tmp_path)[:3] == ["serve", "--resume", str(run)]
    (run / "summary.json").write_text(json.dumps({"status": "stopped"}, indent=2))
    assert start(tmp_path)[:2] == ["serve", "--resume"]
    (run / "summary.json").write_text(json.dumps({"status": "finished"}, indent=2))
    assert start(tmp_path) == []


def test_options_of_the_files_exist():
    """Every long option in deploy/ is one of the command line's."""
    typer = pytest.importorskip("typer")
    from fulcrum.cli import app

    command = typer.main.get_command(app)
    known = {name for each in ("serve", "party") for p in command.commands[each].params for name in p.opts}
    for file in (*UNITS, DEPLOY / "fulcrum-coordinate"):
        lines = [
            line
            for line in file.read_text().splitlines()
            if "fulcrum" in line or line.strip().startswith(("--", "set --"))
        ]
        used = {word for line in lines for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
        assert used <= known, used - known
