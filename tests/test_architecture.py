"""A module imports only from those above it in docs/architecture.md; the core needs torch and numpy alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fulcrum"
EDGE = [
    "privacy.statement",
    "runs",
    "study",
    "integrations",
    "flower",
    "analysis",
    "analysis.report",
    "analysis.theory",
    "analysis.audit",
    "analysis.detectors",
    "analysis.attacks",
    "cli",
]
"""From here on, modules may need more than torch and numpy; and so may the two that read settings files."""
OPTIONAL = ("settings.reading", "settings.files", "settings.writing", "gradients.stacked.kernels", "rng.kernels")
BLOCKED = ["pydantic", "typer", "rich", "sklearn", "dp_accounting", "safetensors", "tomli_w", "platformdirs", "scipy"]


def order() -> list[str]:
    """The modules of docs/architecture.md, from the top of its table to the bottom."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("## Where a line of code lives")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)/?` \|", table, flags=re.MULTILINE)


def layer(module: str, modules: list[str]) -> str:
    """The row of the table that a dotted module belongs to, the longest that fits; "" for the front door."""
    fits = [row for row in modules if module == row or module.startswith(row + ".")]
    return max(fits, key=len, default="")


def module_of(file: Path) -> str:
    """The dotted name of a file, without the package's own."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(tree: ast.AST) -> set[str]:
    """Dotted names below `fulcrum` that some code imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=module, names=aliases, level=0) if module is not None:
                names |= {f"{module}.{alias.name}" for alias in aliases}
            case ast.ImportFrom():
                raise AssertionError("a relative import hides where it points; write it out")
    return {name.removeprefix("fulcrum.") for name in names if name.startswith("fulcrum.")}


def backwards(name: str, source: str, modules: list[str]) -> set[str]:
    """What `source`, a file of row `name`, imports from rows below its own."""
    found = {layer(other, modules) for other in imported(ast.parse(source))} - {""}
    return {other for other in found if modules.index(other) > modules.index(name)}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_every_module_is_in_the_table_and_every_row_exists():
    modules = order()
    assert len(modules) == len(set(modules)) > 15
    names = {module_of(file) for file in files()} - {"", "__main__"}
    assert {name for name in names if not layer(name, modules)} == {"privacy"} & names - set(modules)
    assert {layer(name, modules) for name in names} - {""} == set(modules)


def test_few_names_at_the_top():
    top = {module_of(file).split(".")[0] for file in files()} - {"", "__main__"}
    assert len(top) <= 17, sorted(top)


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_upwards(file):
    row = layer(module_of(file), order())
    if row:
        assert backwards(row, file.read_text(encoding="utf-8"), order()) == set()


def test_a_backward_import_is_noticed():
    modules = order()
    assert backwards("settings", "from fulcrum import runs", modules) == {"runs"}
    assert backwards("settings", "def late():\n    import fulcrum.cli.run", modules) == {"cli"}
    assert backwards("clipping", "from fulcrum.training.loop import Federation", modules) == {"training"}
    assert backwards("training", "from fulcrum.clipping.rule import ClipRule", modules) == set()
    assert backwards("training", "from fulcrum.clipping.testing import check_rule", modules) == {"clipping.testing"}


def import_without(blocked: list[str], modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Import the modules in a new process in which the blocked packages cannot be imported."""
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
import importlib
for name in {modules!r}:
    importlib.import_module("fulcrum." + name)
"""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "src", timeout=120)


def test_the_core_imports_with_torch_and_numpy_alone():
    core = [name for name in order() if name not in EDGE]
    core += [module_of(file) for file in files() if layer(module_of(file), order()) in core]
    core = [name for name in core if name not in OPTIONAL]
    assert {"training", "privacy", "data", "engines"} <= set(core)
    done = import_without(BLOCKED, core)
    assert done.returncode == 0, done.stderr


def test_the_block_works():
    done = import_without(["pydantic"], ["settings.files"])
    assert done.returncode != 0
    assert "blocked: pydantic" in done.stderr


def test_import_fulcrum_is_cheap():
    code = "import sys, fulcrum; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", timeout=120).returncode == 0


# --- the tests themselves ---------------------------------------------------------------------------


def imported_test_files(source: str) -> set[str]:
    """Test files that some code imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                found |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=str() as module):
                found.add(module)
    return {name for name in found if name.rpartition(".")[2].startswith("test_")}


def test_no_test_file_imports_another():
    assert imported_test_files("def late():\n    from test_loop import play") == {"test_loop"}
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert {
        file.name: found for file in tests if (found := imported_test_files(file.read_text(encoding="utf-8")))
    } == {}


def test_names_of_test_files_are_unique_and_each_says_what_it_is_about():
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len({file.name for file in tests}) == len(tests), "folders have no __init__.py, so names must differ"
    silent = [file.name for file in tests if not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))]
    assert silent == []
