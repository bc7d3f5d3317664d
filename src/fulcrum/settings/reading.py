"""Files, keywords and command-line values -> `Settings`. Later layers override earlier ones:

    defaults  <  preset of the file's method  <  file  <  preset of --method  <  command-line values

so that `fulcrum run old.toml --method dp-sgd` changes the method and keeps the rest. Every mistake
raises a ConfigError of one sentence, with the nearest existing name or the expected type.
"""

from __future__ import annotations

import difflib
import functools
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fulcrum.errors import ConfigError
from fulcrum.settings.catalogue import SECTION_CLASSES, SHORT_NAMES, find_setting_paths, list_setting_fields
from fulcrum.settings.checks import check_settings
from fulcrum.settings.presets import find_method
from fulcrum.settings.renamed import REMOVED_PATHS, RENAMED_PATHS, translate_old_names
from fulcrum.settings.schema import Settings
from fulcrum.settings.toml import parse_toml

# Alternative settings. A layer that sets one of them removes the other from the layers below.
EXCLUSIVE_SETTINGS: dict[str, tuple[str, Any]] = {
    "privacy.epsilon": ("sigma", None),
    "privacy.sigma": ("epsilon", None),
    "train.steps": ("epochs", 0.0),
    "train.epochs": ("steps", 0),
}

EXPECTED_TYPE_TEXTS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    float | None: "a number",
    int | None: "a whole number",
    str: "text in quotes",
    bool: "true or false",
    tuple[int, ...]: "a list of whole numbers",
    tuple[float, ...]: "a list of numbers",
    tuple[str, ...]: "a list of texts in quotes",
    str | tuple[str, ...]: "text in quotes, or a list of such texts",
    dict[str, float]: "a table of names and numbers",
    dict[str, dict[str, Any]]: "sections by name, each with what it declares",
    dict[str, bool | int | float | str]: "a table of names with numbers, text, true or false",
}
GIVEN_TYPE_TEXTS: dict[type, str] = {
    int: "a whole number",
    float: "a number with a decimal point",
    str: "text",
    bool: "a truth value",
    list: "a list",
    tuple: "a list",
    dict: "a table",
}


def parse_settings(
    raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, method: str | None = None
) -> Settings:
    """Checked settings from a file's contents, values by dotted path, and a method chosen over the file's.

    raw is what TOML gives: {"method": "moo", "train": {"rounds": 50}}. overrides are
    {"clip.kappa": 0.01}. Raises ConfigError, one sentence, at the first thing wrong.
    """
    raw, words = (translate_old_names(layer, _print_note) for layer in (raw, _nest_overrides(overrides or {})))
    for layer in (raw, words):
        _check_setting_names(layer)
    chosen = words.get("method", method)
    file_method = raw.get("method", Settings.method)
    merged = _merge_layers(
        [_find_preset_sections(file_method), raw, {} if chosen is None else _find_preset_sections(chosen), words]
    )
    merged["method"] = file_method if chosen is None else chosen
    return check_settings(_validate_settings(merged))


def read_settings(path: Path | str, overrides: Mapping[str, Any] | None = None, method: str | None = None) -> Settings:
    """Checked settings from a TOML file; see `parse_settings` for the rest."""
    return parse_settings(read_settings_tables(path), overrides, method)


def read_settings_tables(path: Path | str) -> dict[str, Any]:
    """The tables of a TOML file, or ConfigError saying why it cannot be read."""
    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a settings file such as {path / 'config.toml'}.")
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `fulcrum init {path}` writes one to start from.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8, as TOML must be.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None


def settings_from_keywords(names: Mapping[str, Any], raw: Mapping[str, Any] | None = None) -> Settings:
    """Settings from keywords: short names, field names that only one section has, or whole sections.

    settings_from_keywords({"data": "mnist", "epsilon": 1.64, "kappa": 0.01, "train": {"server": "adam"}})
    """
    overrides: dict[str, Any] = {}
    for name, value in names.items():
        if name in SECTION_CLASSES and isinstance(value, Mapping):
            overrides |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            overrides[_resolve_setting_path(name)] = value
    return parse_settings(raw or {}, overrides)


def parse_assignment_option(text: str) -> tuple[str, Any]:
    """One `--set section.name=value`: the path, and the value as TOML reads it, else as text."""
    path, equals, literal = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise ConfigError(f"--set {text} is not section.name=value; write for example --set clip.kappa=0.01.")
    try:
        return path, parse_toml(f"value = {literal}")["value"]
    except tomllib.TOMLDecodeError:
        return path, literal.strip()


# --- names --------------------------------------------------------------------------------------


def _print_note(sentence: str) -> None:
    print(f"note: {sentence}", file=sys.stderr)


def _resolve_setting_path(name: str) -> str:
    paths = find_setting_paths(name) or [
        old for old in (*RENAMED_PATHS, *REMOVED_PATHS) if old.rpartition(".")[2] == name
    ]
    if not paths:
        raise ConfigError(
            _unknown_setting_error(name, [*SHORT_NAMES, *(field.name for field in list_setting_fields().values())])
        )
    if len(paths) > 1 and name not in SHORT_NAMES:
        raise ConfigError(f"{name} is a setting of several sections; write {' or '.join(paths)}.")
    return paths[0]


def _check_setting_names(layer: Mapping[str, Any]) -> None:
    """Refuse sections and fields that do not exist, naming the nearest that does."""
    top = [path for path, field in list_setting_fields().items() if not field.section]
    for section, values in layer.items():
        if section in top:
            continue
        if section not in SECTION_CLASSES:
            raise ConfigError(_unknown_setting_error(section, [*SECTION_CLASSES, *top], find_setting_paths(section)))
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{section} = {_format_value(values)} is {_describe_given_type(values)}; "
                f"it must be a section, [{section}]."
            )
        for name in values:
            path = f"{section}.{name}"
            if path not in list_setting_fields():
                here = [known for known, field in list_setting_fields().items() if field.section == section]
                raise ConfigError(_unknown_setting_error(path, here, find_setting_paths(name)))


def _unknown_setting_error(name: str, known: Iterable[str], elsewhere: Iterable[str] = ()) -> str:
    """The sentence for an unknown name: the sections that have it, else the nearest name."""
    known = list(dict.fromkeys(known))
    near = [*elsewhere, *difflib.get_close_matches(name, known, n=1)]
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}."
    return f"{name} is not a setting; {hint}"


# --- layers -------------------------------------------------------------------------------------


def _nest_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """{"clip.kappa": 1} -> {"clip": {"kappa": 1}}; a third part names an entry of a table."""
    nested: dict[str, Any] = {}
    for path, value in overrides.items():
        *parents, name = path.split(".", 2)
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{path} does not fit beside {parent} = {_format_value(place)}; give one of them.")
        place[name] = value
    return nested


def _find_preset_sections(method: Any) -> Mapping[str, Any]:
    if not isinstance(method, str):
        raise ConfigError(
            f"method = {_format_value(method)} is {_describe_given_type(method)}; it must be text in quotes."
        )
    return find_method(method).sections


def _merge_layers(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        for section in SECTION_CLASSES.keys() & layer.keys():
            target, values = merged.setdefault(section, {}), layer[section]
            for name, value in values.items():
                both = isinstance(value, Mapping) and isinstance(target.get(name), Mapping)
                target[name] = {**target[name], **value} if both else value
                rival, cleared = EXCLUSIVE_SETTINGS.get(f"{section}.{name}", ("", None))
                if rival and value and rival not in values:
                    target[rival] = cleared
    return merged


# --- types --------------------------------------------------------------------------------------


@functools.cache
def _settings_adapter() -> TypeAdapter[Settings]:
    return TypeAdapter(Settings)


def _validate_settings(merged: dict[str, Any]) -> Settings:
    # Through JSON, because only there pydantic's strict mode accepts lists as tuples and tables as
    # dataclasses; strict, because rounds = "5" and diagnostics = 1 are mistakes.
    try:
        return _settings_adapter().validate_json(json.dumps(merged, default=_to_json_value), strict=True)
    except ValidationError as error:
        place = error.errors(include_url=False)[0]["loc"]
    if len(place) < 2 or not isinstance(merged.get(str(place[0])), Mapping):
        raise ConfigError("the settings hold something that is no text, number, list or table; take it out.")
    section, name, *inner = place
    path, value = f"{section}.{name}", merged[str(section)][name]
    wanted = EXPECTED_TYPE_TEXTS[list_setting_fields()[path].kind]
    if inner and isinstance(value, Mapping | list | tuple):
        item = value.get(inner[0]) if isinstance(value, Mapping) else value[int(inner[0])]
        raise ConfigError(f"{path} holds {_format_value(item)}, {_describe_given_type(item)}; it must be {wanted}.")
    raise ConfigError(f"{path} = {_format_value(value)} is {_describe_given_type(value)}; it must be {wanted}.")


def _to_json_value(value: Any) -> Any:
    """NumPy numbers as Python numbers; paths and dates as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _format_value(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def _describe_given_type(value: Any) -> str:
    return GIVEN_TYPE_TEXTS.get(type(value), f"of type {type(value).__name__}")
