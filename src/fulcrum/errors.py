"""Every error Fulcrum raises on purpose, in one tree.

    FulcrumError
    ├── InputError            what the user gave is wrong; the command line exits with 2
    │   ├── ConfigError       a setting: names the field and what would be right
    │   ├── DataError         a data file or array
    │   ├── ModelError        a model that cannot be trained privately
    │   └── RunError          a run's folder: missing, taken, damaged
    ├── BudgetError           a party's ledger refuses; nothing was released
    └── DownloadError         no mirror delivered the right bytes

The message of each is one sentence that a user can act on; no traceback is shown for them
unless `--debug` asks for it.
"""

from __future__ import annotations

import re

LONG_WORD = re.compile(r"\S{300,}")
"""A word that nobody reads to its end: a number of thousands of digits, a name that is a file's content."""
MAX_CHARACTERS = 1500
"""Characters of the longest message that is shown whole: one that quotes a damaged file may be as long as the file."""


class UserNote(UserWarning):
    """A note to whoever holds the data, as a warning: nothing stores it. The command line prints it as a sentence."""


class FulcrumError(Exception):
    """Base of all errors that Fulcrum raises on purpose."""

    def __str__(self) -> str:
        words = LONG_WORD.sub(lambda word: f"{word[0][:80]}[...]{word[0][-20:]}", super().__str__())
        return words if len(words) <= MAX_CHARACTERS else f"{words[:1000]} [...] {words[-300:]}"


class InputError(FulcrumError):
    """What the user gave is wrong. The message names the field and what would be right."""


class ConfigError(InputError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another one."""


class DataError(InputError):
    """A data file is missing, corrupt, of the wrong shape, or holds impossible values."""


class ModelError(InputError):
    """A model cannot be trained with a bound per example (BatchNorm, no parameters, wrong shape)."""


class RunError(InputError):
    """A run's folder is missing, already taken, or damaged."""


class BudgetError(FulcrumError):
    """A party's privacy budget would be passed. Nothing was released."""


class DownloadError(FulcrumError):
    """No mirror delivered the file with the right checksum."""
