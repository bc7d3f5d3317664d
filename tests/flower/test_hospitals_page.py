"""docs/three-hospitals.md, typed along: keys, certificates, terms, a coordinator and three hospitals as processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")
from fulcrum.flower.flwr141 import find_free_port
from support.pages import ROOT, cut_commands, read_blocks, read_page

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
PYTHON = shlex.quote(sys.executable)
PROGRAMS = f'fulcrum() {{ {PYTHON} -m fulcrum "$@"; }}\npython() {{ {PYTHON} "$@"; }}\n'


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FULCRUM_KEY_FILE": str(folder / "record.key")}
    words = ["bash", "-ec", PROGRAMS + command]
    return subprocess.Popen(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str], command: str, seconds: float) -> None:
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, f"{command}\n{said}"


def list_commands(port: int) -> Iterator[str]:
    """The page's commands; what it shows for hospital a is said for b and c too. Ten rounds in place of forty."""
    for block in read_blocks(read_page(ROOT / "docs" / "three-hospitals.md")):
        if block.file:
            yield f"cat > {block.file} <<'END'\n{block.text.replace('rounds = 40', 'rounds = 10')}END"
        elif block.language == "sh":
            for command in cut_commands(block.text.replace(":9092", f":{port}")):
                if re.match(r"(pip|flwr|flower-supernode) ", command):
                    continue
                yield command
                if re.match(r"fulcrum (terms|party) ", command):
                    for name in "bc":
                        yield re.sub(r"\ba(?=/|\.npz|$| )", name, command)


def test_the_page_ends_with_a_model_and_three_statements(tmp_path: Path) -> None:
    os.symlink(ROOT / "examples", tmp_path / "examples")
    running: list[tuple[str, subprocess.Popen[str]]] = []
    try:
        for command in list_commands(find_free_port()):
            process = start(command, tmp_path)
            if re.match(r"fulcrum (serve|party) ", command):
                running.append((command, process))
            else:
                finish(process, command, 300)
        assert len(running) == 4, "a coordinator and three hospitals"
        for command, process in running:
            finish(process, command, 600)
    finally:
        for _, process in running:
            process.kill()
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["accuracy"] > 0.3
    for name in "abc":
        assert "epsilon = " in (tmp_path / name / "PRIVACY.md").read_text()
