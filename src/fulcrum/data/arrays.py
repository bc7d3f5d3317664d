"""From arrays to a Dataset: the checks that every array passes before it becomes one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulcrum.data.dataset import Dataset, compute_dataset_fingerprint
from fulcrum.data.records import ModelInputs, Records, count_examples
from fulcrum.data.tasks import Task, make_task, shift_tokens
from fulcrum.data.tasks.arrays import DTYPE_KIND_NAMES, AnyArray, to_numpy_array
from fulcrum.errors import ConfigError, DataError
from fulcrum.settings.schema import TaskSettings


def from_arrays(
    x: Any = None,
    y: Any = None,
    x_test: Any = None,
    y_test: Any = None,
    *,
    person: Any = None,
    party: Any = None,
    party_test: Any = None,
    name: str = "arrays",
    classes: int | None = None,
    task: Task | TaskSettings | str | None = None,
    party_names: Sequence[str] = (),
    person_names: Sequence[str] = (),
    warnings: Sequence[str] = (),
    public: bool = False,
) -> Dataset:
    """Check arrays (NumPy, torch or nested lists) and make a Dataset from them.

    x [n, ...]: finite numbers, or a dict of such arrays for several inputs; integers stay integers. y [n, ...]: targets
    of the task. x_test, y_test: the same for the public test set, where there is one; party_test names the party of
    each test record. person [n]: integers or text, one per record. party [n]: integers or text that name the party
    of each record; with party_names, indices into it. task: a name ("classification", "regression", ...), settings, or
    a Task; by default classification. classes: the number of classes; where it is missing, the largest public label
    plus one. public: whether everybody may see these records; by default they are private, and then nothing is read
    off y: declare classes, or hand over y_test, which counts as public. person_names: text ids that person indexes.
    Values are not scaled: scale them beforehand, by public constants. A DataError names the array and the expected
    form.
    """
    notes = list(warnings)
    settings = task if isinstance(task, TaskSettings) else TaskSettings(name=task if isinstance(task, str) else "auto")
    if classes is not None and settings.name != "regression":  # for regression this is the number of outputs
        if classes < 2 and settings.name in ("auto", "classification"):
            raise DataError(f"classes = {classes}; at least 2 are needed.")
        settings = dataclasses.replace(settings, classes=settings.classes or classes)
    if x is None and x_test is None and y is None and y_test is None:
        raise DataError("there are no records; give x and y, or x_test and y_test.")
    tokens = settings.name in ("tokens", "next-token")
    inputs, inputs_test = (
        None if value is None else check_inputs(which, value, notes, tokens)
        for which, value in (("x", x), ("x_test", x_test))
    )
    if settings.name == "next-token":
        for which, own in (("x", inputs), ("x_test", inputs_test)):
            if own is not None and settings.classes:
                _check_tokens(which, _get_token_input(own), settings.classes)
        y = shift_tokens(_get_token_input(inputs), settings.ignored) if y is None and inputs is not None else y
        y_test = (
            shift_tokens(_get_token_input(inputs_test), settings.ignored)
            if y_test is None and inputs_test is not None
            else y_test
        )
    for which, value, other in (("y", y, inputs), ("y_test", y_test, inputs_test)):
        if (value is None) != (other is None):
            missing = which if value is None else which.replace("y", "x")
            raise DataError(f"{missing} is missing; records need both inputs and targets.")
    inferred = ""
    if isinstance(task, Task):
        made = task
    else:
        made, inferred = _make_declared_task(settings, y, y_test, public)
    train = None if inputs is None else _make_records("y", inputs, y, made)
    test = None if inputs_test is None else _make_records("y_test", inputs_test, y_test, made)
    if train is not None and test is not None and train.shape != test.shape:
        raise DataError(
            f"x has records of shape {_format_shape(train.shape)} but x_test of {_format_shape(test.shape)}; "
            "they must be the same."
        )
    for which, value, records in (("person", person, train), ("party", party, train), ("party_test", party_test, test)):
        if value is not None and records is None:
            raise DataError(f"{which} is given without the records it belongs to; add them, or leave it out.")
    names = tuple(party_names)
    persons = tuple(person_names)
    if train is not None and person is not None:
        codes, values = _encode_ids("person", person, len(train))
        if values.dtype.kind in "US":
            persons = tuple(str(value) for value in values)
        elif persons and (int(codes.min()) < 0 or int(codes.max()) >= len(persons)):
            raise DataError(f"person must hold indices 0..{len(persons) - 1} into person_names.")
        train = dataclasses.replace(train, person=codes)
    if train is not None and party is not None:
        parties, names = _check_parties(party, len(train), names)
        train = dataclasses.replace(train, party=parties)
    elif names and train is not None and party_test is None:
        raise DataError("party_names is given without party; add the party of each record.")
    if test is not None and party_test is not None:
        of_test, names = _check_test_parties(party_test, len(test), names)
        test = dataclasses.replace(test, party=of_test)
    declared = None if isinstance(task, Task) else settings
    data = Dataset(
        name,
        made,
        train,
        test,
        names,
        (*notes, *made.notes),
        task_settings=declared,
        public=public,
        person_names=persons,
        inferred=inferred,
    )
    return dataclasses.replace(data, fingerprint=compute_dataset_fingerprint(data))


def recheck_dataset(data: Dataset, name: str, task: TaskSettings | None = None) -> Dataset:
    """A Dataset from user code, checked like arrays; task: settings that change the data's own task."""
    train, test = data.train, data.test
    chosen = apply_task_settings(data, task or TaskSettings())
    made = from_arrays(
        train.x if train else None,
        train.y if train else None,
        test.x if test else None,
        test.y if test else None,
        person=train.person if train else None,
        party=train.party if train else None,
        party_test=test.party if test else None,
        name=data.name or name,
        task=chosen,
        party_names=data.party_names,
        person_names=data.person_names,
        warnings=tuple(note for note in data.warnings if note not in data.task.notes),
        public=data.public,
    )
    made = dataclasses.replace(made, schema=data.schema, own_notes=data.own_notes)
    if isinstance(chosen, TaskSettings):
        return made
    return dataclasses.replace(made, task_settings=data.task_settings, inferred=data.inferred)


def apply_task_settings(data: Dataset, wanted: TaskSettings) -> Task | TaskSettings:
    """The data set's task under these settings: another task, or its own with single settings changed."""
    if wanted == TaskSettings():
        return data.task
    declared = data.task_settings
    if wanted.name not in ("auto", data.task.name):
        return wanted
    defaults = dataclasses.asdict(TaskSettings())
    changed = {field: value for field, value in dataclasses.asdict(wanted).items() if value != defaults[field]}
    if declared is not None:
        return dataclasses.replace(declared, **changed)
    if wanted.name == "auto":
        raise ConfigError(
            f"task.{next(iter(changed))} is set, but {data.name} brings a task of its own, {data.task.name!r}; change "
            "it there, or set task.name too."
        )
    return wanted


def _make_declared_task(settings: TaskSettings, y: Any, y_test: Any, public: bool) -> tuple[Task, str]:
    """The task, and what of it was read off private targets for lack of a declaration ("" for nothing).

    A task is made of public targets. Of private ones it gets the shape, with zeros in place of their values: one label
    more or less must not change the number of classes that everybody sees.
    """
    targets = [to_numpy_array(which, value) for which, value in (("y", y), ("y_test", y_test)) if value is not None]
    if public or y is None:
        return make_task(settings, targets), ""
    if settings.name in CLASS_COUNTING_TASKS and not settings.classes:
        if y_test is not None:
            return make_task(settings, targets[1:]), ""
        made = make_task(settings, targets)
        return made, f"the number of {CLASS_COUNTING_TASKS[settings.name]} ({made.outputs})"
    if settings.name == "auto" or settings.name in CLASS_COUNTING_TASKS:
        return make_task(settings, targets), ""
    return make_task(settings, [np.zeros_like(targets[0]), *targets[1:]]), ""


CLASS_COUNTING_TASKS = {"auto": "classes", "classification": "classes", "tokens": "tokens", "next-token": "tokens"}
"""Tasks that count what their targets show where `task.classes` does not declare it, and what they count."""


def _make_records(name: str, inputs: ModelInputs, targets: Any, task: Task) -> Records:
    """Records from inputs and targets; the task checks the targets, and their numbers must be equal."""
    checked = task.check_targets(name, targets)
    if len(checked) != count_examples(inputs):
        other = name.replace("y", "x")
        raise DataError(
            f"{name} has {len(checked)} entries but {other} has {count_examples(inputs)} records; they must be equally "
            "many."
        )
    return Records(inputs, checked)


def _check_tokens(which: str, tokens: Tensor, vocabulary: int) -> None:
    """DataError where an input token lies outside the vocabulary: found here, it costs no budget."""
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocabulary:
        bad = most if most >= vocabulary else least
        raise DataError(
            f"{which} holds token {bad}; with task.classes = {vocabulary} they must lie in 0..{vocabulary - 1}."
        )


def _get_token_input(inputs: ModelInputs | None) -> Tensor:
    """The one input of a next-token task."""
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.is_floating_point():
        raise DataError("task.name = 'next-token' needs x of shape [n, length] with token numbers.")
    return inputs


# --- checks of single arrays ------------------------------------------------------------------

TOKEN_DTYPES = (np.int32, np.int64, np.uint32, np.uint64)
"""Types that stay integers: token ids. Smaller integer types become numbers, such as bytes of images."""


def check_inputs(name: str, value: Any, notes: list[str], tokens: bool = False) -> ModelInputs:
    """Inputs as tensors: one array [n, ...], or a dict of them with equally many records each."""
    if not isinstance(value, Mapping):
        return _check_feature_array(name, value, notes, tokens)
    if not value:
        raise DataError(f"{name} is an empty dict; it must hold at least one named array.")
    found = {
        str(key): _check_feature_array(f"{name}[{key!r}]", part, notes, tokens, least_dims=1)
        for key, part in value.items()
    }
    sizes = {len(part) for part in found.values()}
    if len(sizes) > 1:
        counts = ", ".join(f"{key} {len(part)}" for key, part in found.items())
        raise DataError(f"{name} has inputs with different numbers of records ({counts}); they must be equally many.")
    return found


def _check_feature_array(name: str, value: Any, notes: list[str], tokens: bool = False, least_dims: int = 2) -> Tensor:
    array = to_numpy_array(name, value)
    if array.dtype.kind not in "biuf":
        held = DTYPE_KIND_NAMES.get(array.dtype.kind, str(array.dtype))
        raise DataError(f"{name} holds {held}; it must hold real numbers.")
    if array.ndim < least_dims:
        raise DataError(
            f"{name} has shape {_format_shape(array.shape)}; it must be [n, features] or [n, channels, height, width]."
        )
    if array.size == 0:
        raise DataError(f"{name} is empty (shape {_format_shape(array.shape)}); at least one record is needed.")
    if array.dtype.kind in "iu" and (tokens or array.dtype in TOKEN_DTYPES):
        same = isinstance(value, Tensor) and value.dtype == torch.int64  # perhaps on the disk: not copied
        return value.detach().cpu() if same else torch.from_numpy(np.array(array, dtype=np.int64, order="C"))
    if array.dtype == np.uint8:
        notes.append(
            f"{name} holds bytes 0..255 and is used unscaled; scale it by public constants, such as x / 127.5 - 1."
        )
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        tensor = value.detach().cpu()
    else:
        with np.errstate(over="ignore"):  # overflow gives infinity, which is rejected below
            tensor = torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
    # If all values are finite, the sum almost always is; it needs no second array of the data's size.
    if not bool(torch.isfinite(tensor.sum())):
        bad = (~torch.isfinite(tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None])).any(dim=1).nonzero()
        if len(bad):
            raise DataError(
                f"{name} holds NaN or infinite values in {len(bad)} of {len(tensor)} records (first: record "
                f"{int(bad[0])}); every value must be a finite 32-bit number."
            )
    return tensor


def _check_length(name: str, array: AnyArray, n: int) -> None:
    if array.ndim != 1:
        raise DataError(f"{name} has shape {_format_shape(array.shape)}; it must be one number a record, shape [{n}].")
    if len(array) != n:
        other = "x_test" if name.endswith("test") else "x"
        raise DataError(f"{name} has {len(array)} entries but {other} has {n} records; they must be equally many.")


def _encode_ids(name: str, value: Any, n: int) -> tuple[Tensor, AnyArray]:
    """Ids as int64, and their distinct values in order. Integers stay as they are; text is numbered."""
    array = _to_id_array(to_numpy_array(name, value))
    if array.dtype.kind not in "biuUS":
        held = DTYPE_KIND_NAMES.get(array.dtype.kind, str(array.dtype))
        raise DataError(f"{name} holds {held}; it must hold integers or text, one a record.")
    _check_length(name, array, n)
    if array.dtype.kind in "US":
        values, codes = np.unique(array, return_inverse=True)
        return torch.from_numpy(codes.reshape(-1).astype(np.int64)), values
    return torch.from_numpy(np.array(array, dtype=np.int64)), np.unique(array)


def _to_id_array(array: AnyArray) -> AnyArray:
    """Ids of a pandas column: an array of objects that are all text, or all whole numbers, as one of those."""
    if array.dtype.kind not in "OT" or not array.size:
        return array
    texts, numbers = (all(isinstance(each, kind) for each in array.flat) for kind in (str, int | np.integer))
    return array.astype(str) if texts else array.astype(np.int64) if numbers else array


def _check_parties(value: Any, n: int, names: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    codes, values = _encode_ids("party", value, n)
    if names:
        if len(set(names)) < len(names):
            raise DataError("party_names repeats a name; each party needs its own.")
        if int(codes.min()) < 0 or int(codes.max()) >= len(names):
            raise DataError(f"party must hold indices 0..{len(names) - 1} into the {len(names)} party_names.")
        return codes, names
    if values.dtype.kind in "US":
        texts = tuple(v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values.tolist())
        return codes, texts
    numbered = torch.from_numpy(np.unique(codes.numpy(), return_inverse=True)[1].reshape(-1).astype(np.int64))
    return numbered, tuple(f"party-{v}" for v in values.astype(np.int64).tolist())


def _check_test_parties(value: Any, n: int, names: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """The party of each test record, as an index into the names of the training records' parties, if there are any."""
    codes, own = _check_parties(value, n, names if _is_integer_array(value) else ())
    if not names:
        return codes, own
    if _is_integer_array(value):
        return codes, names
    unknown = [each for each in own if each not in names]
    if unknown:
        raise DataError(f"party_test names {unknown[0]!r}, which no training record has; the parties are {names}.")
    return torch.tensor([names.index(each) for each in own])[codes], names


def _is_integer_array(value: Any) -> bool:
    return to_numpy_array("party_test", value).dtype.kind in "iu"


def _format_shape(shape: Any) -> str:
    if isinstance(shape, Mapping):
        return "{" + ", ".join(f"{name}: {_format_shape(part)}" for name, part in shape.items()) + "}"
    return "[" + ", ".join(map(str, shape)) + "]"
