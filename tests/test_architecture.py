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
EDGE = ["statement", "record", "methods", "settings_file", "api", "study", "flower", "cli"]
"""From here on, modules may need more than torch and numpy."""
BLOCKED = ["pydantic", "typer", "rich", "sklearn", "dp_accounting", "safetensors", "tomli_w", "platformdirs", "scipy"]


def order() -> list[str]:
    """The modules of docs/architecture.md, from the top of its table to the bottom."""
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+)/?` \|", table, flags=re.MULTILINE)


def layer(file: Path) -> str:
    """The module of the table that a file belongs to; "" for the package's own front door."""
    top = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if top in ("__init__", "__main__") else top


def imported(tree: ast.AST) -> set[str]:
    """Modules of the table that some code imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(module=module, names=aliases, level=0) if module is not None:
                names |= {f"{module}.{alias.name}" for alias in aliases}
            case ast.ImportFrom():
                raise AssertionError("a relative import hides where it points; write it out")
    return {name.split(".")[1] for name in names if name.startswith("fulcrum.")}


def backwards(name: str, source: str, modules: list[str]) -> set[str]:
    """What `source`, a file of module `name`, imports from modules below its own."""
    return {other for other in imported(ast.parse(source)) & set(modules) if modules.index(other) > modules.index(name)}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_every_module_is_in_the_table_and_every_row_exists():
    modules = order()
    assert len(modules) == len(set(modules)) > 15
    assert {layer(file) for file in files()} - {""} == set(modules)


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_upwards(file):
    if layer(file):
        assert backwards(layer(file), file.read_text(encoding="utf-8"), order()) == set()


def test_a_backward_import_is_noticed():
    modules = order()
    assert backwards("config", "from fulcrum import api", modules) == {"api"}
    assert backwards("config", "def late():\n    import fulcrum.cli.run", modules) == {"cli"}
    assert backwards("clip", "from fulcrum.federate import Federation", modules) == {"federate"}
    assert backwards("federate", "from fulcrum.clip.rule import ClipRule", modules) == set()


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
    assert {"federate", "plan", "ledger", "data", "accounting"} <= set(core)
    done = import_without(BLOCKED, core)
    assert done.returncode == 0, done.stderr


def test_the_block_works():
    done = import_without(["pydantic"], ["settings_file"])
    assert done.returncode != 0
    assert "blocked: pydantic" in done.stderr


def test_import_fulcrum_is_cheap():
    code = "import sys, fulcrum; sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", timeout=120).returncode == 0
