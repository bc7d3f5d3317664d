"""What cannot learn is said before training, without a value of a private record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fulcrum
from fulcrum.data import from_arrays
from fulcrum.errors import DataError, ModelError
from fulcrum.models.learnable import find_token_limits

WORDS: dict[str, Any] = {"parties": 2, "epsilon": 8.0, "rounds": 1, "rate": 0.5}


class Reader(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.table, self.places, self.head = nn.Embedding(words, 4), nn.Embedding(6, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        out: Tensor = self.head(x.mean(dim=1))
        return out


def make_tokens(public: bool) -> fulcrum.Dataset:
    ids = torch.arange(240).view(40, 6) % 17
    return from_arrays(ids, torch.arange(40) % 2, classes=2, public=public)


def test_token_ids_beyond_the_table_are_refused_without_naming_them() -> None:
    assert find_token_limits(Reader(17), make_tokens(True).x[:2]) == {"x": (17, "table.weight")}
    fulcrum.prepare(settings_of(WORDS), make_tokens(True), Reader(17))
    for public in (True, False):
        with pytest.raises(DataError, match=r"x holds token ids outside.*table\.weight has 16 rows") as caught:
            fulcrum.prepare(settings_of(WORDS), make_tokens(public), Reader(16))
        assert "17" not in str(caught.value)


def settings_of(words: dict[str, Any]) -> fulcrum.Settings:
    from fulcrum.settings.files import settings_from_keywords

    return settings_from_keywords(words)


def make_numbers(scale: float = 1.0, classes: int = 2, public: bool = True) -> fulcrum.Dataset:
    torch.manual_seed(0)
    return from_arrays(scale * torch.randn(40, 3), torch.arange(40) % 2, classes=classes, public=public)


@pytest.mark.parametrize("public", [True, False])
def test_numbers_that_overflow_gradients_are_refused(public: bool) -> None:
    fulcrum.prepare(settings_of(WORDS), make_numbers(1e6, public=public), nn.Linear(3, 2))
    with pytest.raises(DataError, match=r"x holds numbers beyond 1e\+15.*public constant"):
        fulcrum.prepare(settings_of(WORDS), make_numbers(1e30, public=public), nn.Linear(3, 2))


def test_a_network_of_nan_is_refused() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x) / 0.0 * 0.0
            return out

    with pytest.raises(ModelError, match="NaN or infinite outputs for made-up examples"):
        fulcrum.prepare(settings_of(WORDS), make_numbers(), Broken())
    weights = nn.Linear(3, 2)
    with torch.no_grad():
        weights.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="Parameter 'weight' holds NaN"):
        fulcrum.prepare(settings_of(WORDS), make_numbers(), weights)


def test_classes_that_nobody_holds_are_named_where_the_data_is_public() -> None:
    warnings = fulcrum.prepare(settings_of(WORDS), make_numbers(classes=4), nn.Linear(3, 4)).problem.dataset.warnings
    assert any("class 2, 3 (2 of 4 classes)" in words for words in warnings)
    private = fulcrum.prepare(settings_of(WORDS), make_numbers(classes=4, public=False), nn.Linear(3, 4))
    assert not any("Nobody holds" in words for words in private.problem.dataset.warnings)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear, "model is the class Linear"),
        ([1], "hand over a torch.nn.Module"),
        (nn.Linear(3, 2).half(), "is float16; .* model.float"),
        (nn.DataParallel(nn.Linear(3, 2)), "model.module"),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), "model.norm=group"),
        (nn.Linear(4, 2), "The model failed on two examples"),
        (nn.Linear(3, 2, device="meta"), "meta device"),
    ],
)
def test_a_module_that_cannot_train_gets_one_sentence(model: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        fulcrum.train(make_numbers(), model, **WORDS)
    assert "\n" not in str(caught.value)


def test_own_code_may_import_from_the_current_folder_as_it_runs(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fulcrum.cli import main

    (tmp_path / "late_help.py").write_text("FACTOR = 1.0\n")
    (tmp_path / "late_model.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def forward(self, x):\n        import late_help\n\n"
        "        return super().forward(x) * late_help.FACTOR\n\n\ndef make(outputs):\n"
        "    return Net(nn.Flatten(), nn.Linear(64, outputs))\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--model", "late_model:make", "--epsilon", "8", "--rounds", "1", "--parties", "2"]
    assert main(["run", *words, "--out", "run", "-q"]) == 0, capsys.readouterr().err
    assert main(["evaluate", "run"]) == 0
