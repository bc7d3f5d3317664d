"""TOML as text, with one error for everything that can be wrong with it."""

from __future__ import annotations

import tomllib
from typing import Any


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a text; `tomllib.TOMLDecodeError` for whatever is wrong.

    The standard library's reader raises other errors for numbers of thousands of digits and for deep nesting.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from None
    except ValueError as error:
        raise tomllib.TOMLDecodeError(str(error).partition(";")[0]) from None
