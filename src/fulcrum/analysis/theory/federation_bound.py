"""The paper's Lemma 1: a bound on the federation's loss after each step of local training.

K clients hold L_k, with weights w_k; L = sum w_k L_k. In step t client k moves theta^k by -eta g^k, and after every N
steps all take the average. theta_t is the average at any t. In print, with t_c the last averaging step:

    E L(theta_{t+1}) - L* <= (1 - mu eta) (L(theta_t) - L*) + c_t
                             + eta/2 (-1 + lambda M eta (B1 + K)/K) G_t + B_t sum_j eta_j^2 G_t
    c_t = eta M B2^2/K (eta/2 + M (K+1)/K sum_j eta_j^2),   B_t = lambda (K+1) eta M^2/K^2 (B1 + N)
    G_t = |sum_k w_k (grad L_k(theta_t^k) + noise)|^2

Two things are wrong with it. The noise is inside G_t, and the identity 2<a,b> = |a|^2 + |b|^2 - |a-b|^2 is used as if
<grad L, noise> had the mean of |noise|^2: at the optimum of one client with noise the right side is negative
(`find_smallest_violation`). And gradients are taken to be unbiased, which clipped ones are not. The corrected form, for
g^k = grad L_k(theta^k) + b^k + xi^k with bias b^k and independent noise xi^k of total variance V_k:

    E L(theta_{t+1}) - L* <= (1 - mu eta) (L(theta_t) - L*) - eta/2 (1 - M eta) |gbar|^2
                             + eta/2 |grad L(theta_t) - gbar|^2 + M eta^2/2 sum_k w_k^2 V_k
    gbar = sum_k w_k (grad L_k(theta_t^k) + b^k)
    |grad L(theta_t) - gbar|^2 <= 2 M^2 sum_k w_k |theta_t - theta_t^k|^2 + 2 |sum_k w_k b^k|^2

Proof. M-smoothness of L with E<grad L, ghat> = <grad L, gbar> and E|ghat|^2 = |gbar|^2 + sum w_k^2 V_k gives
E L(theta_{t+1}) <= L(theta_t) - eta <grad L, gbar> + M eta^2/2 (|gbar|^2 + sum w_k^2 V_k). Put
-<a,b> = (-|a|^2 - |b|^2 + |a-b|^2)/2 with b = gbar, which has no noise, and |grad L|^2 >= 2 mu (L - L*). The last
line is
|x+y|^2 <= 2|x|^2 + 2|y|^2, Jensen and the clients' smoothness.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quadratics:
    """K clients with L_k = (theta - centre_k)' H_k (theta - centre_k) / 2.

    hessians [K, d, d], centres [K, d], weights [K].
    """

    hessians: Tensor
    centres: Tensor
    weights: Tensor

    def local_gradients(self, theta: Tensor) -> Tensor:
        """grad L_k(theta_k) for theta [K, d]: [K, d]."""
        return torch.einsum("kij,kj->ki", self.hessians, theta - self.centres)

    def loss(self, theta: Tensor) -> Tensor:
        """L(theta) for theta [d]."""
        away = theta - self.centres
        return (self.weights * torch.einsum("ki,kij,kj->k", away, self.hessians, away)).sum() / 2

    def gradient(self, theta: Tensor) -> Tensor:
        """grad L(theta) [d]."""
        return self.weights @ self.local_gradients(theta.expand_as(self.centres))

    def mean_hessian(self) -> Tensor:
        """The Hessian of L [d, d]."""
        return torch.einsum("k,kij->ij", self.weights, self.hessians)

    def optimum(self) -> Tensor:
        """theta* [d]."""
        pull = torch.einsum("k,kij,kj->i", self.weights, self.hessians, self.centres)
        found: Tensor = torch.linalg.solve(self.mean_hessian(), pull)
        return found

    def smoothness(self) -> float:
        """M: the largest eigenvalue of any client's Hessian."""
        return float(torch.linalg.eigvalsh(self.hessians).max())

    def pl_constant(self) -> float:
        """mu: the least eigenvalue of the mean Hessian."""
        return float(torch.linalg.eigvalsh(self.mean_hessian()).min())


@dataclass(frozen=True)
class Dissimilarity:
    """B1 and B2 of the paper's first assumption: sum_k |grad L_k - grad L|^2 <= B1 |grad L|^2 + B2^2 / K."""

    B1: float
    B2: float


def find_dissimilarity(problem: Quadratics, slack: float = 1.05) -> Dissimilarity:
    """B1 and B2 that hold for every theta. With e = theta - theta*, sum_k |A_k e + r_k|^2 - B1 |H e|^2 has a finite
    largest value once B1 passes the largest generalised eigenvalue; B2^2 / K is that value."""
    mean = problem.mean_hessian()
    apart = problem.hessians - mean
    best = problem.optimum()
    rest = problem.local_gradients(best.expand_as(problem.centres))
    square = torch.einsum("kij,kil->jl", apart, apart)
    inverse = torch.linalg.inv(mean)
    B1 = slack * float(torch.linalg.eigvalsh(inverse @ square @ inverse).max().clamp_min(0.0)) + 1e-9
    linear = torch.einsum("kij,ki->j", apart, rest)
    held = B1 * mean @ mean - square
    top = float(rest.square().sum()) + float(linear @ torch.linalg.solve(held, linear))
    return Dissimilarity(B1, (max(top, 0.0) * len(problem.weights)) ** 0.5)


@dataclass(frozen=True)
class LocalState:
    """The clients' weights [K, d] at step t. passed: local steps since the last averaging."""

    theta: Tensor
    passed: int


@dataclass(frozen=True)
class StepBounds:
    """Of one step: the expected loss above the optimum, the printed bound and the corrected one."""

    measured: float
    printed: float
    corrected: float


def bound_step(problem: Quadratics, state: LocalState, lr: float, steps: int, variances: Tensor) -> StepBounds:
    """Both bounds of a step with learning rate lr, N = steps, and noise of total variance variances [K] per client,
    conditional on the clients' weights; the measured value is exact, since the loss is quadratic."""
    count = len(problem.weights)
    average = problem.weights @ state.theta
    best = float(problem.loss(problem.optimum()))
    local = problem.local_gradients(state.theta)
    mean = problem.weights @ local
    spread = float((problem.weights.square() * variances).sum())
    dim = state.theta.shape[1]
    curvature = float(torch.trace(problem.mean_hessian())) / dim
    measured = float(problem.loss(average - lr * mean)) - best + lr**2 / 2 * curvature * spread
    gap = float(problem.loss(average)) - best
    M, mu = problem.smoothness(), problem.pl_constant()

    size = float(mean.square().sum()) + spread  # G_t, expected
    diversity = (float((problem.weights * (local.square().sum(dim=1) + variances)).sum())) / size
    unlike = find_dissimilarity(problem)
    past = state.passed * lr**2
    c_t = lr * M * unlike.B2**2 / count * (lr / 2 + M * (count + 1) / count * past)
    B_t = diversity * (count + 1) * lr * M**2 / count**2 * (unlike.B1 + steps)
    printed = (
        (1 - mu * lr) * gap
        + c_t
        + lr / 2 * (-1 + diversity * M * lr * (unlike.B1 + count) / count) * size
        + B_t * past * size
    )
    corrected = bound_step_correctly(gap, problem.gradient(average), mean, spread, lr, M, mu)
    return StepBounds(measured, printed, corrected)


def bound_step_correctly(
    gap: float, gradient: Tensor, mean: Tensor, spread: float, lr: float, M: float, mu: float
) -> float:
    """The corrected right side. gap: L(theta_t) - L*. gradient: grad L(theta_t) [d]. mean: gbar [d], with its bias.
    spread: sum of w_k^2 V_k."""
    return (
        (1 - mu * lr) * gap
        - lr / 2 * (1 - M * lr) * float(mean.square().sum())
        + lr / 2 * float((gradient - mean).square().sum())
        + M * lr**2 / 2 * spread
    )


def follow_bounds(
    problem: Quadratics, start: Tensor, lr: float, steps: int, rounds: int, noise: float = 0.0, seed: int = 0
) -> list[StepBounds]:
    """Both bounds at every local step of a federation, from weights start [d]. noise: standard deviation per coordinate
    and client."""
    generator = torch.Generator().manual_seed(seed)
    count, dim = problem.centres.shape
    variances = torch.full((count,), noise**2 * dim, dtype=torch.float64)
    theta = start.expand(count, dim).clone()
    found = []
    for t in range(rounds * steps):
        found.append(bound_step(problem, LocalState(theta, t % steps), lr, steps, variances))
        drawn = noise * torch.randn((count, dim), generator=generator, dtype=torch.float64)
        theta = theta - lr * (problem.local_gradients(theta) + drawn)
        if (t + 1) % steps == 0:
            theta = (problem.weights @ theta).expand(count, dim).clone()
    return found


def make_quadratics(clients: int, dim: int, alike: bool, seed: int = 0, spread: float = 1.0) -> Quadratics:
    """Random clients. alike: all with the same Hessian and centre."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    roots = draw(1 if alike else clients, dim, dim) / dim**0.5
    hessians = roots @ roots.transpose(1, 2) + 0.2 * torch.eye(dim, dtype=torch.float64)
    centres = spread * draw(1 if alike else clients, dim)
    weights = torch.full((clients,), 1 / clients, dtype=torch.float64)
    return Quadratics(hessians.expand(clients, dim, dim).clone(), centres.expand(clients, dim).clone(), weights)


def find_smallest_violation(lr: float = 0.5, noise: float = 1.0) -> StepBounds:
    """One client, one weight, L = theta^2 / 2, at the optimum.

    The loss after a noisy step is lr^2 noise^2 / 2 above the optimum on average; the printed bound is
    lr/2 (lr - 1) noise^2, negative for lr < 1.
    """
    one = torch.ones(1, 1, dtype=torch.float64)
    problem = Quadratics(one[None], 0 * one, torch.ones(1, dtype=torch.float64))
    return bound_step(problem, LocalState(0 * one, 0), lr, 1, torch.tensor([noise**2], dtype=torch.float64))


# --- clipped gradients: biased ----------------------------------------------------------------------


@dataclass(frozen=True)
class LogisticRegression:
    """One client's regularised logistic regression: x [n, d], y [n] of -1 and 1, penalty l2 |theta|^2 / 2."""

    x: Tensor
    y: Tensor
    l2: float

    def example_gradients(self, theta: Tensor) -> Tensor:
        """[n, d] at theta [d], the penalty apart."""
        return -(self.y * torch.sigmoid(-self.y * (self.x @ theta)))[:, None] * self.x

    def gradient(self, theta: Tensor) -> Tensor:
        """grad L [d]."""
        return self.example_gradients(theta).mean(dim=0) + self.l2 * theta

    def loss(self, theta: Tensor) -> Tensor:
        """L(theta)."""
        data = torch.nn.functional.softplus(-self.y * (self.x @ theta)).mean()
        return data + self.l2 * theta.square().sum() / 2

    def smoothness(self) -> float:
        """M, an upper bound: largest eigenvalue of x'x / (4 n), and the penalty."""
        return float(torch.linalg.eigvalsh(self.x.T @ self.x / len(self.x)).max()) / 4 + self.l2

    def minimise(self, steps: int = 4_000) -> Tensor:
        """theta* [d], by gradient descent with step 1/M and Nesterov's momentum."""
        theta = torch.zeros(self.x.shape[1], dtype=torch.float64)
        ahead, lr = theta, 1 / self.smoothness()
        root = (self.l2 * lr) ** 0.5
        keep = (1 - root) / (1 + root)
        for _ in range(steps):
            after = ahead - lr * self.gradient(ahead)
            ahead, theta = after + keep * (after - theta), after
        return theta


def follow_clipped_bounds(
    problem: LogisticRegression, C: float, lr: float, rounds: int, noise: float, seed: int = 0
) -> list[StepBounds]:
    """Measured loss (mean over draws), printed and corrected bound at each step of one client's clipped descent.

    noise: of the mean gradient, per coordinate, in units of C. In print, K = N = lambda = 1 and B1 = B2 = 0.
    """
    generator = torch.Generator().manual_seed(seed)
    best = float(problem.loss(problem.minimise()))
    M, mu, dim = problem.smoothness(), problem.l2, problem.x.shape[1]
    spread = (noise * C) ** 2 * dim
    theta = torch.full((dim,), 0.5, dtype=torch.float64)
    found = []
    for _ in range(rounds):
        rows = problem.example_gradients(theta)
        factors = (C / torch.linalg.vector_norm(rows, dim=1).clamp_min(1e-300)).clamp(max=1.0)
        mean = (factors[:, None] * rows).mean(dim=0) + problem.l2 * theta
        gradient, gap = problem.gradient(theta), float(problem.loss(theta)) - best
        z = torch.randn((200, dim), generator=generator, dtype=torch.float64)
        moved = theta - lr * (mean + noise * C * torch.cat([z, -z]))  # in pairs, so that the noise's mean is 0
        losses = torch.stack([problem.loss(row) for row in moved])
        size = float(gradient.square().sum()) + spread
        printed = (1 - mu * lr) * gap + lr / 2 * (-1 + M * lr) * size
        corrected = bound_step_correctly(gap, gradient, mean, spread, lr, M, mu)
        found.append(StepBounds(float(losses.mean()) - best, printed, corrected))
        theta = moved[0]
    return found
