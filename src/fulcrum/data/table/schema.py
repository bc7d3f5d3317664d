"""A table's schema: which column is what, declared beforehand. The same schema encodes training and prediction tables.

schema = Schema.from_toml(Path("patients.schema.toml").read_text())
x = schema.encode(frame)                 # [n, schema.width] float32; a file's path, frame, or list of dicts
schema.decode_target(predictions)        # ["yes", "no", ...], or numbers
schema.to_toml()
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulcrum.data.table.cells import MISSING_WORDS, to_text
from fulcrum.data.table.dates import ISO
from fulcrum.data.table.kinds import KINDS, NO_WORDS, YES_WORDS
from fulcrum.data.table.texts import TEXT_KIND
from fulcrum.data.table.toml import format_key, format_literal
from fulcrum.errors import ConfigError
from fulcrum.settings.registry import suggest_nearest_names
from fulcrum.settings.toml import parse_toml

if TYPE_CHECKING:
    from torch import Tensor


KINDS.add("text", TEXT_KIND)
MISSING_CHOICES = {True: "column", False: "refuse"}
"""What `missing` may be written as, beside its words: refuse, column, middle."""
COMMON_FIELDS = ("kind", "source", "missing", "missing_values")
"""What a column of any kind may declare."""
UNLABELLED = ("refuse", "drop")
SCHEMA_FILE = "schema.toml"
"""The schema of the table that a model was trained on, in the run's folder."""
TARGET_KINDS = ("number", "category", "yes-no")
"""Kinds that can be predicted."""


@dataclass(frozen=True)
class Column:
    """One declared column. name: of the numbers that it becomes. source: the table's own column, where it has another
    name. kind: see `kinds.KINDS`, which lists what each declares.

    missing: what an empty cell becomes. "refuse": an error; "column": a number of its own that is 1 where the cell is
    empty; "middle": the middle of the range, or "other". missing_values: texts that mean empty in this column alone.
    """

    name: str
    kind: str = "number"
    source: str = ""
    missing: str = "refuse"
    missing_values: tuple[str, ...] = ()
    low: Any = None
    high: Any = None
    center: float | None = None
    spread: float | None = None
    log: bool = False
    cuts: tuple[float, ...] = ()
    categories: tuple[str, ...] = ()
    buckets: int = 0
    yes: tuple[str, ...] = ()
    no: tuple[str, ...] = ()
    format: tuple[str, ...] = (ISO,)
    becomes: tuple[str, ...] = ("place",)
    tokenizer: str = ""
    length: int = 0
    vocabulary: int = 0
    form: str = "ids"

    @property
    def place(self) -> str:
        """The table's own name of this column."""
        return self.source or self.name

    @property
    def parts(self) -> list[str]:
        """The name of each number that a cell becomes."""
        names = KINDS.find(self.kind).parts(self)
        return [*names, f"{self.name}=missing"] if self.missing == "column" else names

    @property
    def is_text(self) -> bool:
        """Whether it becomes token ids, an input of its own."""
        return self.kind == "text" and self.form == "ids" and not self.buckets


@dataclass(frozen=True)
class Schema:
    """A table's columns and how its cells are written. columns: the model's inputs, in order. targets: what is
    predicted. person, party, record: columns that say whose a record is, who holds it, and which it is (each value of
    `record` once); "auto": a conventional name, if the table has one; "none": no such column. ignore: other columns
    that may be there; ["*"]: any. unlabelled: what becomes of a record without a target, "refuse" or "drop". reviewed:
    False where it was read off data and nobody has checked it (`fulcrum data describe`); private training refuses."""

    columns: tuple[Column, ...] = ()
    targets: tuple[Column, ...] = ()
    person: str = "auto"
    party: str = "auto"
    record: str = "none"
    ignore: tuple[str, ...] = ()
    delimiter: str = ""
    encoding: str = "utf-8"
    decimal: str = "."
    thousands: str = ""
    missing_values: tuple[str, ...] = ()
    unlabelled: str = "refuse"
    reviewed: bool = True

    # --- what the model sees --------------------------------------------------------------------

    @property
    def numbers(self) -> tuple[Column, ...]:
        """The columns that become numbers: all but text."""
        return tuple(column for column in self.columns if not column.is_text)

    @property
    def texts(self) -> tuple[Column, ...]:
        """The columns that become token ids."""
        return tuple(column for column in self.columns if column.is_text)

    @property
    def input_names(self) -> list[str]:
        """The name of each number of a record's input."""
        return [part for column in self.numbers for part in column.parts]

    @property
    def width(self) -> int:
        """Numbers per record."""
        return len(self.input_names)

    @property
    def target_names(self) -> list[str]:
        """The names of what is predicted."""
        return [column.name for column in self.targets]

    def encode(self, rows: Any, *, others: bool = True) -> Any:
        """The model's inputs of a table: [n, width] float32, or several by name where the schema has text.

        rows: a path, a pandas, polars or Arrow table, a dict of columns, or a list of dicts. others: whether columns
        that the schema does not name may be there. Raises DataError, one sentence that never holds a cell's value.
        """
        from fulcrum.data.table.encoding import encode_table

        return encode_table(self, rows, targets=False, others=others).inputs()

    def encode_target(self, rows: Any) -> Tensor:
        """The targets of a table: [n], or [n, k] for several; classes as numbers 0, 1, ..."""
        import torch

        from fulcrum.data.table.encoding import encode_table

        return torch.from_numpy(encode_table(self, rows, others=True).targets())

    def decode_target(self, predictions: Any) -> list[Any]:
        """Predictions of the task (`Task.predict`) in the table's own words: categories, yes or no, numbers."""
        from fulcrum.data.table.encoding import decode_targets

        return decode_targets(self, predictions)

    # --- files ----------------------------------------------------------------------------------

    def to_mapping(self) -> dict[str, Any]:
        """As nested dicts of plain values, without what has its default: the [table] section of settings."""
        usual = Schema()
        found: dict[str, Any] = {}
        if self.targets:
            names = self.target_names
            found["target"] = names[0] if len(names) == 1 else names
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("columns", "targets") and value != getattr(usual, field.name):
                found[field.name] = list(value) if isinstance(value, tuple) else value
        found["columns"] = {column.name: _column_to_mapping(column) for column in (*self.columns, *self.targets)}
        return found

    def to_toml(self, comments: Mapping[str, str] | None = None) -> str:
        """The schema as a file that a person can read and change; comments: by column, set above it."""
        found = self.to_mapping()
        columns = found.pop("columns")
        lines = [f"{format_key(name)} = {format_literal(value)}" for name, value in found.items()]
        for name, values in columns.items():
            said = (comments or {}).get(name, "")
            lines += ["", *(f"# {line}" for line in said.splitlines()), f"[columns.{format_key(name)}]"]
            lines += [f"{format_key(field)} = {format_literal(value)}" for field, value in values.items()]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_toml(text: str, where: str = "the schema") -> Schema:
        """The schema in a file's text; ConfigError names the column and what would be right."""
        try:
            found = parse_toml(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{where} is not valid TOML: {error}.") from None
        whole = set(found) == {"table"} and isinstance(found["table"], Mapping)  # a [table] section on its own
        return Schema.from_mapping(found["table"] if whole else found, where)

    @staticmethod
    def read(path: Path | str) -> Schema:
        """The schema in a file."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigError(f"schema {path} is not text in UTF-8, as TOML must be.") from None
        except OSError as error:
            raise ConfigError(f"schema {path} cannot be read: {error.strerror or error}.") from None
        schema = Schema.from_toml(text, str(path))
        return schema.with_folder(Path(path).parent)

    @staticmethod
    def from_mapping(found: Mapping[str, Any], where: str = "table") -> Schema:
        """The schema in nested dicts, as a file or [table] holds it."""
        if "ignored" in found and "ignore" not in found:
            found = {**{name: value for name, value in found.items() if name != "ignored"}, "ignore": found["ignored"]}
        known = [field.name for field in dataclasses.fields(Schema) if field.name != "targets"] + ["target"]
        for name in found:
            if name not in known:
                raise ConfigError(f"{where}: {name!r} is not known; {suggest_nearest_names(name, known)}")
        target = found.get("target", ())
        if not isinstance(target, str) and not (
            isinstance(target, list | tuple) and all(isinstance(name, str) for name in target)
        ):
            raise ConfigError(f"{where}: target must be the name of a column, or a list of names.")
        names = ([target] if target else []) if isinstance(target, str) else list(target)
        declared = found.get("columns", {})
        if not isinstance(declared, Mapping) or not all(isinstance(value, Mapping) for value in declared.values()):
            raise ConfigError(f"{where}: columns must be sections, one per column, such as [columns.age].")
        columns = {name: _parse_column(name, values, where) for name, values in declared.items()}
        missing = [name for name in names if name not in columns]
        if missing:
            raise ConfigError(
                f"{where}: target {missing[0]!r} is not declared; say its kind in [columns.{format_key(missing[0])}], "
                'such as "yes-no", or "category" with its categories.'
            )
        plain = {
            name: _parse_field(name, value, where) for name, value in found.items() if name not in ("columns", "target")
        }
        left_out = plain.get("ignore", ())  # goes before a declaration: a file's column can be taken out in one place
        schema = Schema(
            columns=tuple(
                column for name, column in columns.items() if name not in names and column.place not in left_out
            ),
            targets=tuple(columns[name] for name in names),
            **plain,
        )
        return _check_schema(schema, where)

    def with_folder(self, folder: Path) -> Schema:
        """The schema with the paths of tokenizer files read from a folder, where they lie there."""

        def placed(column: Column) -> Column:
            file = folder / column.tokenizer if column.tokenizer else None
            return dataclasses.replace(column, tokenizer=str(file)) if file is not None and file.is_file() else column

        return dataclasses.replace(self, columns=tuple(placed(column) for column in self.columns))

    def pack(self) -> dict[str, bytes]:
        """The files that keep the schema with a model: schema.toml, and the tokenizer files that it names."""
        files: dict[str, bytes] = {}
        columns = []
        for column in self.columns:
            if column.tokenizer:
                name = f"tokenizer-{len(files)}.json"
                try:
                    files[name] = Path(column.tokenizer).expanduser().read_bytes()
                except OSError as error:
                    raise ConfigError(
                        f"the tokenizer {column.tokenizer} cannot be read: {error.strerror or error}."
                    ) from None
                column = dataclasses.replace(column, tokenizer=name)
            columns.append(column)
        return {SCHEMA_FILE: dataclasses.replace(self, columns=tuple(columns)).to_toml().encode(), **files}


# --- reading ------------------------------------------------------------------------------------

TEXT_LISTS = ("missing_values", "categories", "yes", "no", "format", "becomes", "ignore")
NUMBER_LISTS = ("cuts",)


def _parse_column(name: str, given: Mapping[str, Any], where: str) -> Column:
    kind = given.get("kind", "number")
    found = KINDS.find(kind) if isinstance(kind, str) and kind in KINDS.names() else None
    if found is None:
        near = suggest_nearest_names(str(kind), KINDS.names())
        raise ConfigError(f"{where}: column {name!r} has the unknown kind {kind!r}; {near}")
    known = (*COMMON_FIELDS, *found.fields)
    for field in given:
        if field not in known:
            near = suggest_nearest_names(field, known)
            raise ConfigError(f"{where}: column {name!r} declares {field!r}, which a {kind} has not; {near}")
    column = Column(name, **{field: _parse_field(field, value, where, name) for field, value in given.items()})
    try:
        found.check(column)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return column


def _parse_field(field: str, value: Any, where: str, column: str = "") -> Any:
    """A value of the schema with its type; ConfigError where it has another."""
    whose = f"{where}: column {column!r}: {field}" if column else f"{where}: {field}"
    if field == "missing":
        value = MISSING_CHOICES.get(value, value) if isinstance(value, bool) else value
        if value not in ("refuse", "column", "middle"):
            raise ConfigError(f'{whose} = {value!r} must be "refuse", "column" or "middle".')
        return value
    if field in TEXT_LISTS:
        many = [value] if isinstance(value, str) else value
        if not isinstance(many, list | tuple) or not all(isinstance(each, str | int | float) for each in many):
            raise ConfigError(f"{whose} must be a list of texts.")
        return tuple(each if isinstance(each, str) else to_text(each) for each in many)
    if field in NUMBER_LISTS:
        if not isinstance(value, list | tuple) or not all(_is_number(each) for each in value):
            raise ConfigError(f"{whose} must be a list of numbers.")
        return tuple(float(each) for each in value)
    if field in ("low", "high"):
        return value if isinstance(value, str) or _is_number(value) else str(value)  # dates of TOML, as text
    usual = getattr(Column("") if column else Schema(), field)
    wanted = bool if isinstance(usual, bool) else str if isinstance(usual, str) else (int, float)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        kinds = {bool: "true or false", str: "text in quotes"}
        raise ConfigError(f"{whose} = {value!r} must be {kinds.get(wanted, 'a number')}.")  # type: ignore[arg-type]
    if isinstance(usual, int) and wanted == (int, float) and not isinstance(value, int):
        raise ConfigError(f"{whose} = {value!r} must be a whole number.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{whose} = {value!r} must be a finite number.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > 1e300


def _check_schema(schema: Schema, where: str) -> Schema:
    for name, value, allowed in (("unlabelled", schema.unlabelled, UNLABELLED),):
        if value not in allowed:
            raise ConfigError(f"{where}: {name} = {value!r} must be one of {', '.join(allowed)}.")
    if len(schema.delimiter) > 1:
        raise ConfigError(f"{where}: delimiter = {schema.delimiter!r} must be one character.")
    if schema.decimal not in (".", ",") or schema.thousands == schema.decimal:
        raise ConfigError(
            f"{where}: decimal = {schema.decimal!r} must be '.' or ',', and thousands = {schema.thousands!r} another "
            "character or empty."
        )
    for column in schema.targets:
        if column.kind not in TARGET_KINDS or column.buckets or column.cuts:
            what = "in buckets or intervals" if column.buckets or column.cuts else f"of kind {column.kind!r}"
            raise ConfigError(
                f"{where}: target {column.name!r} {what} cannot be predicted; declare a number with low and high, a "
                "category with its categories, or yes-no."
            )
    roles = {role: name for role, name in list_role_columns(schema).items() if name not in ("auto", "none")}
    for role, name in roles.items():
        if name in {column.place for column in (*schema.columns, *schema.targets)}:
            raise ConfigError(
                f"{where}: {role} = {name!r} is also declared as a column to learn from; leave out one of them."
            )
    return schema


def list_role_columns(schema: Schema) -> dict[str, str]:
    """The columns that say whose a record is, who holds it, and which it is."""
    return {"person": schema.person, "party": schema.party, "record": schema.record}


def get_missing_words(schema: Schema, column: Column | None = None) -> frozenset[str]:
    """The texts, in lower case, that mean an empty cell."""
    own = column.missing_values if column is not None else ()
    return frozenset((*(word.lower() for word in (*schema.missing_values, *own)), *MISSING_WORDS))


def get_answer_words(column: Column) -> tuple[str, str]:
    """The words for no and yes of a column."""
    return (column.no or NO_WORDS)[0], (column.yes or YES_WORDS)[0]


# --- writing ------------------------------------------------------------------------------------


def _column_to_mapping(column: Column) -> dict[str, Any]:
    usual = Column("")
    fields = ("kind", "source", *KINDS.find(column.kind).fields, "missing", "missing_values")
    found = {name: getattr(column, name) for name in fields}
    kept = {name: value for name, value in found.items() if name == "kind" or value != getattr(usual, name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}


def list_places(columns: Iterable[Column]) -> Sequence[str]:
    """The table's own names of these columns, each once."""
    return list(dict.fromkeys(column.place for column in columns))
