"""Images in folders: a class per sub-folder, or a table of labels; needs Pillow (`pip install 'fulcrum-fl[images]'`).

    scans/benign/001.png  scans/malignant/002.png          images.folders = "class" (the default)
    scans/north/p17/benign/001.png                         images.folders = "party/person/class"
    scans/001.png, scans/labels.csv                        images.labels = "labels.csv", with a column `file`
    scans/train/..., scans/test/...                        the images in test/ are public and evaluated on

Size, colours and classes are declared ([images]). Each image is resized on its own, and its bytes become [-1, 1].
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fulcrum.data.arrays import from_arrays
from fulcrum.data.dataset import Dataset
from fulcrum.data.sources.tables import choose_task, collect_declared, shape_targets
from fulcrum.data.table.encoding import encode_table
from fulcrum.data.table.growing import GrowingArray
from fulcrum.data.table.schema import Column, Schema
from fulcrum.errors import ConfigError, DataError
from fulcrum.settings.schema import Images, Table, TaskSettings

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
MODES = {"rgb": "RGB", "grey": "L"}
LEVELS = ("class", "party", "person", "-")
"""What a level of sub-folders may name; "-": nothing."""
IMAGES_PER_PIECE = 256


@dataclass(frozen=True, eq=False)
class _Labelled:
    """Images with what is known of each: y [n, ...], and person and party as text where they are."""

    files: Sequence[Path]
    y: npt.NDArray[Any]
    person: Sequence[str] | None
    party: Sequence[str] | None
    notes: tuple[str, ...] = ()


def is_image_folder(path: Path) -> bool:
    """Whether a folder holds images, at any depth."""
    return next(_list_images(path), None) is not None


def read_images(
    path: Path,
    images: Images | None = None,
    table: Table | None = None,
    task: TaskSettings | None = None,
    public: bool = False,
    need: Sequence[str] = ("train",),
) -> Dataset:
    """A Dataset from a folder of images."""
    settings, columns, wanted = images or Images(), table or Table(), task or TaskSettings()
    _check_settings(settings)
    apart = (path / "train").is_dir() and (path / "test").is_dir()
    folders = {"train": path / "train", "test": path / "test"} if apart else {"train": path}
    if not apart and "train" not in need:
        folders = {"test": path}
    schema = _make_label_schema(path, folders, settings, columns, public)
    parts = {part: _find_labelled(folder, path, settings, schema) for part, folder in folders.items()}
    first = next(iter(parts.values())).files[0]
    size = tuple(settings.size) or _find_size(first, path.name, public)
    loaded = {part: _load_images(found.files, size, MODES[settings.colours]) for part, found in parts.items()}
    train, test = parts.get("train"), parts.get("test")
    chosen = choose_task(schema, wanted)
    owners: dict[str, Any] = {}
    if train is not None:
        owners |= {role: np.array(ids) for role in ("person", "party") if (ids := getattr(train, role)) is not None}
    if test is not None and test.party is not None and (train is None or train.party is not None):
        owners["party_test"] = np.array(test.party)
    data = from_arrays(
        loaded.get("train"),
        None if train is None else _shape(train.y, chosen),
        loaded.get("test"),
        None if test is None else _shape(test.y, chosen),
        name=path.name,
        task=chosen,
        public=public,
        **owners,
    )
    return dataclasses.replace(data, own_notes=tuple(note for part in parts.values() for note in part.notes))


def _shape(y: npt.NDArray[Any], task: TaskSettings) -> npt.NDArray[Any]:
    return y.astype(np.float32) if task.name == "regression" else y


def _check_settings(settings: Images) -> None:
    if settings.colours not in MODES:
        raise ConfigError(f"images.colours = {settings.colours!r} must be one of {', '.join(MODES)}.")
    if settings.size and (len(settings.size) != 2 or min(settings.size) < 1):
        raise ConfigError(f"images.size = {list(settings.size)} must be height and width, such as [64, 64].")
    for level in _list_levels(settings):
        if level not in LEVELS:
            raise ConfigError(f"images.folders = {settings.folders!r}: {level!r} must be one of {', '.join(LEVELS)}.")


def _list_levels(settings: Images) -> list[str]:
    return [level for level in settings.folders.split("/") if level]


# --- labels -------------------------------------------------------------------------------------


def _make_label_schema(path: Path, folders: dict[str, Path], settings: Images, table: Table, public: bool) -> Schema:
    """What the labels are: by [table] where it declares a target, else one of the declared classes."""
    declared = collect_declared(table)
    if declared.get("target"):
        return Schema.from_mapping({**declared, "record": settings.file, "ignore": ["*"]}, "table")
    classes = settings.class_names
    if not classes:
        if settings.labels or not public:
            raise ConfigError(
                f"images.class_names is not declared; name the classes of {path.name} from public knowledge"
                + ("." if public else ", or say --public if everybody may see the images.")
            )
        if "class" not in _list_levels(settings):
            raise ConfigError(f"images.folders = {settings.folders!r} names no class, and there is no images.labels.")
        classes = _list_class_folders(folders.values(), _list_levels(settings).index("class"))
    column = Column(settings.label, kind="category", categories=tuple(classes))
    return Schema(targets=(column,), record=settings.file, person=table.person, party=table.party, ignore=("*",))


def _list_class_folders(folders: Iterable[Path], level: int) -> tuple[str, ...]:
    """The names of the sub-folders at a level, sorted."""
    parts = [file.relative_to(folder).parts for folder in folders for file in _list_images(folder)]
    return tuple(sorted({each[level] for each in parts if len(each) > level + 1}))


def _find_labelled(folder: Path, top: Path, settings: Images, schema: Schema) -> _Labelled:
    if settings.labels:
        named = [place / settings.labels for place in (folder, top, Path())]
        found = next((file for file in named if file.is_file()), None)
        if found is None:
            raise ConfigError(f"images.labels = {settings.labels!r} was not found in {folder}.")
        return _read_labels(found, folder, schema)
    return _read_folders(folder, settings, schema)


def _read_labels(file: Path, folder: Path, schema: Schema) -> _Labelled:
    """The images that a table of labels names, in the order of the table."""
    table = encode_table(schema, str(file))
    assert table.record is not None
    names = [table.record_names[code] for code in table.record]
    files = [folder / name for name in names]
    inside = folder.resolve()
    missing = [
        place
        for place, each in enumerate(files, start=1)
        if not each.is_file() or not each.resolve().is_relative_to(inside)
    ]
    if missing:
        raise DataError(
            f"{file} names files that are not in {folder} (first: row {missing[0]}); paths start at that folder."
        )
    return _Labelled(
        files,
        shape_targets(table, TaskSettings()) if schema.targets[0].kind != "number" else table.targets(),
        None if table.person is None else [table.person_names[code] for code in table.person],
        None if table.party is None else [table.party_names[code] for code in table.party],
        table.notes,
    )


def _read_folders(folder: Path, settings: Images, schema: Schema) -> _Labelled:
    """The images of a folder by the names of its sub-folders."""
    levels = _list_levels(settings)
    if "class" not in levels:
        raise ConfigError(
            f"images.folders = {settings.folders!r} names no class; name images.labels, or a level class."
        )
    files = sorted(_list_images(folder))
    if not files:
        raise DataError(f"{folder} holds no images ({', '.join(ENDINGS[:4])}, ...).")
    names: dict[str, list[str]] = {level: [] for level in levels}
    for file in files:
        parts = file.relative_to(folder).parts[:-1]
        if len(parts) != len(levels):
            raise DataError(
                f"{file} lies {len(parts)} folders deep, and images.folders = {settings.folders!r} says {len(levels)}."
            )
        for level, part in zip(levels, parts, strict=True):
            names[level].append(part)
    places = {name: place for place, name in enumerate(schema.targets[0].categories)}
    unknown = sorted({name for name in names["class"] if name not in places})
    if unknown:
        raise DataError(
            f"{folder} has the sub-folder {unknown[0]!r}, which is none of images.class_names; declare or move it."
        )
    return _Labelled(
        files,
        np.array([places[name] for name in names["class"]]),
        names.get("person"),
        names.get("party"),
    )


# --- pixels -------------------------------------------------------------------------------------


def _list_images(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())


def require_pillow() -> Any:
    """Pillow's Image module; DataError that says how to get it."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("images need Pillow; run `pip install 'fulcrum-fl[images]'`.") from None
    return Image


def _find_size(first: Path, name: str, public: bool) -> tuple[int, ...]:
    if not public:
        raise ConfigError(
            f"images.size is not declared; say the height and width of {name}, such as images.size = [64, 64]: every "
            "image is resized to it."
        )
    with _opened(first) as image:
        return image.height, image.width


def _opened(file: Path) -> Any:
    image_module = require_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            return image_module.open(file)
    except (OSError, image_module.DecompressionBombWarning, image_module.DecompressionBombError) as error:
        raise DataError(f"{file} is no readable image: {type(error).__name__}.") from None


def load_pixels(opened: Any, size: tuple[int, ...], mode: str) -> npt.NDArray[np.float32]:
    """An image as [channels, height, width] in [-1, 1], resized to the declared size."""
    height, width = size
    changed = opened.convert(mode)
    if changed.size != (width, height):
        changed = changed.resize((width, height), require_pillow().Resampling.BILINEAR)
    pixels = np.asarray(changed, dtype=np.float32) / 127.5 - 1.0
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _load_images(files: Sequence[Path], size: tuple[int, ...], mode: str) -> Tensor:
    channels = 1 if mode == "L" else 3
    grown = GrowingArray(np.float32, (channels, *size))
    try:
        for start in range(0, len(files), IMAGES_PER_PIECE):
            grown.append(np.stack([_load_image(file, size, mode) for file in files[start : start + IMAGES_PER_PIECE]]))
        return grown.finish()
    finally:
        grown.close()


def _load_image(file: Path, size: tuple[int, ...], mode: str) -> npt.NDArray[np.float32]:
    with _opened(file) as opened:
        try:
            return load_pixels(opened, size, mode)
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{file} is no whole image: {type(error).__name__}.") from None
