"""Registries: one list of names, filled by decorator, call or entry point, refusing with the nearest name."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import pytest

from fulcrum.errors import ConfigError, DataError
from fulcrum.settings.registry import Registry


def fruits(**options) -> Registry[str]:
    registry = Registry[str]("basket.fruit", noun="fruit", **options)
    registry.add("apple", "red")
    registry.add("pear", "green")
    return registry


def test_a_registry_is_a_mapping_in_the_order_of_adding():
    assert dict(fruits()) == {"apple": "red", "pear": "green"}
    assert fruits().find("pear") == "green"
    assert "plum" not in fruits()


def test_a_decorator_adds_a_function():
    registry: Registry[Callable[[], str]] = Registry("basket.fruit", noun="fruit")

    @registry.register("plum")
    def plum() -> str:
        return "blue"

    assert registry.find("plum")() == "blue"


def test_a_taken_name_is_refused():
    with pytest.raises(ConfigError, match=r"basket\.fruit: the name 'apple' is taken"):
        fruits().add("apple", "other")


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match=r"basket.fruit = 'aple' is not known; .*did you mean 'apple'\?"):
        fruits().find("aple")
    with pytest.raises(DataError, match=r"choose one of apple, pear\.$"):
        fruits(error=DataError, places=False).find("zzz")


def test_a_place_is_imported_from_the_current_folder_too(tmp_path, monkeypatch):
    (tmp_path / "own_fruit_module.py").write_text("KIWI = 'brown'\n")
    monkeypatch.chdir(tmp_path)
    assert fruits().find("own_fruit_module:KIWI") == "brown"
    with pytest.raises(ConfigError, match="did you mean 'KIWI'"):
        fruits().find("own_fruit_module:kiwi")
    with pytest.raises(ConfigError, match=r"is a str, not a builtins\.int"):
        fruits(kind=int).find("own_fruit_module:KIWI")
    with pytest.raises(ConfigError, match="module 'not_there' fails"):
        fruits().find("not_there:KIWI")


def test_an_installed_package_offers_a_value(tmp_path, monkeypatch):
    (tmp_path / "offered_fruit.py").write_text("FIG = 'purple'\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("fig", "offered_fruit:FIG", "fulcrum.fruits")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == "fulcrum.fruits" else [])
    assert fruits(entry_points="fulcrum.fruits").names() == ("apple", "pear", "fig")
    assert fruits(entry_points="fulcrum.fruits").find("fig") == "purple"
    with pytest.raises(ConfigError):
        fruits().find("fig")
