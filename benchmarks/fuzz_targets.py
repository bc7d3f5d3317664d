"""The readers that are fuzzed: each with right files to start from, and the errors that it documents."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_inputs import mutate_bytes, mutate_json, mutate_npy, mutate_safetensors, mutate_text, mutate_zip
from fuzz_reader import Reader, of_file
from fuzz_records import ledger_readers, message_readers, party_file_readers
from safetensors.torch import save

from fulcrum.errors import BudgetError, ConfigError, DataError, InputError, ModelError, RunError


def make_readers(home: Path) -> list[Reader]:
    """All readers. home: where right files are made."""
    made = [*_settings_readers(home), *_data_readers(home), *_model_readers(home), *_run_readers(home)]
    return [*made, *ledger_readers(home), *message_readers(home), *party_file_readers(home)]


# --- settings -----------------------------------------------------------------------------------


def _settings_readers(home: Path) -> list[Reader]:
    from fulcrum.settings import files
    from fulcrum.settings.schema import Settings

    whole = files.dump_settings(Settings()).encode()
    short = b'method = "moo"\n[train]\nrounds = 5\nrate = 0.1\n[clip]\nrule = "moo"\n[privacy]\nsigma = 1.0\n'

    def read_option(content: bytes, folder: Path) -> Any:
        path, value = files.parse_assignment_option(content.decode("utf-8", "surrogateescape"))
        return files.parse_settings({}, {path: value})

    options = [b"clip.C0=0.5", b'clip.rule="moo"', b"train.rounds=7", b'data.source="digits"']
    return [
        Reader("settings", [whole, short], mutate_text, of_file("s.toml", files.read_settings), (ConfigError,), 1.5),
        Reader("--set", options, mutate_text, read_option, (ConfigError,), 1.0),
    ]


# --- data ---------------------------------------------------------------------------------------


def _npy(array: Any) -> bytes:
    target = io.BytesIO()
    np.save(target, array)
    return target.getvalue()


def _npz(**arrays: Any) -> bytes:
    target = io.BytesIO()
    np.savez(target, **arrays)
    return target.getvalue()


def _mutate_pickle(seed: bytes, draw: random.Random, others: Sequence[bytes]) -> bytes:
    """By bytes, and with instructions that would run code put in between."""
    content = mutate_bytes(seed, draw, others) if draw.random() < 0.7 else seed
    if draw.random() < 0.4:
        at = draw.randrange(len(content) + 1)
        evil: tuple[bytes, ...] = (
            b"cfuzz_canary\nmake\n)R",
            b"cos\nsystem\n(S'true'\ntR",
            b"cbuiltins\neval\n(S'1'\ntR",
            b"(cposix\nsystem\n",
        )
        evil += (
            b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R",
            b"r\xff\xff\xff\x7f",
            b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
        )
        content = content[:at] + draw.choice(evil) + content[at:]
    return content


def _data_readers(home: Path) -> list[Reader]:
    from fulcrum.data import load
    from fulcrum.data.sources.own import dataset_from_mapping, read_npz
    from fulcrum.data.sources.public.cifar import parse_cifar_batch
    from fulcrum.data.sources.public.idx import compute_idx_size, parse_idx_array, read_maybe_gzipped
    from fulcrum.data.table.schema import Schema
    from fulcrum.settings.schema import Table, TaskSettings

    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(9, 4)).astype(np.float32), np.arange(9) % 3
    images = b"\x00\x00\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (3, 4, 4)) + bytes(range(48))
    labels = b"\x00\x00\x08\x01" + (5).to_bytes(4, "big") + bytes(5)

    def read_idx(path: Path) -> Any:
        for shape in ((3, 4, 4), (5,)):
            found = read_maybe_gzipped(path, compute_idx_size(shape))
            if found[3:4] == bytes([len(shape)]):
                return parse_idx_array(found, shape, path)
        return parse_idx_array(found, (5,), path)

    pixels = np.zeros((2, 12), dtype=np.uint8)
    batches = [pickle.dumps({b"data": pixels, b"labels": [1, 2]}, protocol=p) for p in (3, 4)]
    npz = [_npz(x=x, y=y, x_test=x, y_test=y, classes=3), _npz(x=x, y=y, person=np.arange(9), party=["a"] * 9)]
    csv = b"age,sex,stay,party,person\n" + b"".join(
        b"%d,%s,%d,a,%d\n" % (20 + i, b"mf"[i % 2 :][:1], i, i) for i in range(8)
    )
    lines = b"".join(b'{"age": %d, "sex": "m", "stay": %d, "party": "a", "person": %d}\n' % (i, i, i) for i in range(6))
    schema = (
        b'person = "person"\nparty = "party"\ntarget = "stay"\n[columns.age]\nlow = 0\nhigh = 120\n'
        b'[columns.sex]\nkind = "category"\ncategories = ["m", "f"]\n[columns.stay]\nlow = 0\nhigh = 90\n'
    )

    regression = TaskSettings(name="regression")

    def read_table(name: str) -> Callable[[bytes, Path], Any]:
        def read(content: bytes, folder: Path) -> Any:
            (folder / name).write_bytes(content)
            (folder / "t.schema.toml").write_bytes(schema)
            return load(str(folder / name), task=regression, table=Table(schema=str(folder / "t.schema.toml")))

        return read

    def read_schema(content: bytes, folder: Path) -> Any:
        (folder / "t.csv").write_bytes(csv)
        (folder / "t.schema.toml").write_bytes(content)
        return load(str(folder / "t.csv"), task=regression, table=Table(schema=str(folder / "t.schema.toml")))

    def read_database(content: bytes, folder: Path) -> Any:
        (folder / "t.db").write_bytes(content)
        (folder / "t.schema.toml").write_bytes(schema)
        declared = Table(schema=str(folder / "t.schema.toml"), query="select age, sex, stay, party, person from t")
        return load(f"sqlite:///{folder / 't.db'}", task=regression, table=declared)

    def read_folder(content: bytes, folder: Path) -> Any:
        np.save(folder / "y.npy", y)
        (folder / "x.npy").write_bytes(content)
        return load(str(folder))

    with sqlite3.connect(home / "t.db") as db:
        db.execute("create table t (age, sex, stay, party, person)")
        db.executemany("insert into t values (?, 'm', 3, 'a', ?)", [(i, i) for i in range(9)])
    db.close()
    both = (DataError, ConfigError)
    readers = [
        Reader("idx", [images, labels, gzip.compress(images)], mutate_bytes, of_file("i", read_idx), (DataError,)),
        Reader(
            "pickle",
            batches,
            _mutate_pickle,
            lambda content, folder: parse_cifar_batch(content, (2, 12), folder / "batch"),
            (DataError,),
            1.5,
        ),
        Reader(
            "npz",
            npz,
            mutate_zip,
            of_file("d.npz", lambda path: dataset_from_mapping(read_npz(path), str(path), "d", TaskSettings())),
            both,
            1.5,
        ),
        Reader("npy", [_npy(x), _npy(x.astype(np.int8))], mutate_npy, read_folder, both),
        Reader("table csv", [csv], mutate_text, read_table("t.csv"), both, 1.5),
        Reader("table csv.gz", [gzip.compress(csv)], mutate_bytes, read_table("t.csv.gz"), both, 0.5),
        Reader("table jsonl", [lines], mutate_text, read_table("t.jsonl"), both),
        Reader("table sqlite", [(home / "t.db").read_bytes()], mutate_bytes, read_database, both, 0.5),
        Reader("schema", [schema], mutate_text, read_schema, both, 1.5),
        Reader("schema text", [schema], mutate_text, lambda c, f: Schema.from_toml(c.decode("utf-8", "replace")), both),
    ]
    try:
        from PIL import Image
    except ImportError:
        return readers
    seeds = []
    for kind in ("PNG", "BMP", "JPEG"):
        target = io.BytesIO()
        Image.fromarray((np.arange(64).reshape(8, 8) * 3).astype(np.uint8)).save(target, kind)
        seeds.append(target.getvalue())

    def read_images(content: bytes, folder: Path) -> Any:
        for name in ("a", "b"):
            (folder / name).mkdir()
            (folder / name / "1.png").write_bytes(seeds[0])
        (folder / "a" / "2.png").write_bytes(content)
        return load(str(folder), public=True)

    return [*readers, Reader("image", seeds, mutate_bytes, read_images, both, 0.5)]


# --- models and runs ----------------------------------------------------------------------------


def _model_readers(home: Path) -> list[Reader]:
    from fulcrum.models.checkpoints import read_checkpoint, read_origin

    weights = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)}
    target = io.BytesIO()
    torch.save(weights, target)
    shards = json.dumps({"weight_map": {"weight": "a.safetensors", "bias": "a.safetensors"}}).encode()

    def read_shards(content: bytes, folder: Path) -> Any:
        (folder / "a.safetensors").write_bytes(save(weights))
        (folder / "model.safetensors.index.json").write_bytes(content)
        return read_checkpoint(folder / "model.safetensors.index.json")

    def read_both(path: Path) -> Any:
        read_origin(path)
        return read_checkpoint(path)

    errors = (ModelError, RunError)
    return [
        Reader("weights safetensors", [save(weights)], mutate_safetensors, of_file("w.safetensors", read_both), errors),
        Reader("weights torch", [target.getvalue()], mutate_zip, of_file("w.pt", read_both), errors),
        Reader("weights npz", [_npz(a=np.ones((2, 3)))], mutate_zip, of_file("w.npz", read_both), errors, 0.5),
        Reader("weights index", [shards], mutate_json, read_shards, errors, 0.5),
    ]


def _run_readers(home: Path) -> list[Reader]:
    import fulcrum
    from fulcrum.runs import binding, stored_model
    from fulcrum.runs.folder import RunFolder, load_metrics, load_summary

    class Stop(Exception):
        pass

    def stop(result: Any) -> None:
        if result.round == 3:
            raise Stop

    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 3
    np.savez(home / "run.npz", x=x[:20], y=y[:20], x_test=x[20:], y_test=y[20:], classes=3)
    words: dict[str, Any] = {"parties": 2, "partition": "iid", "rate": 0.5, "sigma": 2.0, "model": "linear"}
    fulcrum.train(data=str(home / "run.npz"), out=home / "done", rounds=2, **words)
    with contextlib.suppress(Stop):
        fulcrum.train(data=str(home / "run.npz"), out=home / "stopped", rounds=6, on_round=stop, **words)
    kept = {file.name: file.read_bytes() for file in (home / "done").iterdir() if file.is_file()}
    last = sorted((home / "stopped" / "checkpoints").iterdir())[-1]

    def read_last(content: bytes, folder: Path) -> Any:
        (folder / "checkpoints").mkdir()
        shutil.copy(home / "stopped" / "run.json", folder)
        (folder / "checkpoints" / last.name).write_bytes(content)
        opened = RunFolder.open(folder)
        try:
            return opened.load_last_snapshot(torch.device("cpu"))
        finally:
            opened.close()

    def read_stored(name: str) -> Callable[[bytes, Path], Any]:
        def read(content: bytes, folder: Path) -> Any:
            for other, whole in kept.items():
                (folder / other).write_bytes(whole)
            (folder / name).write_bytes(content)
            stored = binding.StoredRun.read(folder)
            stored.read_settings()
            stored.open_ledger().close()
            load_metrics(folder)
            load_summary(folder)
            return stored_model.load_trained(folder)

        return read

    errors = (InputError, BudgetError)
    return [
        Reader("run checkpoint", [last.read_bytes()], mutate_safetensors, read_last, (), 1.5),
        Reader("run.json", [kept["run.json"]], mutate_json, read_stored("run.json"), errors),
        Reader("metrics.jsonl", [kept["metrics.jsonl"]], mutate_text, read_stored("metrics.jsonl"), errors),
        Reader(
            "ledger-head.json", [kept["ledger-head.json"]], mutate_json, read_stored("ledger-head.json"), errors, 0.5
        ),
        Reader("summary.json", [kept["summary.json"]], mutate_json, read_stored("summary.json"), errors, 0.5),
        Reader("model.json", [kept["model.json"]], mutate_json, read_stored("model.json"), errors),
        Reader("stored settings", [kept["settings.toml"]], mutate_text, read_stored("settings.toml"), errors, 0.5),
    ]
