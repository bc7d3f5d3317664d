"""Finding 7: the number of classes was read off private labels. It is declared, or the run is refused.

At 243f1c8 `from_arrays(x, y)` took the largest label plus one, and every party and the model's shape showed it: one
label changed from 2 to 9 turned 3 classes into 10.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fulcrum.data import Dataset, from_arrays, load
from fulcrum.data.tasks.builtin import count_classes
from fulcrum.errors import ConfigError, DataError, FulcrumError
from fulcrum.runs import prepare
from fulcrum.settings.schema import Data, Settings, TaskSettings

QUICK = Settings().replace(
    data={"parties": 2, "min_examples": 2},
    model={"name": "linear"},
    train={"rounds": 2, "rate": 0.5},
    privacy={"sigma": 1.0},
)


def records(label: int = 2, **more: Any) -> dict[str, Any]:
    """Forty records of three classes, the last label given."""
    rng = np.random.default_rng(0)
    y = np.arange(40) % 3
    y[-1] = label
    return {"x": rng.normal(size=(40, 4)).astype(np.float32), "y": y, **more}


def outputs(dataset: Dataset, **task: Any) -> int:
    """What everybody sees of the classes: the model's outputs."""
    return prepare(QUICK.replace(task=task), dataset).problem.task.outputs


def test_one_private_label_changes_nothing_that_others_see():
    seen = set()
    for label in (2, 9):
        with pytest.raises(DataError) as refused:
            outputs(from_arrays(**records(label)))
        seen.add(str(refused.value).replace(f"({label + 1})", "(n)"))
    assert len(seen) == 1
    assert "task.classes" in seen.pop()
    # The old computation, which this test rejects: it differs between the neighbours.
    old = {count_classes(TaskSettings(), [records(label)["y"]]) for label in (2, 9)}
    assert old == {3, 10}


@pytest.mark.parametrize("how", ["setting", "argument", "test labels", "public"])
def test_a_declaration_is_enough(how: str):
    public_labels = {"x_test": np.zeros((6, 4), np.float32), "y_test": np.arange(6) % 3}
    ways: dict[str, dict[str, Any]] = {
        "setting": {},
        "argument": {"classes": 3},
        "test labels": public_labels,
        "public": {"public": True},
    }
    assert outputs(from_arrays(**records(**ways[how])), **({"classes": 3} if how == "setting" else {})) == 3


def test_a_label_outside_is_an_error_for_the_user():
    for more in ({"classes": 3}, {"x_test": np.zeros((6, 4), np.float32), "y_test": np.arange(6) % 3}):
        with pytest.raises(DataError, match="the labels hold 9; with classes = 3"):
            from_arrays(**records(9, **more))


def test_a_file_declares_its_classes_and_cannot_declare_itself_public(tmp_path: Path):
    np.savez(tmp_path / "own.npz", **records())
    with pytest.raises(DataError, match=r"own.npz is private, and the number of classes \(3\)"):
        prepare(QUICK.replace(data={"source": str(tmp_path / "own.npz")}))
    np.savez(tmp_path / "declared.npz", **records(), classes=3)
    assert prepare(QUICK.replace(data={"source": str(tmp_path / "declared.npz")})).problem.task.outputs == 3
    np.savez(tmp_path / "bold.npz", **records(), public=True)
    with pytest.raises(DataError, match="'public', which has no meaning here"):
        load(str(tmp_path / "bold.npz"))


@pytest.mark.parametrize("name", ["tokens", "next-token"])
def test_a_vocabulary_is_declared_too(name: str):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 7, size=(40, 5))
    given: dict[str, Any] = {"x": x} if name == "next-token" else {"x": x, "y": x}
    inferred = from_arrays(**given, task=name)
    assert "tokens" in inferred.inferred
    declared = from_arrays(**given, task=TaskSettings(name, classes=7))
    assert (declared.inferred, declared.task.outputs) == ("", 7)


@pytest.mark.parametrize("name", ["binary", "multilabel", "regression"])
def test_tasks_whose_outputs_follow_from_shapes_need_no_declaration(name: str):
    rng = np.random.default_rng(0)
    y = {
        "binary": np.arange(40) % 2,
        "multilabel": rng.integers(0, 2, size=(40, 3)),
        "regression": rng.normal(size=40).astype(np.float32),
    }[name]
    data = from_arrays(rng.normal(size=(40, 4)).astype(np.float32), y, task=name)
    assert (data.inferred, data.task.outputs) == ("", 3 if name == "multilabel" else 1)


def test_a_task_of_ones_own_sees_the_shape_of_private_targets_and_not_their_values(tmp_path: Path, monkeypatch: Any):
    (tmp_path / "seen_tasks.py").write_text(
        "from fulcrum.data.tasks import TASKS\n"
        "SEEN = []\n"
        "def task(settings, targets):\n"
        "    SEEN.append([target.copy() for target in targets])\n"
        "    return TASKS.find('regression')(settings, targets)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    y = np.linspace(1, 2, 40).astype(np.float32)
    x = np.ones((40, 2), np.float32)
    from_arrays(x, y, x[:3], y[:3], task="seen_tasks:task")
    from_arrays(x, y, x[:3], y[:3], task="seen_tasks:task", public=True)
    import seen_tasks  # type: ignore[import-not-found]

    private, public = seen_tasks.SEEN
    assert private[0].shape == y.shape
    assert not private[0].any()
    assert np.array_equal(private[1], y[:3]), "y_test handed over apart counts as public"
    assert np.array_equal(public[0], y), "the check can tell: public targets are seen"


def test_a_private_label_moves_no_other_record_to_another_party():
    """A neighbour of the finding: a split by label makes every party's size follow from private labels."""
    orders = []
    for label in (2, 0):
        made = prepare(QUICK, from_arrays(**records(label, classes=3)))
        assert made.settings.data.partition == "hashed"
        orders.append(made.problem.partition.order.tolist())
    assert orders[0] == orders[1]
    for method in ("dirichlet", "shards"):
        with pytest.raises(ConfigError, match="splits by the labels"):
            prepare(QUICK.replace(data={"partition": method}), from_arrays(**records(classes=3)))
    # The old default, which this rejects: the same two data sets are split differently.
    old = []
    for label in (2, 0):
        public = from_arrays(**records(label, classes=3, public=True))
        made = prepare(QUICK.replace(data={"partition": "dirichlet"}), public)
        old.append(made.problem.partition.order.tolist())
    assert old[0] != old[1]


def test_every_refusal_is_one_sentence():
    with pytest.raises(FulcrumError) as refused:
        outputs(from_arrays(**records()))
    assert str(refused.value).count(". ") == 0
    assert Data().public is False
