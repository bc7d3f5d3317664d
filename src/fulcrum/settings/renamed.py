"""Old names of settings and their current names, so that files of earlier versions are still read.

Needs only the standard library: the worker of a study reads old jobs without pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fulcrum.errors import ConfigError

RENAMED_PATHS: dict[str, str] = {
    "clip.refresh": "clip.statistics_interval",
    "central.estimator": "client_level.estimator",
    "central.weight_cap": "client_level.weight_cap",
    "central.min_weight": "client_level.min_weight",
}
"""Old dotted path -> current path, such as "clip.refresh" -> "clip.statistics_interval"."""
RENAMED_VALUES: dict[str, dict[Any, Any]] = {"model.init": {"painted": "synthetic"}}
"""Current dotted path -> {old value: current value}, such as "model.init" -> {"painted": "synthetic"}."""
REMOVED_PATHS: dict[str, str] = {}
"""Old dotted path of a removed setting -> advice, as the end of a sentence."""


def translate_old_names(layer: Mapping[str, Any], say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Sections of settings with current names; `say` gets one sentence per old name."""
    result: dict[str, Any] = {}
    for path, value in _list_setting_paths(layer):
        new = RENAMED_PATHS.get(path, path)
        if path in REMOVED_PATHS:
            raise ConfigError(f"{path} is no longer a setting; {REMOVED_PATHS[path]}")
        if new != path:
            if _is_setting_given(layer, new):
                raise ConfigError(f"{path} is called {new} today, and both are given; take {path} away.")
            _report_if_asked(say, f"{path} is called {new} today")
        old_values = RENAMED_VALUES.get(new, {})
        if isinstance(value, str | int | float) and value in old_values:
            _report_if_asked(say, f"{new} = {value!r} is called {old_values[value]!r} today")
            value = old_values[value]
        _put_setting(result, new, value)
    return result


def to_original_names(layer: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings with the names of the first version; ids of stored results are computed from these."""
    old_paths = {new: old for old, new in RENAMED_PATHS.items()}
    result: dict[str, Any] = {}
    for path, value in _list_setting_paths(layer):
        old_values = {new: old for old, new in RENAMED_VALUES.get(path, {}).items()}
        known = isinstance(value, str | int | float) and value in old_values
        _put_setting(result, old_paths.get(path, path), old_values[value] if known else value)
    return result


def _list_setting_paths(layer: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every setting by dotted path; a value that is not a section, or an empty section, has its own name as path."""
    found: list[tuple[str, Any]] = []
    for section, values in layer.items():
        if isinstance(values, Mapping) and values:
            found += [(f"{section}.{name}", value) for name, value in values.items()]
        else:
            found.append((section, values))
    return found


def _is_setting_given(layer: Mapping[str, Any], path: str) -> bool:
    section, _, name = path.partition(".")
    values = layer.get(section)
    return (isinstance(values, Mapping) and name in values) if name else section in layer


def _put_setting(layer: dict[str, Any], path: str, value: Any) -> None:
    section, _, name = path.partition(".")
    if name:
        layer.setdefault(section, {})[name] = value
    else:
        layer[section] = value


def _report_if_asked(say: Callable[[str], None] | None, sentence: str) -> None:
    if say is not None:
        say(sentence)
