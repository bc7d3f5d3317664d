"""The notebooks run from top to bottom, and are kept without their outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks_without_outputs() -> None:
    assert len(NOTEBOOKS) >= 2
    for file in NOTEBOOKS:
        cells = json.loads(file.read_text())["cells"]
        assert not [cell for cell in cells if cell.get("outputs")], f"{file.name}: clear its outputs"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages around a kernel
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path, tmp_path: Path) -> None:
    for package in ("nbclient", "nbformat", "ipykernel", "pandas", "matplotlib"):
        pytest.importorskip(package, reason=f"notebooks need {package}")
    import nbclient
    import nbformat

    notebook = nbformat.read(file, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 2, "figures are shown"
