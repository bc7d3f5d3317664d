"""What users may rely on, one line each: python tools/public_names.py [--write | --check]

Python names with their parameters, settings, methods, names in registries, and errors. The commands and their options
are in tests/cli/test_public_names.py. tests/compatibility/public-names.txt is the frozen list: a test fails when a line
of it has gone, and --check (part of make release-check) also when a line is new. --write takes the list as it is now.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FROZEN = Path(__file__).resolve().parents[1] / "tests" / "compatibility" / "public-names.txt"
MODULES = (
    "fulcrum",
    "fulcrum.data",
    "fulcrum.clipping",
    "fulcrum.runs",
    "fulcrum.integrations.parts",
)
"""Modules whose `__all__` is public."""
SHORT = {"fulcrum.integrations.parts": "fulcrum.parts"}
REGISTRIES = {
    "data source": "fulcrum.data:SOURCES",
    "task": "fulcrum.data.tasks:TASKS",
    "metric": "fulcrum.data.tasks:METRICS",
    "model": "fulcrum.models.build:MODELS",
    "clipping rule": "fulcrum.clipping:RULES",
    "server optimiser": "fulcrum.training.server:SERVERS",
    "accountant": "fulcrum.privacy.accounting:ACCOUNTANTS",
    "noise schedule": "fulcrum.privacy.schedule:SCHEDULES",
    "observer": "fulcrum.runs:OBSERVERS",
    "method": "fulcrum.settings.presets:METHODS",
}


def list_public_names() -> list[str]:
    """Every line, sorted."""
    return sorted({*_list_python_names(), *_list_settings(), *_list_registered(), *_list_errors()})


def _list_python_names() -> Iterator[str]:
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in module.__all__:
            path = f"{SHORT.get(module_name, module_name)}.{name}"
            yield f"python {path}"
            thing = getattr(module, name)
            if inspect.isfunction(thing):
                yield from (f"python {path}({parameter})" for parameter in _list_parameters(thing))
            elif inspect.isclass(thing):
                yield from (f"python {path}.{member}" for member in _list_members(thing))


def _list_parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if not name.startswith("_")]


def _list_members(kind: type) -> list[str]:
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    own = {name for base in kind.__mro__ if base.__module__.startswith("fulcrum") for name in vars(base)}
    return sorted(name for name in fields | own if not name.startswith("_"))


def _list_settings() -> Iterator[str]:
    from fulcrum.settings.catalogue import SHORT_NAMES
    from fulcrum.settings.schema import Settings

    yield from (f"setting {path} by the name {name}" for name, path in SHORT_NAMES.items())
    for section in dataclasses.fields(Settings):
        value = section.default_factory() if callable(section.default_factory) else section.default
        if dataclasses.is_dataclass(value):
            yield from (f"setting {section.name}.{field.name}" for field in dataclasses.fields(value))


def _list_registered() -> Iterator[str]:
    for what, place in REGISTRIES.items():
        module, _, name = place.partition(":")
        registry = getattr(importlib.import_module(module), name)
        names = registry.names() if hasattr(registry, "names") else list(registry)
        yield from (f"{what} {each}" for each in names)


def _list_errors() -> Iterator[str]:
    errors = importlib.import_module("fulcrum.errors")
    kinds = [thing for thing in vars(errors).values() if inspect.isclass(thing) and thing.__module__ == errors.__name__]
    yield from (f"error {kind.__name__} is a {kind.__bases__[0].__name__}" for kind in kinds)


def compare_with_frozen(frozen: Path = FROZEN) -> tuple[list[str], list[str]]:
    """(lines that have gone, lines that are new)."""
    now, then = set(list_public_names()), set(frozen.read_text(encoding="utf-8").splitlines())
    return sorted(then - now), sorted(now - then)


def main() -> int:
    """Print, write or check the list."""
    if "--write" in sys.argv:
        FROZEN.write_text("\n".join(list_public_names()) + "\n", encoding="utf-8")
    elif "--check" in sys.argv:
        gone, new = compare_with_frozen()
        print("\n".join([*(f"gone: {line}" for line in gone), *(f"new: {line}" for line in new)]) or "no change")
        return 1 if gone or new else 0
    else:
        print("\n".join(list_public_names()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
