"""The Flower app bundle that SuperNodes download; Fulcrum's parties never open it."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping


def make_app_bundle(files: Mapping[str, str] | None = None) -> bytes:
    """A Flower app bundle. SuperNodes always download one; Fulcrum's parties never run it."""
    project = """[project]
name = "federation"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fulcrum"

[tool.flwr.app.components]
serverapp = "pushed:app"
clientapp = "pushed:app"
"""
    content = {"pyproject.toml": project, **(files or {})}
    sums = [f"{name},{hashlib.sha256(text.encode()).hexdigest()},{8 * len(text)}" for name, text in content.items()]
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, text in {**content, ".info/CONTENT": "\n".join(sums)}.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return held.getvalue()
