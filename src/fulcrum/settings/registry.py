"""Registries: lists of names by which users extend Fulcrum, filled by decorator, by call or by entry point.

    RULES = Registry[ClipRule]("clip.rule", entry_points="fulcrum.rules", kind=ClipRule, noun="rule")
    RULES.add("fixed", FIXED)              # built in
    RULES.find("fixed")                    # by name
    RULES.find("package.module:RULE")      # by place, importable from here or from the current folder
    RULES.find("fixd")                     # ConfigError: ... did you mean 'fixed'?

A registry imports lazily: the entry points of installed packages are listed by name, and each is imported
when its name is used.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from fulcrum.errors import ConfigError, InputError

T = TypeVar("T")
F = TypeVar("F")


def suggest_nearest_names(word: str, names: Iterable[str]) -> str:
    """The end of an error sentence: suggests the nearest of the names, or lists them all."""
    known = list(names)
    close = find_nearest_name(word, known)
    return f"did you mean {close!r}?" if close else f"choose one of {', '.join(known)}."


def find_nearest_name(word: str, names: Iterable[str]) -> str:
    """The name that a misspelt word probably means, upper and lower case alike; "" where none is near."""
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else ""


class Registry(Mapping[str, T], Generic[T]):
    """Values by name, in the order in which they were added; a read-only mapping except for `add` and `register`.

    setting: the setting that names a value ("clip.rule"), for error sentences. noun: what a value is ("rule").
    entry_points: the group under which installed packages offer values; empty: none. kind: the type that an imported
    value must have; None: any. places: whether "package.module:name" is accepted. error: what is raised for an unknown
    name.
    """

    def __init__(
        self,
        setting: str,
        *,
        noun: str,
        entry_points: str = "",
        kind: type[Any] | None = None,
        places: bool = True,
        error: type[InputError] = ConfigError,
    ) -> None:
        self.setting, self.noun, self.entry_points = setting, noun, entry_points
        self.kind, self.places, self.error = kind, places, error
        self._values: dict[str, T] = {}

    # --- filling ----------------------------------------------------------------------------------

    def add(self, name: str, value: T) -> T:
        """Add a value under a name that is not taken."""
        if name in self._values:
            raise ConfigError(f"{self.setting}: the name {name!r} is taken; give the {self.noun} another name.")
        self._values[name] = value
        return value

    def register(self, name: str) -> Callable[[F], F]:
        """A decorator that adds a function or class under a name."""

        def add(value: F) -> F:
            self.add(name, value)  # type: ignore[arg-type]
            return value

        return add

    # --- reading ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> T:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def list_entry_points(self) -> dict[str, str]:
        """What installed packages offer: name -> "package.module:attribute". Nothing is imported."""
        if not self.entry_points:
            return {}
        points = importlib.metadata.entry_points(group=self.entry_points)
        return {point.name: f"{point.module}:{point.attr}" for point in points if point.name not in self._values}

    def names(self) -> tuple[str, ...]:
        """All names that `find` accepts, including those of installed packages."""
        return (*self._values, *self.list_entry_points())

    def find(self, name: str) -> T:
        """The value of that name: added here, offered by an installed package, or "package.module:attribute".

        Raises the registry's error, one sentence with the nearest name, where there is none.
        """
        if name in self._values:
            return self._values[name]
        if self.places and ":" in name:
            return self._import_entry_point(name, name)
        offered = self.list_entry_points()
        if name in offered:
            return self._import_entry_point(offered[name], name)
        raise self.error(self.unknown(name))

    def unknown(self, name: str) -> str:
        """The sentence for a name that is not known."""
        known = self.names()
        close = find_nearest_name(name, known)
        own = f", or package.module:{self.noun.replace(' ', '_')}" if self.places else ""
        hint = f"; did you mean {close!r}?" if close else "."
        return f"{self.setting} = {name!r} is not known; choose one of {', '.join(known)}{own}{hint}"

    def _import_entry_point(self, place: str, name: str) -> T:
        value = import_named_attribute(place, f"{self.setting} = {name!r}", self.error)
        if self.kind is not None and not isinstance(value, self.kind):
            wanted = f"{self.kind.__module__}.{self.kind.__qualname__}"
            raise self.error(f"{self.setting} = {name!r} is a {type(value).__name__}, not a {wanted}.")
        return value  # type: ignore[no-any-return]


def import_named_attribute(place: str, what: str, error: type[InputError] = ConfigError) -> Any:
    """What "package.module:attribute" names, importable from here or from the current folder.

    what: the start of the error sentence, such as "model.name = 'a:b'".
    """
    module_name, _, attribute = place.partition(":")
    if not _IMPORTS_ALLOWED.get():
        raise error(f"{what} names code, and nobody here has agreed to run it yet.")
    if not module_name or not attribute.isidentifier():
        raise error(f"{what} is not of the form package.module:name.")
    with current_folder_importable():
        try:
            module = importlib.import_module(module_name)
        except Exception as problem:  # a user's module may raise any error while it is imported
            words = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
            raise error(f"{what} cannot be imported: module {module_name!r} fails ({words}).") from problem
    if not hasattr(module, attribute):
        near = suggest_nearest_names(attribute, [name for name in dir(module) if not name.startswith("_")])
        tail = f"; {near}" if near.startswith("did") else "."
        raise error(f"{what} cannot be imported: {module_name!r} has no attribute {attribute!r}{tail}")
    return getattr(module, attribute)


_IMPORTS_ALLOWED: ContextVar[bool] = ContextVar("imports_allowed", default=True)


@contextmanager
def forbid_imports() -> Iterator[None]:
    """No name of the form package.module:name is imported inside: for settings that somebody else proposes."""
    token = _IMPORTS_ALLOWED.set(False)
    try:
        yield
    finally:
        _IMPORTS_ALLOWED.reset(token)


def call_with_supported_arguments(function: Callable[..., T], offers: Mapping[str, Any]) -> T:
    """Call a user's function with those of the offers that are among its parameters."""
    try:
        accepted = inspect.signature(function).parameters
    except (ValueError, TypeError):  # built-ins without a signature
        return function()
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    return function(**{name: value for name, value in offers.items() if anything or name in accepted})


@contextmanager
def current_folder_importable() -> Iterator[None]:
    """The installed `fulcrum` command, unlike `python -m`, does not look for modules in the current folder."""
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
