"""The command line's words: options, errors, exit codes and tables. Nothing here trains."""

from __future__ import annotations

import errno
import inspect
import json
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from fulcrum.cli import demo, failures, main, run, show, view
from fulcrum.cli.options import with_settings
from fulcrum.errors import BudgetError, ConfigError, DownloadError, FulcrumError
from fulcrum.gradients import compiled
from fulcrum.settings.files import make_settings_template, parse_settings
from fulcrum.settings.presets import METHODS
from fulcrum.settings.schema import Settings

SOURCE = Path(__file__).parents[2] / "src"


def said(capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def settings_of(tmp_path, capsys, *words: str) -> Settings:
    """The settings that a command with these words would get."""
    got: list[Settings] = []

    @with_settings
    def command(settings: Settings, loud: bool = False) -> None:
        """Remember the settings."""
        got.append(settings)

    app = typer.Typer()
    app.command()(command)
    typer.main.get_command(app).main(list(words), standalone_mode=False)
    return got[0]


# --- what the words mean ----------------------------------------------------------------------


def test_options_become_settings(tmp_path, capsys):
    words = (
        "--data mnist --epsilon 1.64 --parties 10 --rounds 200 --method dp-sgd --set clip.kappa=0.01 --set run.seed=3"
    )
    expected = {"data.source": "mnist", "privacy.epsilon": 1.64, "data.parties": 10, "train.rounds": 200}
    assert settings_of(tmp_path, capsys, *words.split()) == parse_settings(
        {}, {**expected, "clip.kappa": 0.01, "run.seed": 3}, "dp-sgd"
    )


def test_options_win_over_the_file(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nrounds = 3\nlr = 0.5\n[privacy]\nepsilon = 2.0\n")
    settings = settings_of(tmp_path, capsys, str(file), "--rounds", "7", "--sigma", "1.5", "--loud")
    assert (settings.train.rounds, settings.train.lr) == (7, 0.5)
    assert (settings.privacy.epsilon, settings.privacy.sigma) == (None, 1.5)


def test_no_words_are_the_defaults(tmp_path, capsys):
    assert settings_of(tmp_path, capsys) == Settings().replace(clip={"rehearse": True})


def test_run_and_plan_share_their_settings():
    from fulcrum.cli import plan

    shared = set(inspect.signature(run.run).parameters) & set(inspect.signature(plan.plan).parameters)
    assert {"config", "method", "epsilon", "set_"} < shared


# --- wrong input: one sentence, exit 2 --------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run --epsilom 3", "error: no such option: --epsilom; did you mean --epsilon?"),
        ("run --set clip.kapa=1", "error: clip.kapa is not a setting; did you mean clip.kappa?"),
        ("run --set clip.kappa", "error: --set clip.kappa is not section.name=value"),
        ("run --epsilon 0", "error: privacy.epsilon = 0.0 is out of range"),
        ("run --epsilon=-1", "error: privacy.epsilon = -1.0 is out of range"),
        ("run --epsilon nan", "error: privacy.epsilon = nan is out of range"),
        ("run --epsilon 1 --sigma 1", "error: privacy.epsilon and privacy.sigma are both set"),
        ("run --delta 1", "error: privacy.delta = 1.0 is out of range"),
        ("run --rate 0", "error: train.rate = 0.0 is out of range"),
        ("run --rate 1.01", "error: train.rate = 1.01 is out of range"),
        ("run --parties 0", "error: data.parties = 0 is out of range"),
        ("run --partition dirichelt", "error: data.partition = 'dirichelt' is not known"),
        ("run --epsilon 1 --data x.npz --set privacy.accountant=rdq", "error: privacy.accountant = 'rdq' is not known"),
        ("plan --epsilon 1 --set privacy.noise_schedule=grow", "error: privacy.noise_schedule = 'grow' is not known"),
        ("plan --epsilon 1 --set client_level.estimator=mean", "error: client_level.estimator = 'mean' is not known"),
        ("run --method dpsgd", "error: method = 'dpsgd' is not known; did you mean dp-sgd?"),
        ("run --method zzz", f"error: method = 'zzz' is not known; choose one of {', '.join(METHODS)}."),
        ("run nowhere.toml", "error: nowhere.toml does not exist"),
        ("run .", "error: . is a folder"),
        ("run --rounds many", "error: Invalid value for '--rounds'"),
        ("run --out", "error: Option '--out' requires an argument"),
        ("rnu", "error: No such command 'rnu'"),
        ("run a.toml b.toml", "error: Got unexpected extra argument"),
        ("account --q 0.05", "error: give exactly two of --sigma, --epsilon and --steps"),
        ("account --q 2 --sigma 1 --steps 1", "error: --q 2 is out of range"),
        ("account --q 0.1 --sigma 0 --steps 1", "error: --sigma 0 is out of range"),
        ("account --q 0.1 --sigma 1 --steps=-1", "error: --steps -1 is out of range"),
        ("account --q 0.1 --epsilon 0 --steps 1", "error: --epsilon 0 is out of range"),
        ("account --q 0.1 --sigma 1 --steps 1 --delta 1", "error: delta = 1.0 is out of range"),
        ("account --q 0.1 --sigma 1 --steps 1 --accountant x", "error: privacy.accountant = 'x' is not known"),
        ("data fetch mnits", "error: data set 'mnits' is not known; did you mean 'mnist'?"),
        ("data verify mnits", "error: data set 'mnits' is not known; did you mean 'mnist'?"),
        ("plan --for-epsilon 1", "error: --for-epsilon asks how many rounds a budget allows"),
        ("plan --sigma 1 --for-epsilon 0", "error: epsilon = 0.0 is out of range"),
        ("show nowhere", "error: "),
        ("resume nowhere", "error: "),
    ],
)
def test_wrong_input_is_one_sentence(words, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = said(capsys, *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(sentence)
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_out_must_be_a_new_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "README").write_text("kept")
    _, _, err = said(capsys, "run", "--sigma", "1", "--out", "full/README")
    assert err.endswith("error: full/README is a file; choose a new folder as --out.\n")
    code, _, err = said(capsys, "run", "--sigma", "1", "--out", "full")
    assert code == 2
    assert err.endswith("error: folder full exists and is not empty; choose another --out.\n")
    assert (tmp_path / "full" / "README").read_text() == "kept"


def test_a_value_that_is_no_number_is_said_to_be_none(capsys):
    err = said(capsys, "run", "--epsilon", "four")[2]
    assert "must be a number" in err or "not a valid float" in err  # an older typer has its own words
    assert "unable to parse" not in said(capsys, "run", "--rounds", "2.5")[2]


def test_version_and_help(capsys):
    assert said(capsys, "--version")[1].startswith("fulcrum 0.")
    for words in ([], ["--help"], ["data"], ["run", "--help"]):
        code, out, err = said(capsys, *words)
        assert (code, err) == (0, "")
        assert "Usage" in out


def test_init_writes_once(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    assert said(capsys, "init", str(file))[0] == 0
    assert parse_settings(tomllib.loads(file.read_text(encoding="utf-8"))).privacy.epsilon == 4.0
    file.write_text("kept")
    code, _, err = said(capsys, "init", str(file))
    assert (code, file.read_text()) == (2, "kept")
    assert "exists" in err
    assert said(capsys, "init", str(tmp_path / "no" / "x.toml"))[0] == 2
    assert said(capsys, "init", "-")[1] == make_settings_template()


# --- failures ---------------------------------------------------------------------------------


def sqlite_full() -> sqlite3.OperationalError:
    database = sqlite3.connect(":memory:")
    database.execute("create table t (a)")
    database.execute("pragma max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError) as caught:
        database.execute("insert into t values (zeroblob(100000))")
    database.close()
    return caught.value


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConfigError("x is wrong."), 2, "error: x is wrong."),
        (BudgetError("spent."), 2, "error: spent."),
        (DownloadError("no mirror."), 1, "error: no mirror."),
        (caused(DownloadError("cannot write."), OSError(errno.ENOSPC, "full")), 2, "error: cannot write."),
        (FulcrumError("other."), 1, "error: other."),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 2, "error: the disk is full"),
        (RuntimeError("Error: No space left on device (os error 28)"), 2, "error: the disk is full"),
        (sqlite_full(), 2, "error: the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), 2, "error: /a/b: Permission denied."),
        (KeyError("a\nb"), 1, r"internal error: KeyError: 'a\nb'; run again with --debug"),
        (KeyboardInterrupt(), 130, "interrupted."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_failures_are_one_sentence(error, code, sentence, capsys):
    def fail() -> None:
        raise error

    assert failures.run_guarded(fail, ["run"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(sentence)
    assert err.count("\n") == 1
    assert failures.run_guarded(fail, ["run", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def interrupt(folder: Path, error: BaseException) -> None:
    with failures.explain_interruption(folder):
        raise error


def test_ctrl_c_says_how_to_go_on(tmp_path, capsys):
    folder = tmp_path / "a run"
    folder.mkdir()
    assert failures.run_guarded(lambda: interrupt(folder, KeyboardInterrupt()), []) == 130
    assert "nothing was kept" in capsys.readouterr().err
    (folder / "run.json").write_text("{}")
    assert failures.run_guarded(lambda: interrupt(folder, KeyboardInterrupt()), []) == 130
    assert capsys.readouterr().err == f"interrupted; continue with: fulcrum resume '{folder}'\n"


def test_a_spent_budget_before_the_first_round_is_wrong_input_and_later_is_not(tmp_path, capsys):
    assert failures.run_guarded(lambda: interrupt(tmp_path, BudgetError("spent.")), []) == 2
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert failures.run_guarded(lambda: interrupt(tmp_path, BudgetError("spent.")), []) == 1
    assert capsys.readouterr().err == "error: spent.\n" * 2


def test_a_closed_pipe_ends_quietly():
    command = [sys.executable, "-m", "fulcrum", "init", "-"]
    with subprocess.Popen(command, cwd=SOURCE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


# --- results ----------------------------------------------------------------------------------


def test_account_gives_the_third_of_two(capsys):
    def rows(words: str) -> dict:
        code, out, err = said(capsys, "account", "--q", "0.05", "--json", *words.split())
        assert (code, err) == (0, "")
        return json.loads(out)["accountants"]

    cost = rows("--sigma 2.07 --steps 200")
    assert 1.3 < cost["pld"]["epsilon"] < cost["rdp"]["epsilon"] < 1.8
    for name, row in rows("--epsilon 1.64 --steps 200").items():
        assert row["epsilon"] <= 1.64
        assert rows(f"--sigma {row['sigma'] * 0.99} --steps 200")[name]["epsilon"] > 1.64
    for name, row in rows("--epsilon 1.64 --sigma 2.07").items():
        assert row["epsilon"] <= 1.64
        assert rows(f"--sigma 2.07 --steps {row['steps'] + 1}")[name]["epsilon"] > 1.64
    assert list(rows("--sigma 2 --steps 5 --accountant pld")) == ["pld"]


def test_account_prints_plain_columns_in_a_pipe(capsys):
    _, out, _ = said(capsys, "account", "--q", "0.05", "--sigma", "2.07", "--steps", "200")
    head, *lines = out.splitlines()
    assert head.split() == ["accountant", "sigma", "steps", "epsilon", "delta"]
    assert [line.split()[0] for line in lines[:3]] == ["rdp", "pld", "in"]


def test_plan_says_how_many_rounds_a_budget_allows(capsys):
    words = ["plan", "--sigma", "2.07", "--rate", "0.05", "--for-epsilon", "1.64"]
    rounds = json.loads(said(capsys, *words, "--json")[1])["rounds"]
    assert 190 < rounds < 210
    assert said(capsys, *words)[1].startswith(f"{rounds} rounds of 1 step at")
    assert json.loads(said(capsys, *words, "--steps", "2", "--json")[1])["rounds"] == rounds // 2


def test_plan_says_what_layers_seconds_and_bytes_a_run_takes(capsys):
    words = ["plan", "--data", "digits", "--parties", "3", "--epsilon", "4", "--rounds", "20"]
    code, out, _ = said(capsys, *words)
    assert code == 0
    assert "1      ghost  " in out
    (time,) = [line for line in out.splitlines() if line.startswith("time  about ")]
    assert "for 20 rounds" in time
    assert "an estimate on this machine (cpu, engine parallel" in out
    (bytes_,) = [line for line in out.splitlines() if line.startswith("travels  to each party ")]
    assert "kB per round" in bytes_
    said_to_programs = json.loads(said(capsys, *words, "--json", "--no-timing")[1])
    assert said_to_programs["time"] is None
    assert said_to_programs["layers"][0]["way"] == "ghost"
    assert said_to_programs["traffic"]["participations"] == 60
    assert said_to_programs["traffic"]["counted"] == "messages"
    _, out, _ = said(capsys, *words, "--no-timing", "--set", "privacy.aggregation=ideal-secagg")
    assert "time  not estimated: not asked for" in out
    plain = " ".join(out.split())
    assert (
        "the arrays alone; not offered across machines: privacy.aggregation = 'ideal-secagg' is a simulation" in plain
    )


def test_plan_says_where_a_line_is_not_to_be_published(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", x=np.ones((30, 2)), y=np.arange(30) % 2, person=np.arange(30) // 3)
    words = ["plan", "--data", "own.npz", "--task", "binary", "--sigma", "1", "--parties", "2", "--no-timing"]
    assert "for your eyes, not to be published" in said(capsys, *words)[1]
    words = ["plan", "--data", "digits", "--sigma", "1", "--parties", "2", "--no-timing"]
    assert "for your eyes" not in said(capsys, *words)[1]


def test_plan_says_that_kernels_are_not_compiled(capsys, monkeypatch):
    words = ["plan", "--data", "digits", "--sigma", "1", "--parties", "2", "--no-timing"]
    monkeypatch.setattr(compiled, "find_kernels", lambda: None)
    monkeypatch.setattr(compiled, "compile_failures", ["there is no C compiler"])
    assert "kernels  not compiled: there is no C compiler; a step takes up to half more time" in said(capsys, *words)[1]
    monkeypatch.setattr(compiled, "find_kernels", object)
    assert "not compiled" not in said(capsys, *words)[1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0004, "0.4 ms"), (3.456, "3.46 s"), (59.97, "1 min"), (61, "1 min 1 s"), (3599.9, "1 h"), (90000, "1 d 1 h")],
)
def test_durations_are_short(seconds, words):
    assert view.format_seconds(seconds) == words


@pytest.mark.parametrize(("count", "words"), [(12, "12 B"), (999.9, "1 kB"), (2604, "2.6 kB"), (1.3e9, "1.3 GB")])
def test_bytes_are_short(count, words):
    assert view.format_bytes(count) == words


def test_methods_are_listed(capsys):
    rows = {row["name"]: row for row in json.loads(said(capsys, "methods", "--json")[1])}
    assert list(rows) == list(METHODS)
    assert (rows["moo-paper"]["sound"], rows["moo-paper"]["rule"]) == (False, "moo-paper")
    assert (rows["quantile"]["sound"], rows["quantile"]["unit"]) == (True, "example")
    assert rows["quantile"]["cost"].startswith("paid")
    assert rows["moo"]["cost"] == "free"
    _, out, err = said(capsys, "methods")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(rows)
    assert {line.split()[0] for line in lines if "†" in line} == {n for n, row in rows.items() if not row["sound"]}
    assert "dynamic, privacy.noise_schedule growth" in out
    assert "† nominal" in err


def test_data_list_and_verify(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FULCRUM_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = {row["name"]: row for row in json.loads(said(capsys, "data", "list", "--json")[1])}
    assert rows["digits"]["status"] == "public"
    assert (rows["mnist"]["status"], rows["mnist"]["where"]) == ("missing", None)
    assert said(capsys, "data", "verify")[0] == 0
    code, out, _ = said(capsys, "data", "verify", "mnist")
    assert code == 1
    assert out.count("missing") == 4


SUMMARY = {
    "method": "moo",
    "accuracy": 0.9123,
    "loss": 0.3,
    "epsilon": 3.98,
    "epsilon_pld": 3.6,
    "accountant": "rdp",
    "epsilons": {"party-0": 3.98, "party-1": 1.5},
    "delta": 1e-5,
    "unit": "example",
    "sound": True,
    "private": True,
    "status": "finished",
    "rounds": 3,
    "evaluated_on": "public test data",
    "C": [1.0, 2.0, 4.0],
    "settings": {},
}


def test_show_prints_a_finished_run(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    code, out, err = said(capsys, "show", str(tmp_path))
    assert (code, err) == (0, "")
    for words in (
        "91.2%",
        "3.98 for one example at delta 1e-05",
        "3.6 by pld",
        "party-0 3.98, party-1 1.5",
        "1 → 2 → 4",
        str(tmp_path),
    ):
        assert words in out
    assert "nominal" not in out
    shown = json.loads(said(capsys, "show", str(tmp_path), "--json")[1])
    assert shown == SUMMARY | {"folder": str(tmp_path)}


def test_show_never_claims_more_than_there_is():
    assert "nominal" in show.describe_guarantee(SUMMARY | {"sound": False})
    assert show.describe_guarantee(SUMMARY | {"private": False, "epsilon": "inf"}) == "none: nothing was protected"
    assert show.format_C_course(["inf", "inf"]) == "no clipping"
    assert show.format_C_course([1.0, 1.0]) == "1 throughout"
    assert show.format_epsilon_spread({f"party-{k}": 1.0 + k % 2 for k in range(16)}) == "1 to 2 over 16"
    assert show.format_epsilon_spread({"a": 4.0, "b": 4.0}) == "4 each of 2"


def test_show_of_an_unfinished_run_says_how_to_go_on(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"unit": "client"}')
    line = {"round": 1, "accuracy": 0.5, "epsilon": 1.0, "C": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    code, out, err = said(capsys, "show", str(tmp_path))
    assert code == 0
    assert "50.0%" in out
    assert "1 for one whole party" in out
    assert "fulcrum resume" in err
    assert json.loads(said(capsys, "show", str(tmp_path), "--json")[1])["rounds_done"] == 1


def test_numbers_and_courses():
    assert [view.format_value(x) for x in (None, 3, 0.12345, float("inf"), "a")] == ["-", "3", "0.1235", "inf", "a"]
    assert view.format_few_values([]) == "-"
    assert view.format_few_values([float(x) for x in range(101)], 3) == "0 → 50 → 100"
    assert view.format_few_values([1.0, 2.0], 6) == "1 → 2"
    bars = view.make_sparkline([2.0**x for x in range(8)], width=8)
    assert bars == view.SPARKLINE_BARS
    assert view.make_sparkline([1.0, 1.0]) == view.make_sparkline([]) == view.make_sparkline([1.0, float("inf")]) == ""


@given(value=st.floats(min_value=1e-6, max_value=1e6))
def test_a_printed_epsilon_is_never_too_small(value):
    printed = float(view.format_epsilon(value))
    assert value * (1 - 1e-9) <= printed <= value * 1.002
    assert view.format_epsilon(printed) == view.format_epsilon(value)


def test_printed_epsilons():
    shown = [view.format_epsilon(x) for x in (1.64401, 3.99999, 4.0, 0.0, float("inf"), "inf", None)]
    assert shown == ["1.645", "4", "4", "0", "inf", "inf", "-"]


def test_json_has_no_infinities(capsys):
    view.print_json({"epsilon": float("inf"), "loss": float("nan"), "C": (1.0, 2.0)})
    assert json.loads(capsys.readouterr().out) == {"epsilon": "inf", "loss": None, "C": [1.0, 2.0]}


# --- folders and the demo ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [("mnist", "mnist"), ("a/my patients.npz", "my-patients"), ("pkg.mod:load", "pkg.mod-load"), ("..", "data")],
)
def test_a_source_names_its_folder(source, name):
    assert run.make_source_slug(source) == name


def test_two_runs_of_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = []
    for _ in range(3):
        folders.append(run.choose_free_folder("digits-moo"))
        folders[-1].mkdir(parents=True)
    assert len(set(folders)) == 3
    assert all(folder.parent == Path("runs") for folder in folders)


def test_the_demo_compares_the_same_run():
    private = demo.make_demo_settings("moo")
    assert (private.data.source, private.data.parties, private.data.partition) == ("digits", 5, "dirichlet")
    assert (private.privacy.epsilon, private.privacy.delta) == (4.0, 1e-5)
    fixed, plain = demo.make_demo_settings("dp-sgd"), demo.make_demo_settings("none")
    assert fixed.replace(clip={"rule": "moo", "rehearse": True}) == private.__class__(
        **{**vars(private), "method": "dp-sgd"}
    )
    assert (plain.clip.rule, plain.privacy.epsilon, plain.train, plain.data) == (
        "none",
        None,
        private.train,
        private.data,
    )


# --- the unit -----------------------------------------------------------------------------------


def test_client_level_is_planned_with_its_unit_and_a_warning(capsys):
    words = ("plan", "--method", "dp-fedavg", "--data", "digits", "--parties", "10", "--epsilon", "4", "--rounds", "20")
    code, out, err = said(capsys, *words)
    assert code == 0
    assert "whole party" in out.splitlines()[1]
    assert "epsilon of one whole party" in out
    assert "hides a whole party among 10" in err
    code, out, err = said(capsys, *words, "--set", "privacy.unit=example")
    assert "epsilon of one example" in out
    assert "whole party" not in out + err
    assert json.loads(said(capsys, *words, "--json")[1])["unit"] == "client"
    terms = ("--sigma", "2", "--for-epsilon", "3", "--set", "train.participation=0.3")
    code, out, _ = said(capsys, "plan", "--method", "dp-fedavg", *terms)
    assert "rounds of 1 step at rate 0.3" in out


def test_the_summary_and_the_methods_say_what_epsilon_protects(capsys):
    summary = {"private": True, "sound": True, "accountant": "pld", "epsilon": 2.0, "delta": 1e-5, "unit": "client"}
    assert "2 for one whole party at delta" in show.describe_guarantee(summary)
    assert "2 for one person at delta" in show.describe_guarantee({**summary, "unit": "person"})
    _, out, _ = said(capsys, "methods")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert " client " in rows["dp-fedavg"]
    assert rows["median"].startswith("median †")


def test_wrong_names_are_refused_with_the_nearest_before_anything_runs(tmp_path, monkeypatch, capsys):
    from fulcrum.runs.choices import SETTING_CHOICES, list_choices

    monkeypatch.chdir(tmp_path)
    for path in SETTING_CHOICES:
        wrong = f"{list_choices(path)[-1]}x"
        assert main(["run", "--sigma", "1", "--set", f"{path}={wrong}", "--out", "never"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {path} = '{wrong}' is not known; "), err
        assert "did you mean" in err
        assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
