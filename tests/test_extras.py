"""A missing package is one sentence with the extra that brings it, and Windows is one sentence, too."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import fulcrum
from fulcrum.cli import main
from fulcrum.errors import FulcrumError, InputError

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def need_flower() -> None:
    from fulcrum.cli.flower import require_flower

    require_flower()


def need_table() -> None:
    from fulcrum.data.table.columnar import require_pyarrow

    require_pyarrow("patients.parquet")


def need_sql() -> None:
    from fulcrum.data.table.databases import _open_sqlalchemy

    _open_sqlalchemy("postgresql://", "the database")


def need_images() -> None:
    from fulcrum.data.sources.images import require_pillow

    require_pillow()


def need_text() -> None:
    from fulcrum.data.table.texts import _read_tokenizer

    _read_tokenizer("tokenizer.json", -1)


def need_figures() -> None:
    from fulcrum.analysis.report.figures import import_matplotlib

    import_matplotlib()


def need_frame() -> None:
    from fulcrum.runs.notebook import lines_to_frame

    lines_to_frame([])


def need_tuner() -> None:
    from fulcrum.study.proposals import import_optuna

    import_optuna()


def need_tracker(name: str) -> Callable[[], None]:
    def need() -> None:
        from fulcrum.runs.trackers.packages import import_tracker

        import_tracker(name, name, name)

    return need


def need_model(module: str) -> Callable[[], None]:
    def need() -> None:
        from fulcrum.models.imported import import_library

        import_library(module, f"{module}:net")

    return need


def need_onnx() -> None:
    from fulcrum.runs.export import write_onnx

    write_onnx(None, None, Path("never"))  # type: ignore[arg-type]  # it ends before it looks at them


ENTRY_POINTS: dict[str, tuple[str, Callable[[], None]]] = {
    "flwr": ("flower", need_flower),
    "pyarrow": ("tables", need_table),
    "sqlalchemy": ("sql", need_sql),
    "PIL": ("images", need_images),
    "tokenizers": ("text", need_text),
    "matplotlib": ("figures", need_figures),
    "pandas": ("figures", need_frame),
    "optuna": ("tune", need_tuner),
    "tensorboard": ("track", need_tracker("tensorboard")),
    "mlflow": ("track", need_tracker("mlflow")),
    "wandb": ("track", need_tracker("wandb")),
    "transformers": ("transformers", need_model("transformers")),
    "timm": ("timm", need_model("timm")),
    "torchvision": ("torchvision", need_model("torchvision")),
    "onnx": ("onnx", need_onnx),
}
WITHOUT_A_CALL = {"dev", "docs", "notebooks", "gpu", "peft"}
"""Extras that no command asks for: tools, an old name, kernels that are used where they are, modules handed over."""


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_a_missing_package_is_one_sentence_with_the_extra_that_brings_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, need = ENTRY_POINTS[module]
    assert extra in EXTRAS

    def find_nothing(name: str, package: str | None = None) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name) if name == module else AssertionError(name)

    monkeypatch.setitem(sys.modules, module, None)
    if module == "flwr":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    if module in ("transformers", "timm", "torchvision"):  # their errors are told apart by the module's name
        monkeypatch.setattr("importlib.import_module", find_nothing)
    with pytest.raises(FulcrumError) as refused:
        need()
    sentence = str(refused.value)
    assert f"pip install 'fulcrum-fl[{extra}]'" in sentence
    assert "\n" not in sentence


def test_every_extra_is_named_by_a_sentence() -> None:
    named = {extra for extra, _ in ENTRY_POINTS.values()}
    assert {"flower", "tables", "text", "figures", "track", "tune", "gpu"} <= set(EXTRAS), "the promised names"
    assert set(EXTRAS) - WITHOUT_A_CALL == named


def test_the_core_has_no_heavy_dependency() -> None:
    """A new dependency is a decision: it belongs in an extra, or in this list with its reason in pyproject.toml."""
    names = {word.partition(">")[0].partition("=")[0] for word in PROJECT["dependencies"]}
    assert names == {
        *("torch", "numpy", "cryptography", "dp-accounting", "pydantic", "typer", "rich", "safetensors", "tomli-w")
    }


def test_windows_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["demo"]) == 2
    assert "WSL 2" in capsys.readouterr().err
    assert main(["--version"]) == 0
    with pytest.raises(InputError, match="WSL 2"):
        fulcrum.train  # noqa: B018


def test_the_command_line_starts_without_the_modules_that_windows_lacks() -> None:
    """So that the sentence above is reached there at all."""
    code = (
        "import sys\n"
        "for name in ('fcntl', 'resource', 'termios', 'tty', 'pty', 'grp', 'pwd'): sys.modules[name] = None\n"
        "import fulcrum.cli\n"
        "sys.platform = 'win32'\n"
        "sys.exit(fulcrum.cli.main(['demo']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: Fulcrum runs on Linux and macOS")
