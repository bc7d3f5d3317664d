"""Install the wheel as a new user would, and use it: python tools/smoke_wheel.py [WHEEL]

An empty environment, an empty folder and an empty home; no data set, nothing of the repository. Each command must end
with exit code 0 and print what it is expected to print. Takes about four minutes on two cores, two of them for pip.

--python     another Python to make the environment with
--torch-of   the environment whose torch (and what torch needs) is used in place of a second install; everything else is
             installed. For machines where the install of torch takes too long; the default is a true install.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"

OWN_STUDY = """\
title = "A study of my own"
datasets = ["digits"]
epsilons = [4.0]
seeds = [0]

[settings.data]
parties = 3

[settings.train]
rounds = 5
rate = 0.1

[[rows]]
name = "dp-sgd"

[[rows]]
name = "none"
"""

IMPORTS = """\
import fulcrum, pathlib, sys
where = pathlib.Path(fulcrum.__file__).resolve()
assert pathlib.Path(sys.prefix).resolve() in where.parents, f"{where} is not of the empty environment"
assert (where.parent / "py.typed").is_file()
data = fulcrum.data.load("digits")
result = fulcrum.train(data, parties=3, epsilon=4.0, rounds=5, model="linear", out="from-python")
assert result.epsilon <= 4.0, result.epsilon
assert 0.3 < result.metrics["accuracy"] <= 1, result.metrics
from fulcrum.models.pretrain import WEIGHTS_FOLDER
assert len(list(WEIGHTS_FOLDER.glob("*.npz"))) == 4, "painted weights"
from importlib import metadata
assert metadata.version("fulcrum-fl") == fulcrum.__version__
print("python", fulcrum.__version__, sorted(set(sys.modules) & {"sklearn", "pandas", "matplotlib", "optuna", "flwr"}))
"""


TORCH_FILES = """\
import re
from importlib import metadata
todo, seen, found = ["torch"], set(), set()
while todo:
    name = todo.pop()
    try:
        dist = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    if dist.name in seen:
        continue
    seen.add(dist.name)
    tops = {file.parts[0] for file in dist.files or ()}
    found |= {str(dist.locate_file(top)) for top in tops if top not in ("..", "__pycache__", "bin")}
    todo += [re.split("[^A-Za-z0-9._-]", word)[0] for word in dist.requires or () if "extra ==" not in word]
print("\\n".join(sorted(found)))
"""
"""Prints what torch and the packages that it needs have put into an environment."""


@dataclass(frozen=True)
class Step:
    """A command, and words that its output must have."""

    words: tuple[str, ...]
    expected: str


def list_steps(python: Path) -> list[Step]:
    """What a new user does first."""
    fulcrum = str(python.with_name("fulcrum"))
    return [
        Step((fulcrum, "--version"), "fulcrum "),
        Step((fulcrum, "demo", "--out", "demo"), "folder of the private run"),
        Step((fulcrum, "show", "demo/moo"), "epsilon"),
        Step((fulcrum, "report", "demo/moo", "demo/dp-sgd", "--out", "page.html"), "page.html"),
        Step((fulcrum, "plan", "--data", "digits", "--parties", "5", "--epsilon", "4"), "sigma"),
        Step(
            (fulcrum, "reproduce", "paper", "--subset", "--datasets", "digits", "--methods", "moo,none"),
            "One reduced cell of the paper's table",
        ),
        Step((fulcrum, "study", "mine", "--backend", "sequential"), "A study of my own"),
        Step((fulcrum, "study", "--help"), "no-tuning"),
        Step((fulcrum, "study", "paper", "--report-only", "--out", "empty"), "fashion-mnist"),
        Step((fulcrum, "methods"), "moo"),
        Step((str(python), "-W", "error", "-c", IMPORTS), "[]"),
    ]


def make_environment(place: Path, wheel: Path, python: str, torch_of: Path | None) -> Path:
    """An environment with the wheel and what it needs; returns its Python."""
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    inner = place / "bin" / "python"
    pip = [str(inner), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if torch_of is None:
        subprocess.run([*pip, TORCH], check=True)
    else:
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        ours = Path(_ask(inner, ask))
        for line in _ask(torch_of / "bin" / "python", TORCH_FILES).splitlines():
            if not (ours / Path(line).name).exists():
                (ours / Path(line).name).symlink_to(line)
    subprocess.run([*pip, str(wheel)], check=True)
    return inner


def _ask(python: Path, code: str) -> str:
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def run_step(step: Step, work: Path, home: Path) -> str:
    """Run a step in the empty folder; returns what is wrong, or nothing."""
    settings = {name: value for name, value in os.environ.items() if name in ("LANG", "TZ", "OMP_NUM_THREADS")}
    path = f"{Path(step.words[0]).parent}:/usr/bin:/bin"
    env = {**settings, "HOME": str(home), "PATH": path, "COLUMNS": "100"}
    done = subprocess.run(step.words, cwd=work, env=env, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        return f"exit code {done.returncode}: {said[-2000:]}"
    if step.expected not in said:
        return f"{step.expected!r} is not in the output: {said[-2000:]}"
    if str(ROOT) in said:
        return f"the output names the repository's folder {ROOT}: {said[-2000:]}"
    if "Warning" in done.stderr:
        return f"a warning leaks: {done.stderr[-2000:]}"
    return ""


def main() -> int:
    """Install, run every step, and say how long each took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="?", help="default: the newest in dist/")
    parser.add_argument("--python", default=getattr(sys, "_base_executable", sys.executable))
    parser.add_argument("--torch-of", type=Path, help="environment to take torch from")
    options = parser.parse_args()
    wheel = options.wheel or max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime, default=None)
    if wheel is None or not wheel.is_file():
        print("error: there is no wheel; run make wheel first.")
        return 2
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fulcrum-smoke-") as place:
        base = Path(place)
        work, home = base / "work", base / "home"
        home.mkdir()
        (work / "experiments").mkdir(parents=True)
        (work / "experiments" / "mine.toml").write_text(OWN_STUDY, encoding="utf-8")
        began = time.monotonic()
        python = make_environment(base / "env", wheel.resolve(), options.python, options.torch_of)
        print(f"{time.monotonic() - began:5.0f} s  install {wheel.name}", flush=True)
        for step in list_steps(python):
            began = time.monotonic()
            wrong = run_step(step, work, home)
            shown = " ".join(
                word if "\n" not in word else "..." for word in (Path(step.words[0]).name, *step.words[1:])
            )
            print(f"{time.monotonic() - began:5.0f} s  {shown}  {wrong or 'ok'}", flush=True)
            failed += bool(wrong)
    print(f"{failed} failed" if failed else "the wheel works from an empty folder in an empty environment")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
