"""`fulcrum check` names the mistake of each faulty client, and finds none in right ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import fulcrum
from fulcrum.analysis.detectors.foreign import mistakes
from fulcrum.cli import main
from fulcrum.errors import InputError
from support import clients

FAULTY = {
    "unclipped": mistakes.NO_CLIPPING,
    "clips_the_batch": mistakes.CLIPPED_BATCH,
    "averages_before_clipping": mistakes.AVERAGED,
    "too_little_noise": mistakes.NOISE,
    "noise_of_another_C": mistakes.NOISE,
    "noise_on_half": mistakes.NOISE,
    "shuffles": mistakes.SHUFFLING,
    "divides_by_actual_batch": mistakes.DIVISOR,
    "divides_then_adds_noise": mistakes.DIVISOR,
    "tells_statistics": mistakes.STATISTICS,
    "tells_feature_means": mistakes.STATISTICS,
    "make_telling_flower": mistakes.STATISTICS,
    "one_seed": mistakes.SEEDS,
    "few_seeds": mistakes.SEEDS,
    "clips_each_view": mistakes.NOISE,
    "clips_coordinates": mistakes.NOISE,
    "clips_microbatches": mistakes.AVERAGED,
    "laplace_noise": mistakes.FORM,
    "truncated_noise": mistakes.FORM,
    "one_random_number": mistakes.NOISE,
    "cancelling_noise": mistakes.NOISE,
    "standardises": mistakes.STATISTICS,
    "C_from_the_batch": mistakes.STATISTICS,
    "twice_the_rate": mistakes.RATE,
    "nothing_for_empty_samples": mistakes.NOISE,
    "noise_in_most_calls": mistakes.NOISE,
    "seed_of_the_hour": mistakes.SEEDS,
}
QUICK = (
    "clips_microbatches",
    "laplace_noise",
    "standardises",
    "clips_the_batch",
    "too_little_noise",
    "shuffles",
    "tells_feature_means",
    "few_seeds",
)
CLAIMS = {**clients.CLAIMS, "epsilon": 20.2}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAULTY])
def test_a_faulty_client_is_told_its_mistake(name: str) -> None:
    result = fulcrum.check(getattr(clients, name), CLAIMS)
    assert FAULTY[name] in [mistake.what for mistake in result.mistakes]
    assert not result.ok
    assert len(result.mistakes) <= 2, [mistake.what for mistake in result.mistakes]


@pytest.mark.parametrize("name", [pytest.param("right", marks=pytest.mark.slow), "right_without_seed", "make_flower"])
def test_a_right_client_is_told_none(name: str) -> None:
    result = fulcrum.check(f"support.clients:{name}", CLAIMS)
    assert result.ok, result.mistakes
    assert result.sigma == pytest.approx(1.0, rel=0.1)
    assert result.lower_total <= result.epsilon_claimed
    assert result.kind == ("flower" if "flower" in name else "function")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["right_softmax", "right_normalised", "right_augmented", "right_full_sum"])
@pytest.mark.parametrize("seed", [1, 10_001, 20_001])
def test_right_clients_of_other_styles_are_told_none(name: str, seed: int) -> None:
    result = fulcrum.check(getattr(clients, name), CLAIMS, seed=seed)
    assert result.ok, result.mistakes
    assert result.kind == "function"
    assert result.sigma == pytest.approx(1.0, rel=0.12)
    assert result.lower_total <= result.epsilon_claimed


def test_weights_are_told_from_updates() -> None:
    with pytest.raises(InputError, match='output = "params"'):
        fulcrum.check(clients.right_weights, CLAIMS, replays=200)
    result = fulcrum.check(clients.right_weights, {**CLAIMS, "output": "params"})
    assert result.ok, result.mistakes
    assert result.sigma == pytest.approx(1.0, rel=0.12)
    with pytest.raises(InputError, match="where it starts from cannot be measured"):
        fulcrum.check(lambda params, data, seed: data[0][0], {**CLAIMS, "output": "params"}, replays=100)


def test_the_measured_rate_prices_the_measured_mechanism() -> None:
    result = fulcrum.check(clients.twice_the_rate, CLAIMS)
    assert result.sigma == pytest.approx(1.0, rel=0.15)
    assert result.epsilon_measured > 1.5 * result.epsilon_claimed


def test_a_factory_with_further_options_is_a_factory() -> None:
    def make(data: Any, seed: int, honest: bool = True) -> Any:
        return clients.FlowerLike(data, seed, honest)

    assert fulcrum.check(make, CLAIMS, replays=100).kind == "flower"


@pytest.mark.slow
def test_a_full_batch_needs_no_sampling() -> None:
    claims = {"sigma": 1.0, "rate": 1.0, "sampling": "full", "steps": 10}
    assert fulcrum.check(clients.right_full_batch, claims).ok
    poisson = fulcrum.check(clients.right_full_batch, {"sigma": 1.0, "rate": 0.25, "steps": 10})
    assert mistakes.SHUFFLING in [mistake.what for mistake in poisson.mistakes]  # every record is in every step


def test_a_budget_per_round_is_not_a_total() -> None:
    single = fulcrum.check(clients.right, {**CLAIMS, "epsilon": 3.1})
    assert [mistake.what for mistake in single.mistakes] == [mistakes.BUDGET]
    assert "100 steps" in single.mistakes[0].says


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "rate"), [(0.6, 0.05), (2.0, 0.25), (1.0, 0.5)])
@pytest.mark.parametrize("seed", range(1, 200_001, 20_000))
def test_right_clients_of_other_terms_are_told_none(sigma: float, rate: float, seed: int) -> None:
    def client(params: Any, data: Any, own: int) -> Any:
        generator = clients.np.random.default_rng(own)
        rows = clients.clip(clients.gradients(params, data))[generator.random(len(data[0])) < rate]
        return rows.sum(axis=0) + sigma * generator.standard_normal(data[0].shape[1])

    result = fulcrum.check(client, {"sigma": sigma, "rate": rate, "steps": 50}, seed=seed)
    assert result.ok, result.mistakes
    assert result.sigma == pytest.approx(sigma, rel=0.15)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"rate": 0.1}, "sigma is missing"),
        ({"sigma": -1.0}, "sigma = -1.0; it must be a number above 0"),
        ({"sigma": 1.0, "rates": 0.1}, "did you mean"),
        ({"sigma": 1.0, "sampling": "sorted"}, "poisson, shuffle, full"),
        ({"sigma": 1.0, "steps": 1.5}, "a whole number"),
    ],
)
def test_wrong_claims_are_refused(claims: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fulcrum.check(clients.right, claims)


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (clients.breaks, "the client failed: RuntimeError: no such file: /private/place"),
        (lambda params, data, seed: "text", "no array of numbers"),
        (lambda params, data, seed: [1.0], "fewer than two numbers"),
        (lambda params, data, seed: [1.0] * (2 + seed % 2), "different lengths"),
        (3, "must be a function"),
        ("support.clients:nobody", "has no attribute"),
        (lambda params, data, seed: clients.noise(clients.np.random.default_rng(seed), 5), "do not move"),
        (lambda data, seed: object(), "must return \\(model, optimizer, loader\\)"),
    ],
)
def test_what_cannot_be_called_is_one_sentence(client: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        fulcrum.check(client, CLAIMS, replays=100)


@pytest.mark.slow
def test_an_opacus_like_script_is_stepped() -> None:
    torch = pytest.importorskip("torch")

    def make(data: Any, seed: int) -> Any:
        x, y = torch.tensor(data[0]), torch.tensor(data[1])
        model = torch.nn.Linear(x.shape[1], 2, bias=False)
        torch.nn.init.zeros_(model.weight)
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(len(x), generator=generator) < 0.25

        class Optimizer:
            def zero_grad(self) -> None:
                model.weight.grad = None

            def step(self) -> None:
                slopes = 0.5 - torch.eye(2)[y[chosen]]
                rows = slopes[:, :, None] * x[chosen][:, None, :]
                norms = rows.flatten(1).norm(dim=1).clamp_min(1e-12)
                total = (rows * (1 / norms).clamp(max=1)[:, None, None]).sum(dim=0)
                noise = torch.randn(total.shape, generator=generator)
                with torch.no_grad():
                    model.weight -= 0.1 * (total + noise)

        return model, Optimizer(), [(x[chosen], y[chosen])]

    result = fulcrum.check(make, CLAIMS, replays=300)
    assert result.kind == "opacus"
    assert result.ok, result.mistakes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("sampled", "mistake"), [(True, None), (False, mistakes.SHUFFLING)])
def test_opacus_itself(sampled: bool, mistake: str | None) -> None:
    opacus = pytest.importorskip("opacus", reason="Opacus is not installed")
    torch = pytest.importorskip("torch")

    def make(data: Any, seed: int) -> Any:
        torch.manual_seed(seed)
        x, y = torch.tensor(data[0]), torch.tensor(data[1])
        model = torch.nn.Linear(x.shape[1], 2, bias=False)
        torch.nn.init.zeros_(model.weight)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=max(1, len(x) // 4), shuffle=True
        )
        return opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=sampled,
        )

    result = fulcrum.check(make, CLAIMS, replays=200)
    assert result.kind == "opacus"
    assert [each.what for each in result.mistakes] == ([] if mistake is None else [mistake])


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = Path(clients.__file__).read_text(encoding="utf-8")
    (tmp_path / "their_clients.py").write_text(source, encoding="utf-8")
    (tmp_path / "claims.toml").write_text("sigma = 1.0\nrate = 0.25\nsteps = 100\nepsilon = 20.2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_clients", raising=False)
    return tmp_path


def test_the_command_says_what_it_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "their_clients:right", "--claims", "claims.toml"]) == 0
    assert "no mistake found" in capsys.readouterr().out

    assert main(["check", "their_clients:right", "--claims", "claims.toml", "--epsilon", "3.1", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["mistakes"][0]["mistake"] == mistakes.BUDGET
    assert told["epsilon"]["promised"] == 3.1


@pytest.mark.slow
def test_the_command_shows_a_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "their_clients:shuffles", "--claims", "claims.toml"]) == 3
    assert "shuffling sold as Poisson" in capsys.readouterr().out


def test_the_command_refuses_in_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["their_clients:right"], "sigma is missing"),
        (["their_clients:nobody", "--sigma", "1"], "has no attribute"),
        (["their_clients:breaks", "--sigma", "1"], "the client failed"),
        (["their_clients:right", "--claims", "none.toml"], "cannot be read"),
    ):
        assert main(["check", *words]) == 2
        said = capsys.readouterr().err
        assert told in said
        assert len(said.strip().splitlines()) == 1
