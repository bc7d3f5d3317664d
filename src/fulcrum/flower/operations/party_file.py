"""`fulcrum party party.toml`: everything that the command needs, in a file that a service can start from."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from fulcrum.errors import ConfigError
from fulcrum.models.checkpoints import can_be_path
from fulcrum.settings.registry import find_nearest_name
from fulcrum.settings.schema import FORBID_EXTRA_FIELDS
from fulcrum.settings.toml import parse_toml

PATHS = ("key", "ledger", "schema", "withdrawn", "ca", "terms", "home", "statement", "log")
"""Options that name a file or folder: in the file they are relative to it."""
NEEDED = ("data", "server", "key", "ledger")


@dataclass(frozen=True)
class PartyOptions:
    """The options of `fulcrum party`, with the same names; see `fulcrum party --help`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_EXTRA_FIELDS

    data: str = ""
    server: str = ""
    key: str = ""
    ledger: str = ""
    schema: str = ""
    withdrawn: str = ""
    hold_out: float = 0.0
    canaries: int = 0
    ca: str = ""
    terms: str = "terms.toml"
    home: str = ""
    statement: str = ""
    log: str = ""
    metrics: int | None = None
    until_done: bool = False
    simulation: bool = False
    insecure: bool = False
    device: str = "auto"

    def check(self) -> PartyOptions:
        """The options, or a ConfigError naming what is missing."""
        missing = [f"--{name}" for name in NEEDED if not getattr(self, name)]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} missing; give them as options, or in a file: fulcrum party party.toml."
            )
        host, _, port = self.server.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16):
            raise ConfigError(f"server = {self.server[:80]!r} is not HOST:PORT, such as fed.example.org:9092.")
        return self


def read_party_file(path: Path) -> dict[str, Any]:
    """The options in a file. Names are those of the command line, with - or _; paths are relative to the file."""
    try:
        table = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}.") from None
    given = {name.replace("-", "_"): value for name, value in table.items()}
    known = [each.name for each in dataclasses.fields(PartyOptions)]
    for name in given:
        if name not in known:
            near = find_nearest_name(name, known)
            raise ConfigError(
                f"{path}: {name} is no option of fulcrum party{f'; did you mean {near}?' if near else '.'}"
            )
    try:
        TypeAdapter(PartyOptions).validate_json(json.dumps(given, default=str), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path}: {where}: {first['msg'][0].lower()}{first['msg'][1:]}.") from None
    return {name: _place(path.parent, name, value) for name, value in given.items()}


def _place(folder: Path, name: str, value: Any) -> Any:
    """A path of the file as seen from the working folder; "-" and empty ones stay, and so does data that is no file."""
    if not isinstance(value, str) or value in ("", "-"):
        return value
    try:
        if name in PATHS or (name == "data" and can_be_path(value) and (folder / value).exists()):
            return str(folder / Path(value).expanduser())
    except (OSError, RuntimeError, ValueError) as error:  # a name too long for a file, an unknown user's home, a NUL
        raise ConfigError(f"{name} = {value[:80]!r} cannot be a file's name: {error}".splitlines()[0][:300]) from None
    return value


def merge_party_options(path: Path | None, given: dict[str, Any]) -> PartyOptions:
    """Options of the command line before those of the file; None and "" mean not given."""
    own = {name: value for name, value in given.items() if value is not None and value != "" and value is not False}
    return PartyOptions(**{**(read_party_file(path) if path else {}), **own}).check()


EXAMPLE = """\
# party.toml: what `fulcrum party party.toml` needs. Paths are relative to this file.
data = "records.npz"
server = "coordinator.example.org:9092"
key = "a"
ca = "ca.crt"
terms = "terms.toml"
ledger = "ledger.sqlite"
log = "party.jsonl"
metrics = 9465
"""
