"""A property that is computed once per object, by several threads side by side for several objects.

`functools.cached_property` of Python 3.11 holds one lock per property for all objects: two workers would wait for each
other's norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class once_property(Generic[T]):
    """As `functools.cached_property`, without its lock: an object belongs to one thread."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> once_property[T] | T:
        if instance is None:
            return self
        found = self.compute(instance)
        instance.__dict__[self.name] = found  # from now on Python finds it there, also in frozen dataclasses
        return found
