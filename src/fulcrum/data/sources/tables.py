"""Tables as data sources: files, databases and frames, by the [table] settings and a schema file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulcrum.data.arrays import from_arrays
from fulcrum.data.dataset import Dataset
from fulcrum.data.table.databases import refuse_password
from fulcrum.data.table.describe import complete_mapping
from fulcrum.data.table.encoding import EncodedTable, encode_table
from fulcrum.data.table.reading import find_table_ending, open_table
from fulcrum.data.table.schema import Schema
from fulcrum.data.table.texts import count_tokens
from fulcrum.errors import ConfigError, DataError
from fulcrum.settings.schema import Table, TaskSettings

CLASS_TASKS = ("classification", "binary", "multilabel")
NO_TARGET_TASKS = ("next-token",)
FILE_SETTINGS = ("schema", "test", "query")
"""Settings of [table] that say where something lies; the others make the schema."""


def make_table_dataset(
    table: Any,
    schema: Schema | Table | None = None,
    *,
    test: Any = None,
    task: TaskSettings | None = None,
    name: str = "",
    public: bool = False,
    need: Sequence[str] = ("train",),
    query: str = "",
) -> Dataset:
    """A Dataset from a table and its schema.

    table, test: a path, a database's URL, a pandas, polars or Arrow table, a dict of columns, a list of dicts, or None
    (no training records). test: public records, scored in the clear. schema: a Schema, or settings that name one. task:
    where it should not follow from the target's kind: yes-no is binary, a category classification, a number
    regression. public: whether everybody may see the records; what the schema leaves open may then be read off them.
    """
    wanted = task or TaskSettings()
    if table is not None and "train" not in need:  # a coordinator: the table holds what is evaluated on
        table, test = None, table if test is None else test
    if table is None and test is None:
        raise DataError("there are no records; give a table.")
    label = name or _name_table(table if table is not None else test)
    settings = schema if isinstance(schema, Table) else Table()
    query = query or settings.query
    notes: list[str] = []
    if isinstance(schema, Schema):
        known = schema
    else:
        given = table if table is not None else test
        known, notes = _make_schema(collect_declared(settings, given), given, query, wanted, label, public)
    if not known.reviewed and not public:
        raise ConfigError(
            f"the schema of {label} was read off data and says reviewed = false: replace what it marks as LEAKS by "
            "public knowledge, and set reviewed = true."
        )
    labelled = wanted.name not in NO_TARGET_TASKS
    if labelled and not known.targets:
        raise ConfigError(f"table.target is not set; name the column of {label} that is predicted.")
    train = None if table is None else encode_table(known, table, query=query)
    held = None if test is None else encode_table(known, test)
    found = choose_task(known, wanted)
    data = from_arrays(
        None if train is None else train.inputs(),
        None if train is None or not labelled else shape_targets(train, found),
        None if held is None else held.inputs(),
        None if held is None or not labelled else shape_targets(held, found),
        name=label,
        task=found,
        public=public,
        warnings=notes,
        **_list_owners(train, held),
    )
    told = [*(train.notes if train else ()), *(f"of the test table: {note}" for note in (held.notes if held else ()))]
    return dataclasses.replace(data, schema=known, own_notes=tuple(told))


def read_table(
    source: str,
    paths: Sequence[Path] = (),
    task: TaskSettings | None = None,
    table: Table | None = None,
    public: bool = False,
    need: Sequence[str] = ("train",),
) -> Dataset:
    """The reader of the registry: a file or a database's URL, by the [table] settings."""
    settings = table or Table()
    path = paths[0] if paths else None
    if path is None:
        refuse_password(source)
    test = _find_beside(settings.test, path, "table.test") if settings.test else None
    name = source if path is None else path.name if len(paths) == 1 else Path(source).name
    where: Any = source if path is None else list(paths) if len(paths) > 1 else str(path)
    return make_table_dataset(where, settings, test=test, task=task, name=name, public=public, need=need)


def find_schema(settings: Table, given: Any = None) -> Schema:
    """The schema that the settings name or hold, else NAME.schema.toml beside the table; ConfigError if incomplete."""
    return Schema.from_mapping(collect_declared(settings, given))


def collect_declared(settings: Table, given: Any = None) -> dict[str, Any]:
    """What is declared of a table: by a schema file (that the settings name, or beside the table), then by [table]."""
    path = Path(first) if isinstance(first := _first_of(given), str | Path) else None
    found: dict[str, Any] = {}
    if settings.schema:
        found = Schema.read(_find_beside(settings.schema, path, "table.schema")).to_mapping()
    elif path is not None and (beside := locate_schema_file(path)).is_file():
        found = Schema.read(beside).to_mapping()
    usual = Table()
    changes = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if field.name not in FILE_SETTINGS and getattr(settings, field.name) != getattr(usual, field.name)
    }
    columns = {**found.get("columns", {}), **changes.get("columns", {})}
    return {**found, **changes, "columns": columns}


def locate_schema_file(path: Path) -> Path:
    """Where the schema of a table lies if no setting names it: beside it, as NAME.schema.toml."""
    ending = find_table_ending(path.name)
    stem = path.name[: -len(ending)] if ending else path.name
    return path.with_name(f"{stem}.schema.toml")


def _make_schema(
    declared: dict[str, Any], given: Any, query: str, task: TaskSettings, label: str, public: bool
) -> tuple[Schema, list[str]]:
    """The declared schema; where the data is public, what it leaves open is read off it, with a note that says so."""
    target = declared.get("target", "")
    names = [target] if isinstance(target, str) else list(target)
    columns = declared["columns"]
    names = [name for name in names if name]
    if all(name in columns for name in names) and any(name not in names for name in columns):
        return Schema.from_mapping(declared), []
    if not public:
        if columns:
            return Schema.from_mapping(declared), []  # names the target that is not declared
        raise ConfigError(
            f"{label} is private, and its columns are not declared: write a schema ([table] in the settings, or a file "
            "for --schema; `fulcrum data describe` proposes one from public or made-up data), or say --public if "
            "everybody may see the data."
        )
    plain = Schema.from_mapping({**declared, "target": [], "columns": {}})
    source = open_table(given, plain, query)
    schema = Schema.from_mapping(complete_mapping(declared, source, task.name == "regression"))
    return schema, [
        f"The columns of {label} are not all declared, and it is public: ranges and categories were read off it. Never "
        "do this with private data."
    ]


def choose_task(schema: Schema, wanted: TaskSettings) -> TaskSettings:
    """The task's settings, with what the declared targets say of it: its name, classes and range."""
    kinds = {column.kind for column in schema.targets}
    if len(kinds) > 1:
        raise ConfigError(f"the targets are of different kinds ({', '.join(sorted(kinds))}); predict one kind only.")
    if not kinds:
        texts = schema.texts
        known = wanted.classes or (count_tokens(texts[0]) if wanted.name == "next-token" and len(texts) == 1 else 0)
        return dataclasses.replace(wanted, classes=known)
    (kind,), first = kinds, schema.targets[0]
    several = len(schema.targets) > 1
    if several and kind == "category":
        raise ConfigError("several targets must be yes-no (multilabel) or numbers (regression), not categories.")
    usual = TaskSettings()
    name = wanted.name
    if name == "auto":
        name = {"yes-no": "multilabel" if several else "binary", "category": "classification"}.get(kind, "regression")
    classes = {"yes-no": len(schema.targets) if several else 2, "category": len(first.categories)}.get(kind, 0)
    changes: dict[str, Any] = {"name": name}
    if not wanted.classes and classes and name in ("classification", "multilabel"):
        changes["classes"] = classes
    if name == "regression" and kind == "number":
        same = len({(column.low, column.high) for column in schema.targets}) == 1
        for end in ("low", "high"):
            if getattr(wanted, end) == getattr(usual, end) and same:
                changes[end] = float(getattr(first, end))
    return dataclasses.replace(wanted, **changes)


def shape_targets(table: EncodedTable, task: TaskSettings) -> Any:
    """The targets as the task wants them: whole numbers for classes, decimal ones for a regression."""
    targets = table.targets()
    if task.name == "regression":
        return targets.astype(np.float32)
    if task.name in CLASS_TASKS and targets.dtype.kind == "f":
        if not np.array_equal(targets, np.floor(targets)):
            raise DataError(
                f"the target {table.schema.target_names[0]!r} is a number, and task.name = {task.name!r} predicts "
                "classes; declare it as a category, or predict it with --task regression."
            )
        return targets.astype(np.int64)
    return targets


def _list_owners(train: EncodedTable | None, test: EncodedTable | None) -> dict[str, Any]:
    """persons and parties of the records, as `from_arrays` takes them."""
    found: dict[str, Any] = {}
    if train is not None and train.person is not None:
        found |= {"person": train.person, "person_names": train.person_names}
    if train is not None and train.party is not None:
        found |= {"party": train.party, "party_names": train.party_names}
    if test is not None and test.party is not None:
        if train is None:
            found |= {"party_test": test.party, "party_names": test.party_names}
        elif train.party is not None:
            found["party_test"] = np.array(test.party_names)[test.party]
    return found


def _find_beside(name: str, table: Path | None, setting: str) -> Path:
    """A file that a setting names: from here, else beside the table."""
    path = Path(name).expanduser()
    tried = [path] if path.is_absolute() or table is None else [path, table.parent / path]
    found = next((each for each in tried if each.is_file()), None)
    if found is None:
        places = ", ".join(dict.fromkeys(map(str, tried)))
        raise ConfigError(f"{setting} = {name!r} was not found; looked for {places}.")
    return found


def _first_of(given: Any) -> Any:
    """The first of several files, or what was given."""
    return given[0] if isinstance(given, list) and given and isinstance(given[0], Path) else given


def _name_table(given: Any) -> str:
    return Path(given).name if isinstance(given, str | Path) else "the table"
