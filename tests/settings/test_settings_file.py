"""TOML and words -> Settings: layers, round trips, and one sentence for every mistake."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import tomllib
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulcrum.errors import ConfigError
from fulcrum.runs.choices import SETTING_CHOICES, check_choices, list_choices
from fulcrum.settings.catalogue import FIELD_TEXTS, _read_field_docstrings, list_setting_fields
from fulcrum.settings.checks import SETTING_RANGES
from fulcrum.settings.files import (
    SECTION_CLASSES,
    SHORT_NAMES,
    dump_settings,
    make_settings_template,
    parse_assignment_option,
    parse_settings,
    read_settings,
    settings_from_keywords,
)
from fulcrum.settings.presets import METHODS
from fulcrum.settings.reading import EXCLUSIVE_SETTINGS, EXPECTED_TYPE_TEXTS
from fulcrum.settings.schema import Data, Model, Privacy, Run, Settings, Train
from fulcrum.settings.writing import TEMPLATE_VALUES

DOCS = Path(__file__).parents[2] / "docs"


def refusal(raw=None, overrides=None, method=None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_choices(parse_settings(raw or {}, overrides, method))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# --- layers -----------------------------------------------------------------------------------


def test_nothing_given_is_the_defaults():
    assert parse_settings({}) == Settings().replace(clip={"rehearse": True})  # what the default method adds


def test_file_wins_over_the_preset_of_its_own_method():
    settings = parse_settings({"method": "dp-sgd", "clip": {"rule": "moo"}})
    assert (settings.method, settings.clip.rule) == ("dp-sgd", "moo")


def test_method_of_the_command_line_wins_over_the_file_and_keeps_the_rest():
    settings = parse_settings({"clip": {"rule": "moo", "C0": 0.5}}, method="dp-sgd")
    assert (settings.method, settings.clip.rule, settings.clip.C0) == ("dp-sgd", "fixed", 0.5)


def test_values_of_the_command_line_win_over_everything():
    settings = parse_settings({"clip": {"rule": "none"}}, {"clip.rule": "moo", "clip.C0": 2}, method="dp-sgd")
    assert (settings.method, settings.clip.rule, settings.clip.C0) == ("dp-sgd", "moo", 2.0)


def test_set_method_is_the_same_as_method():
    assert parse_settings({}, {"method": "dp-sgd"}) == parse_settings({}, method="dp-sgd")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_parses_and_remembers_its_name(method):
    settings = parse_settings({}, method=method)
    assert settings.method == method
    for section, values in METHODS[method].parts.items():
        for name, value in values.items():
            assert getattr(getattr(settings, section), name) == value


def test_the_later_of_epsilon_and_sigma_wins():
    assert parse_settings({"privacy": {"epsilon": 4.0}}, {"privacy.sigma": 2.0}).privacy == Privacy(sigma=2.0)
    assert parse_settings({"privacy": {"sigma": 4.0}}, {"privacy.epsilon": 2.0}).privacy == Privacy(epsilon=2.0)


def test_epsilon_and_sigma_in_one_layer_contradict():
    assert "both set" in refusal({"privacy": {"epsilon": 4.0, "sigma": 2.0}})
    assert "both set" in refusal({}, {"privacy.epsilon": 4.0, "privacy.sigma": 2.0})


def test_epochs_take_the_place_of_steps_and_back():
    assert parse_settings({"train": {"epochs": 2.0}}).train == Train(steps=0, epochs=2.0)
    assert parse_settings({"train": {"epochs": 2.0}}, {"train.steps": 3}).train == Train(steps=3, epochs=0.0)
    assert "exactly one" in refusal({"train": {"epochs": 2.0, "steps": 3}})


def test_rivals_name_each_other():
    for path, (rival, cleared) in EXCLUSIVE_SETTINGS.items():
        section = path.partition(".")[0]
        assert f"{section}.{EXCLUSIVE_SETTINGS[f'{section}.{rival}'][0]}" == path
        assert not cleared


def test_tables_of_budgets_merge():
    settings = parse_settings({"privacy": {"epsilon": 4.0, "budgets": {"a": 1.0}}}, {"privacy.budgets.b.c": 2})
    assert settings.privacy.budgets == {"a": 1.0, "b.c": 2.0}


def test_keywords_are_short_names_unique_fields_or_sections():
    settings = settings_from_keywords({"data": "mnist", "epsilon": 1.64, "kappa": 0.01, "train": {"server": "adam"}})
    expected = {"data.source": "mnist", "privacy.epsilon": 1.64, "clip.kappa": 0.01, "train.server": "adam"}
    assert settings == parse_settings({}, expected)


def test_keywords_take_numpy_numbers_and_paths(tmp_path):
    settings = settings_from_keywords(
        {"rounds": np.int64(3), "lr": np.float64(0.5), "data_dir": tmp_path, "hidden": (8, 4)}
    )
    assert (settings.train.rounds, settings.train.lr, settings.data.dir) == (3, 0.5, str(tmp_path))
    assert settings.model.hidden == (8, 4)


def test_unknown_keyword_gets_the_nearest():
    with pytest.raises(ConfigError, match="epsilom is not a setting; did you mean epsilon"):
        settings_from_keywords({"epsilom": 1.0})


def test_short_names_exist_and_no_bare_name_is_ambiguous():
    assert set(SHORT_NAMES.values()) <= set(list_setting_fields())
    names = [field.name for field in list_setting_fields().values()]
    several = {name for name in names if names.count(name) > 1} - set(SHORT_NAMES)
    short = set(SHORT_NAMES.values())  # a name that several sections have: each of them has a short name of its own
    assert all(field.path in short for field in list_setting_fields().values() if field.name in several)


# --- words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("clip.kappa=0.01", "clip.kappa", 0.01),
        ("train.rounds = 5", "train.rounds", 5),
        ("clip.rule=none", "clip.rule", "none"),
        ('clip.rule="none"', "clip.rule", "none"),
        ("model.hidden=[8, 4]", "model.hidden", [8, 4]),
        ("run.diagnostics=true", "run.diagnostics", True),
        ("data.source=a=b", "data.source", "a=b"),
        ("data.dir=", "data.dir", ""),
    ],
)
def test_set_reads_toml_and_falls_back_to_text(text, path, value):
    assert parse_assignment_option(text) == (path, value)


@pytest.mark.parametrize("text", ["clip.kappa", "=3", ""])
def test_set_without_a_value_says_how(text):
    with pytest.raises(ConfigError, match=r"section\.name=value"):
        parse_assignment_option(text)


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"train": {"ronds": 3}}, "train.ronds is not a setting; did you mean train.rounds?"),
        ({"train": {"kappa": 3}}, "train.kappa is not a setting; did you mean clip.kappa?"),
        ({"trian": {"rounds": 3}}, "trian is not a setting; did you mean train?"),
        ({"epsilon": 3}, "epsilon is not a setting; did you mean privacy.epsilon?"),
        (
            {"zzz": 3},
            "zzz is not a setting; choose from data, table, images, task, model, train, clip, privacy, client_level, "
            "run, method.",
        ),
        ({"train": 5}, "train = 5 is a whole number; it must be a section, [train]."),
        ({"train": {"rounds": "5"}}, 'train.rounds = "5" is text; it must be a whole number.'),
        ({"train": {"rounds": 5.0}}, "train.rounds = 5.0 is a number with a decimal point; it must be a whole number."),
        ({"train": {"rounds": True}}, "train.rounds = true is a truth value; it must be a whole number."),
        ({"train": {"lr": "fast"}}, 'train.lr = "fast" is text; it must be a number.'),
        ({"run": {"diagnostics": 1}}, "run.diagnostics = 1 is a whole number; it must be true or false."),
        ({"data": {"source": 1}}, "data.source = 1 is a whole number; it must be text in quotes."),
        ({"model": {"hidden": 64}}, "model.hidden = 64 is a whole number; it must be a list of whole numbers."),
        ({"model": {"hidden": [8, "a"]}}, 'model.hidden holds "a", text; it must be a list of whole numbers.'),
        (
            {"privacy": {"epsilon": 1.0, "budgets": {"a": "x"}}},
            'privacy.budgets holds "x", text; it must be a table of names and numbers.',
        ),
        ({"method": "mooo"}, "method = 'mooo' is not known; did you mean moo?"),
        ({"method": 3}, "method = 3 is a whole number; it must be text in quotes."),
        ({"train": {"lr": float("nan")}}, "train.lr = nan is out of range"),
        ({"train": {"rate": 1.5}}, "train.rate = 1.5 is out of range"),
        ({"privacy": {"epsilon": 0.0}}, "privacy.epsilon = 0.0 is out of range"),
        ({"privacy": {"delta": 1.0}}, "privacy.delta = 1.0 is out of range"),
        ({"data": {"partition": "dirichelt"}}, "data.partition = 'dirichelt' is not known"),
    ],
)
def test_mistakes_in_a_file(raw, said):
    assert refusal(raw).startswith(said)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"clip.kapa": 1}, "clip.kapa is not a setting; did you mean clip.kappa?"),
        ({"rounds": 1}, "rounds is not a setting; did you mean train.rounds?"),
        ({"a.b.c": 1}, "a is not a setting"),
        ({"train.rounds.x": 1}, 'train.rounds = {"x": 1} is a table; it must be a whole number.'),
        ({"train": 1, "train.rounds": 1}, "train.rounds does not fit beside train = 1"),
    ],
)
def test_mistakes_on_the_command_line(overrides, said):
    assert refusal({}, overrides).startswith(said)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml does not exist; .*fulcrum init"):
        read_settings(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        read_settings(tmp_path)
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        read_settings(write(tmp_path / "latin.toml", b"method = 'caf\xe9'"))
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 2"):
        read_settings(write(tmp_path / "torn.toml", b"[train]\nrounds = = 3\n"))


def test_read_takes_a_file_and_words(tmp_path):
    file = write(tmp_path / "run.toml", b"[train]\nrounds = 3\n")
    assert read_settings(file, {"train.lr": 2.0}).train == Train(rounds=3, lr=2.0)


# --- writing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(
            method="dp-sgd",
            data=Data(source="a b.npz", dir='with "quotes"\n'),
            model=Model(hidden=(8, 4)),
            train=Train(steps=0, epochs=1.5, lr=1, decay_rounds=(3, 5)),
            privacy=Privacy(epsilon=4.0, budgets={"party 0": 1.0, "ü.b": 2.0}),
            run=Run(seed=2**63 - 1, diagnostics=True),
        ),
        Settings(privacy=Privacy(sigma=1.3)),
    ],
)
def test_dump_reruns_to_equal_settings(settings):
    assert parse_settings(tomllib.loads(dump_settings(settings))) == settings


@given(
    method=st.sampled_from(sorted(METHODS)),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    delta=st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True),
    ledger=st.text(alphabet=st.characters(exclude_categories=["Cs"])),
)
def test_dump_keeps_every_number_and_text(method, lr, delta, ledger):
    settings = parse_settings({}, {"train.lr": lr, "privacy.delta": delta, "run.ledger": ledger}, method)
    assert parse_settings(tomllib.loads(dump_settings(settings))) == settings


def test_template_is_the_defaults_and_an_epsilon():
    assert parse_settings(tomllib.loads(make_settings_template())) == parse_settings(
        {}, {"privacy.epsilon": TEMPLATE_VALUES["privacy.epsilon"]}
    )


def test_template_shows_every_setting_at_its_default_when_uncommented():
    lines = make_settings_template().splitlines()
    uncommented = [line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in lines]
    raw = tomllib.loads("\n".join(uncommented))
    assert set(list_setting_fields()) == {"method"} | {
        f"{section}.{name}" for section in SECTION_CLASSES for name in raw[section]
    }
    for field in list_setting_fields().values():
        if field.default is None:
            del raw[field.section][field.name]
    assert parse_settings(raw) == Settings()
    assert max(len(line) for line in lines) <= 120


# --- one source of words ----------------------------------------------------------------------


def test_catalogue_covers_the_dataclasses():
    fields = {f"{name}.{field.name}" for name, owner in SECTION_CLASSES.items() for field in dataclasses.fields(owner)}
    assert set(list_setting_fields()) == fields | {"method"}
    assert set(SETTING_CHOICES) | set(SETTING_RANGES) <= set(list_setting_fields())
    assert all(field.kind in EXPECTED_TYPE_TEXTS for field in list_setting_fields().values())


def test_every_setting_is_explained_once():
    assert [path for path, field in list_setting_fields().items() if not field.words] == []
    assert FIELD_TEXTS.keys() & _read_field_docstrings().keys() == set()
    assert FIELD_TEXTS.keys() <= list_setting_fields().keys()


def test_settings_page_is_in_step_with_the_settings():
    spec = importlib.util.spec_from_file_location("settings_page", DOCS / "settings_page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == page.page(), "run: make docs"
    assert json.dumps(Settings().train.rate) in page.page()


# --- names that something implements ------------------------------------------------------------


def test_every_setting_with_choices_refuses_a_wrong_name_with_the_nearest():
    from fulcrum.settings.checks import get_setting

    for path in SETTING_CHOICES:
        names = list_choices(path)
        assert get_setting(Settings(), path) in names, path
        section, name = path.split(".")
        wrong = f"{names[-1]}x"
        with pytest.raises(ConfigError) as caught:
            check_choices(Settings().replace(**{section: {name: wrong}}))
        said = str(caught.value)
        assert said.startswith(f"{path} = {wrong!r} is not known; choose one of "), said
        assert "did you mean" in said
        assert all(known in said for known in names), said


def test_every_choice_is_implemented_and_every_implementation_is_a_choice():
    from fulcrum.clipping import RULES
    from fulcrum.data.features import FEATURE_MAPS
    from fulcrum.data.partition import PARTITIONERS
    from fulcrum.data.tasks.losses import REGRESSION_LOSSES
    from fulcrum.engines import ENGINES
    from fulcrum.gradients.stacked.passes import PRECISIONS
    from fulcrum.models.builtin import ACTIVATIONS
    from fulcrum.privacy.accounting import ACCOUNTANTS
    from fulcrum.privacy.client_level import ESTIMATORS
    from fulcrum.privacy.schedule import SCHEDULES
    from fulcrum.privacy.scores import THRESHOLD_METRICS
    from fulcrum.privacy.statement.units import UNIT_TEXTS
    from fulcrum.rng import RANDOMNESS
    from fulcrum.settings.derived import LR_SCHEDULES, WEIGHT_POWERS
    from fulcrum.training.server import SERVERS

    special = {
        "data.partition": {"auto", "hashed", "given"},
        "data.features": {"none"},
        "run.engine": {"auto"},
        "privacy.unit": {"auto"},
        "privacy.randomness": {"auto"},
        "task.choose_threshold": {"none"},
    }
    registries: dict[str, Collection[str]] = {
        "data.partition": PARTITIONERS,
        "data.features": FEATURE_MAPS,
        "model.activation": ACTIVATIONS,
        "train.schedule": LR_SCHEDULES,
        "train.weights": WEIGHT_POWERS,
        "train.server": SERVERS,
        "clip.rule": RULES,
        "privacy.unit": UNIT_TEXTS,
        "privacy.accountant": ACCOUNTANTS,
        "privacy.randomness": RANDOMNESS,
        "privacy.noise_schedule": SCHEDULES,
        "client_level.estimator": ESTIMATORS,
        "run.engine": ENGINES,
        "run.precision": PRECISIONS,
        "task.loss": REGRESSION_LOSSES,
        "task.choose_threshold": THRESHOLD_METRICS,
    }
    for path, registry in registries.items():
        assert set(list_choices(path)) == set(registry) | special.get(path, set()), path
    others = {
        "task.imbalance",
        "model.coordinates",
        "model.norm",
        "clip.groups",
        "clip.phi",
        "clip.reading",
        "privacy.aggregation",
        "privacy.arithmetic",
    }
    assert set(SETTING_CHOICES) == set(registries) | others, (
        "these have no values, only names, where they are implemented"
    )


def test_every_name_in_the_settings_words_is_a_choice():
    """A choice that is added must be added to the words of its setting, or the docs would leave it out."""
    for path in SETTING_CHOICES:
        if path not in ("clip.rule",):
            words = list_setting_fields()[path].words
            assert all(name in words for name in list_choices(path)), path


def test_a_server_optimiser_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "halved.py").write_text(
        "from fulcrum.training.server import ServerOptimiser\n"
        "HALVED = ServerOptimiser(lambda d: {}, lambda aggregate, state, train: (0.5 * aggregate, state))\n"
        "WRONG = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from fulcrum.training.server import SERVERS

    settings = parse_settings({}, {"train.server": "halved:HALVED"})
    assert check_choices(settings).train.server == "halved:HALVED"
    change, _ = SERVERS.find("halved:HALVED").step(torch.tensor(3.0), {}, settings.train)
    assert change == 1.5
    assert "not a fulcrum.training.server.ServerOptimiser" in refusal({}, {"train.server": "halved:WRONG"})
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [Point] if group == "fulcrum.server_optimisers" else []
    )
    assert check_choices(parse_settings({}, {"train.server": "half"}))
    assert "did you mean 'half'?" in refusal({}, {"train.server": "halff"})


class Point:
    name, module, attr = "half", "halved", "HALVED"


# --- words of earlier versions ------------------------------------------------------------------


def test_old_words_are_translated_with_a_note(monkeypatch, capsys):
    from fulcrum.settings import renamed

    monkeypatch.setitem(renamed.RENAMED_PATHS, "clip.price", "clip.kappa")
    monkeypatch.setitem(renamed.RENAMED_VALUES, "train.server", {"plain": "sgd"})
    monkeypatch.setitem(renamed.REMOVED_PATHS, "run.colour", "take it away.")
    old = {"clip": {"price": 0.5}, "train": {"server": "plain"}}
    assert parse_settings(old) == parse_settings({"clip": {"kappa": 0.5}, "train": {"server": "sgd"}})
    err = capsys.readouterr().err
    assert "note: clip.price is called clip.kappa today\n" in err
    assert "note: train.server = 'plain' is called 'sgd' today\n" in err
    assert parse_settings({}, {"clip.price": 0.5}).clip.kappa == 0.5
    assert settings_from_keywords({"price": 0.5}).clip.kappa == 0.5
    capsys.readouterr()
    assert "both are given" in refusal({"clip": {"price": 0.5, "kappa": 0.1}})
    assert refusal({"run": {"colour": 1}}) == "run.colour is no longer a setting; take it away."
    assert parse_settings({"clip": {"kappa": 0.5}}).clip.kappa == 0.5
    assert capsys.readouterr().err == "", "no note where nothing is old"


def test_a_rename_changes_no_id_of_a_kept_result(monkeypatch):
    from fulcrum.settings import renamed
    from fulcrum.study.job import compute_job_id, settings_from_json

    settings = Settings().replace(clip={"kappa": 0.5})
    before = renamed.to_original_names(dataclasses.asdict(settings))
    assert before["clip"]["refresh"] == settings.clip.statistics_interval
    assert "client_level" not in before
    assert settings_from_json(before) == settings
    old = copy.deepcopy(before)
    old["clip"]["price"] = old["clip"].pop("kappa")
    monkeypatch.setitem(renamed.RENAMED_PATHS, "clip.price", "clip.kappa")
    assert settings_from_json(old) == settings
    assert renamed.to_original_names(dataclasses.asdict(settings)) == old, "ids are made from the first version's words"
    assert compute_job_id(settings, 1.0) != compute_job_id(settings.replace(clip={"kappa": 0.6}), 1.0)


def test_settings_written_before_options_are_read_and_keep_their_id():
    from fulcrum.study.job import compute_job_id, settings_from_json

    old = dataclasses.asdict(Settings())
    del old["clip"]["options"]
    assert settings_from_json(old) == parse_settings(old) == Settings()
    assert compute_job_id(Settings(), 1.0) != compute_job_id(Settings().replace(clip={"options": {"speed": 1.0}}), 1.0)


def test_clip_settings_stay_a_key_with_options_in_them():
    from fulcrum.settings.schema import Clip

    keyed = {Clip(options={"speed": 1.0}): "fast", Clip(): "plain"}
    assert keyed[Clip(options={"speed": 1.0})] == "fast"
    assert keyed[Clip()] == "plain"
