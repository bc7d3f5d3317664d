"""`fulcrum.private`: an ordinary PyTorch loop becomes private."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fulcrum.data.sampling import poisson_sample_units
from fulcrum.errors import BudgetError, ConfigError, RunError
from fulcrum.gradients.tape import GradientTape
from fulcrum.integrations.account import LoopAccount, write_statement
from fulcrum.integrations.checks import check_model
from fulcrum.integrations.loader import DrawnSample, PrivateLoader, cut_sample
from fulcrum.integrations.loss_trace import LossHistory
from fulcrum.integrations.recording import ModelRecorder
from fulcrum.integrations.stepping import (
    Penalty,
    StepSum,
    add_pass,
    drop_gradients,
    hand_to_optimizer,
    refuse_other_gradients,
    release_step,
)
from fulcrum.integrations.terms import LoopTerms, compute_stream_id, make_terms, refuse_fixed_options
from fulcrum.models.draws import make_example_keys
from fulcrum.rng import CipherRandomness, SecureRandomness, SeededRandomness, name_stream
from fulcrum.training.server import update_moving_average

STATE_FORMAT = 1
STATE_KEY = "fulcrum"
"""The entry of the optimizer's state_dict that holds the private loop's own state."""


ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


class PrivateLoop(NamedTuple, Generic[ModelT, OptimizerT]):
    """What `fulcrum.private` returns: model, optimizer and loader, to be used as before; `privacy` is the handle."""

    model: ModelT
    optimizer: OptimizerT
    loader: PrivateLoader

    @property
    def privacy(self) -> Privacy:
        """What was spent, the statement, the averaged weights, the state."""
        handle: Privacy = self.loader.privacy
        return handle


def private(
    model: ModelT,
    optimizer: OptimizerT,
    loader: DataLoader[Any],
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    epochs: float = 1,
    sigma: float | None = None,
    method: str = "moo",
    persons: Any = None,
    seed: int | None = None,
    ledger: str | Path | None = None,
    accumulate: int = 1,
    physical_batch: int | None = None,
    penalty: Penalty | None = None,
    public_numbers: bool = False,
    name: str = "loop",
    **options: Any,
) -> PrivateLoop[ModelT, OptimizerT]:
    """Make a PyTorch loop private: there is no clipping norm to set, and with `moo` no learning rate to find.

        model, optimizer, loader = fulcrum.private(model, optimizer, loader, epsilon=3.0, epochs=10)
        for epoch in range(10):
            for x, y in loader:
                optimizer.zero_grad()
                criterion(model(x), y).backward()
                optimizer.step()
        print(loader.privacy.statement())

    model and optimizer are the ones given; loader is a new one that draws Poisson samples: every record joins a batch
    with probability q = batch_size / records, so batches differ in size and may be empty. Call optimizer.step() for
    every batch. The loss is a mean or a sum of per-example losses, of the outputs of one call of the model.

    epsilon, delta: the guarantee after all epochs; sigma: a noise multiplier in place of epsilon. method: moo, dp-sgd
    or any other (`fulcrum methods`); options: settings by name, such as C0=1.0 or accountant="pld". With moo the rule
    sets the step, and the optimizer's learning rate is only what schedulers are factors of; with dp-sgd it is yours.
    persons [n]: whose record each is, so that persons are protected. seed: for simulations; None: secure random
    numbers that nobody can repeat. ledger: a file that adds up what several runs spend (budget= sets their limit);
    name: that of the data there. accumulate: batches per step, as in your loop's own gradient accumulation.
    physical_batch: about how many examples at a time; steps between are then skipped. penalty: model -> a number of
    its weights alone that is added to the loss. public_numbers: numbers that rescale the loss, and change, follow from
    public things such as a schedule.
    """
    check_model(model)
    refuse_fixed_options(options)
    words: dict[str, Any] = {"method": method, "delta": delta, **options}
    if epsilon is not None and sigma is not None:
        raise ConfigError("epsilon and sigma are both given; epsilon chooses the noise, sigma is the noise: give one.")
    words |= {"epsilon": epsilon} if epsilon is not None else {"sigma": sigma} if sigma is not None else {}
    words |= {"randomness": "secure" if seed is None else "seeded"}
    words |= {"seed": seed} if seed is not None else {}
    words |= {"ledger": os.path.abspath(ledger)} if ledger is not None else {}
    terms = make_terms(
        model,
        optimizer,
        loader,
        epochs=epochs,
        persons=persons,
        accumulate=accumulate,
        physical_batch=physical_batch,
        name=name,
        options=words,
    )
    history = LossHistory(accumulate=accumulate, public_numbers=public_numbers)
    privacy = Privacy(model, optimizer, terms, history, ledger, seed, penalty)
    privacy.attach()
    return PrivateLoop(model, optimizer, PrivateLoader(loader, privacy))


class Privacy:
    """The handle of a private loop: what it has spent, its statement, its state. Made by `fulcrum.private`.

    step: number of steps released so far. steps: number planned. sigma, rate: noise multiplier and Poisson rate q.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        terms: LoopTerms,
        history: LossHistory,
        ledger: str | Path | None,
        seed: int | None,
        penalty: Penalty | None,
    ) -> None:
        self.step = 0
        self._model, self._optimizer, self._terms, self._history = model, optimizer, terms, history
        self._penalty, self._seed = penalty, seed
        self._first_lrs = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        randomness: CipherRandomness = (
            SecureRandomness(uuid.uuid4().hex)
            if seed is None
            else SeededRandomness(seed, compute_stream_id(terms, model, seed))
        )
        self._account = LoopAccount(
            LoopAccount.open_ledger(ledger), terms, uuid.uuid4().hex, ledger is not None, randomness, seed
        )
        self._state = terms.make_rule_state(model)
        self._averaged = self._released = terms.layout.flatten(model)
        self._sample: tuple[int, int, DrawnSample] | None = None
        self._sum = StepSum()
        self._passes = 0
        expected = math.ceil(terms.rate * len(terms.party.index) / terms.pieces)
        self._recorder = ModelRecorder(model, terms.layout, history, self._add_tape, self._draw_keys, expected)
        self._handles: list[Any] = []
        self._registered = False

    def __deepcopy__(self, memo: Any) -> Privacy:
        return self  # a copy of a model or a loader still has one budget

    # --- what people ask ------------------------------------------------------------------------

    @property
    def epsilon(self) -> float:
        """The epsilon that was spent so far, at `delta`, as the ledger says."""
        return self._account.epsilon

    @property
    def delta(self) -> float:
        """The delta of the guarantee."""
        return self._terms.plan.delta

    @property
    def steps(self) -> int:
        """Number of steps that the noise was chosen for."""
        return self._terms.steps

    @property
    def sigma(self) -> float:
        """The noise multiplier, of the first step where a schedule moves it."""
        return self._terms.plan.groups[0].sigma

    @property
    def rate(self) -> float:
        """The probability q with which a record (or person) joins a sample."""
        return self._terms.rate

    @property
    def C(self) -> tuple[float, ...]:
        """The clipping norm now, one per group; it follows from releases alone."""
        return tuple(self._state["C"].tolist())

    @property
    def run(self) -> str:
        """The run's id in the ledger."""
        return self._account.run

    def report(self) -> dict[str, Any]:
        """The facts of the statement as plain values, as privacy.json has them."""
        return self._account.make_statement(self.step, ())

    def statement(self) -> str:
        """The privacy statement: the page that PRIVACY.md of a run is."""
        return write_statement(self.report())

    def released_weights(self) -> dict[str, Tensor]:
        """The trained parameters after the last step, by name: functions of releases, so they may leave."""
        return self._terms.layout.unflatten(self._released)

    @contextmanager
    def averaged_weights(self) -> Iterator[nn.Module]:
        """Within it the model has the moving average of its weights, which scores better where noise is large."""
        layout, now = self._terms.layout, self._terms.layout.flatten(self._model)
        layout.write(self._model, self._averaged)
        try:
            yield self._model
        finally:
            layout.write(self._model, now)

    # --- on and off -----------------------------------------------------------------------------

    def attach(self) -> None:
        """Record the model's passes, and stand before the optimizer's steps."""
        self._recorder.attach()
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            self._optimizer.register_state_dict_post_hook(self._add_state),
            self._optimizer.register_load_state_dict_pre_hook(self._take_state),
        ]

    def close(self) -> None:
        """Model and optimizer as they were; what they do from now on is not private any more."""
        self._recorder.detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._account.ledger.close()

    # --- samples --------------------------------------------------------------------------------

    @property
    def batches_per_epoch(self) -> int:
        """Batches of the loader per epoch."""
        return self._terms.epoch * self._terms.pieces

    def begin_epoch(self) -> range:
        """The steps from the one that is due to the end of its epoch; what was summed up of it begins anew."""
        if self.step >= self.steps:
            raise BudgetError(
                f"all {self.steps} planned steps are done, and the noise was chosen for these; plan more epochs from "
                "the start, or stop here."
            )
        self._sum, self._passes = StepSum(), 0
        end = (self.step // self._terms.epoch + 1) * self._terms.epoch
        return range(self.step, min(end, self.steps))

    def draw_sample(self, step: int) -> DrawnSample:
        """The Poisson sample of a step; the same one each time that it is asked for before its release."""
        attempt = self._account.count_attempts(step)
        if self._sample is not None and self._sample[:2] == (step, attempt):
            return self._sample[2]
        key = name_stream("sample", step, 0, 0, attempt=attempt)
        found = poisson_sample_units(self._account.randomness, key, self._terms.party, self._terms.rate)
        sample = cut_sample(*found, self._terms.pieces)
        if step == self.step:
            self._sample = (step, attempt, sample)
        return sample

    def _draw_keys(self, count: int) -> Tensor:
        """The keys by which random layers draw for the next `count` records of the sample that is due, [count].

        An example's numbers follow from the step's secret and its row alone, so no other example changes them.
        """
        if self.step >= self.steps:
            return torch.zeros(count, dtype=torch.int64)
        attempt = self._account.count_attempts(self.step)
        place = name_stream("dropout", self.step, 0, 0, attempt=attempt)
        high, low = (self._account.randomness.uniform(place, 2) * 2**32).long().tolist()
        rows = self.draw_sample(self.step).rows[self._sum.rows :][:count]
        rows = rows if len(rows) == count else torch.arange(count)  # no batch of this step: nothing comes of it
        return make_example_keys(int((high << 32) | low) - 2**63, rows)

    # --- steps ----------------------------------------------------------------------------------

    def _add_tape(self, tape: GradientTape, count: int, precision: str) -> None:
        if self.step >= self.steps:
            self._account.reserve(self.step, 0)  # says that the plan is at its end
        sample = self.draw_sample(self.step)
        self._passes += 1
        self._sum = add_pass(self._terms, self._state, self.step, sample, self._sum, tape, count, precision)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the optimizer's own step: release, or, between the pieces of a sample, let it do nothing."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._release()
            return None

        def run_then_release() -> Any:
            found = closure()
            self._release()
            return found

        if len(args) > 1:
            return (args[0], run_then_release, *args[2:]), kwargs
        return args, {**kwargs, "closure": run_then_release}

    def _release(self) -> None:
        if len(self._optimizer.param_groups) != len(self._first_lrs):
            raise ConfigError("the optimizer got another group of parameters; add it before fulcrum.private is called.")
        refuse_other_gradients(self._terms, self._model)
        drop_gradients(self._model)
        if self.step >= self.steps:
            self._account.reserve(self.step, 0)
        sample = self.draw_sample(self.step)
        if not self._passes:
            raise RunError(
                "optimizer.step() was called before backward(); every step needs one forward pass of the model in "
                "training mode and loss.backward(), also for an empty batch."
            )
        if self._sum.rows < len(sample.rows) or self._passes < self._terms.pieces:
            return  # more pieces of this sample are to come; empty ones count, so that accumulating loops stay in step
        if not self._registered:
            self._account.register()
            self._registered = True
        attempt = self._account.count_attempts(self.step)
        device = next(iter(self._model.parameters())).device
        found = release_step(self._terms, self._account, self._state, self.step, attempt, self._sum, device)
        self._sum, self._passes, self._sample = StepSum(), 0, None
        self._state, self.step = found.state, self.step + 1
        hand_to_optimizer(
            self._terms, self._model, self._optimizer, self._first_lrs, found, self._penalty, self._history.reduction
        )

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        drop_gradients(self._model)
        if self.step and not self._passes:
            self._released = params = self._terms.layout.flatten(self._model)
            self._averaged = update_moving_average(
                self._averaged.to(params), params, self._terms.settings.train.ema, self.step - 1
            )

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a loop needs to go on, beside the weights and the optimizer's own state; plain values and tensors.

        `optimizer.state_dict()` has it too, so that a checkpoint of model and optimizer is enough.
        """
        return {
            "format": STATE_FORMAT,
            "run": self._account.run,
            "stream": self._account.randomness.run if self._seed is not None else "",
            "step": self.step,
            "terms": self._terms.describe(),
            "rule": {name: value.detach().clone() for name, value in self._state.items()},
            "averaged": self._averaged.detach().clone(),
            "reduction": self._history.reduction,
            "first_lrs": list(self._first_lrs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. RunError where it is that of other settings, data or another model."""
        if state.get("format") != STATE_FORMAT:
            raise RunError(f"the state has format {state.get('format')!r}, and this Fulcrum reads {STATE_FORMAT}.")
        own = self._terms.describe()
        for key, value in own.items():
            if state["terms"].get(key) != value:
                raise RunError(
                    f"the state was saved by a loop with other {key}; call fulcrum.private with the arguments, the "
                    "data and the model of before."
                )
        device = next(iter(self._model.parameters())).device
        randomness = self._account.randomness
        if self._seed is not None:
            randomness = SeededRandomness(self._seed, str(state["stream"]))
        account = self._account
        self._account = LoopAccount(
            account.ledger, self._terms, str(state["run"]), account.kept, randomness, self._seed
        )
        self.step = int(state["step"])
        self._account.restore(self.step)
        self._state = {name: value.to(device) for name, value in state["rule"].items()}
        self._averaged = state["averaged"].to(device)
        self._history.reduction = str(state["reduction"])
        self._first_lrs = [float(value) for value in state["first_lrs"]]
        self._sample, self._sum, self._passes, self._registered = None, StepSum(), 0, False

    def _add_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, STATE_KEY: self.state_dict()}

    def _take_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if STATE_KEY in state:
            self.load_state_dict(state[STATE_KEY])
        return {name: value for name, value in state.items() if name != STATE_KEY}
