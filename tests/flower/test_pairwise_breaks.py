"""A coordinator that rolls back, ends and starts runs, splits views or sends odd numbers: noise never comes twice.

The coordinator's own code plays the attacker, with requests that it should not send; what it learns is compared with
what independent noise would leave.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fulcrum-fl[flower]'")

import torch
from torch import Tensor

from fulcrum.flower.messages import Envelope, read_message_header
from fulcrum.flower.pairwise import coordinator as masked
from fulcrum.flower.pairwise import manifest as manifests
from fulcrum.flower.pairwise import party as masked_party
from fulcrum.privacy.pairwise.integers import keep_low_bits, sum_messages
from fulcrum.types import ClientReply, RoundRequest
from support.flower import serve
from support.pairwise import federation, kind, masked_settings, size


class Attacker:
    """The coordinator of a run that has ended, with every request that it made, and its transport still open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[RoundRequest] = []
        self.sums: list[Tensor] = []
        self.player: masked.MaskedCoordinator
        real = masked.MaskedCoordinator.run

        def watched(player: masked.MaskedCoordinator, request: RoundRequest) -> Any:
            self.player = player
            self.requests.append(request)
            replies = list(real(player, request))
            self.sums.append(add_up(replies))
            yield from replies

        monkeypatch.setattr(masked.MaskedCoordinator, "run", watched)

    def ask_again(self, round: int, shift: float = 0.0) -> Tensor:
        """The sum of the parties' answers to a round that they have answered before, at shifted weights."""
        request = self.requests[round]
        list(self.player.run(dataclasses.replace(request, params=request.params + shift)))
        return self.sums[-1]


def add_up(replies: list[ClientReply]) -> Tensor:
    return keep_low_bits(sum_messages([reply.delta for reply in replies]), replies[0].bits)


def count_equal(one: Tensor, other: Tensor) -> int:
    """Places of 21 in which two sums are equal. With noise of 2e4 units of its own in each, one is once in 8e4 times,
    and three of them once in 4e11; all are where the noise is the same."""
    return int((one == other).sum())


@pytest.mark.parametrize("ended", [True, False])
def test_a_round_that_is_asked_for_again_has_other_noise_and_is_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """After `done` a party forgets its key; its noise must still never come twice, or a difference would be bare."""
    settings = masked_settings(2)
    with federation(tmp_path, settings, simulation=False) as bus:
        attacker = Attacker(monkeypatch)
        if not ended:  # the coordinator never says that it is done
            send = bus.send
            monkeypatch.setattr(bus, "send", lambda k, ask, *more: "" if kind(ask) == "done" else send(k, ask, *more))
        serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        assert all((service._masked.key is None) == ended for service in bus.services.values())
        again = [attacker.ask_again(0) for _ in range(2)]
        sums = [attacker.sums[0], *again]
        for i, one in enumerate(sums):
            for other in sums[:i]:  # at the same weights: equal up to samples and noise, never in many places
                assert count_equal(one, other) < 3
        assert [len(service.ledger.entries(service.name)) for service in bus.services.values()] == [4, 4, 4]


def test_the_test_above_finds_noise_that_comes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong case: a party that counts its attempts anew when it forgets its key."""
    real = masked_party.MaskedRounds.forget

    def careless(self: masked_party.MaskedRounds) -> None:
        real(self)
        self.tries.clear()

    monkeypatch.setattr(masked_party.MaskedRounds, "forget", careless)
    settings = masked_settings(2)
    with federation(tmp_path, settings, simulation=False) as bus:
        attacker = Attacker(monkeypatch)
        serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        assert torch.equal(attacker.ask_again(0), attacker.sums[0])


def test_a_run_of_the_same_name_after_another_has_other_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = masked_settings(1)
    with federation(tmp_path, settings, simulation=False) as bus:
        attacker = Attacker(monkeypatch)
        serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        first = attacker.player
        serve(bus, settings, tmp_path / "other", monkeypatch, simulation=False)
        list(first.run(attacker.requests[0]))  # back to the first run's id
        assert count_equal(attacker.sums[-1], attacker.sums[0]) < 3


def test_dropping_one_party_on_purpose_leaves_the_others_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server fixes two sets of three and of two and wants their difference: it has noise of both, and two rows."""
    settings = masked_settings(1)
    with federation(tmp_path, settings, simulation=False) as bus:
        attacker = Attacker(monkeypatch)
        serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        bus.away = {2}
        fewer = attacker.ask_again(0)
        difference = keep_low_bits(attacker.sums[0] - fewer, 24).double()
        # One party's integers without noise would be on a grid of its own: nearly all the same size, few values.
        # Of 210 pairs each is equal once in 1e5 times: five of them are, once in 1e15.
        assert len(torch.unique(difference)) > 0.8 * len(difference)
        rows = [len(service.ledger.entries(service.name)) for service in bus.services.values()]
        assert rows == [2, 2, 1]


def test_split_views_are_uniform_also_where_only_the_attempt_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One party is shown attempt 7 of the same round: every other line is equal, and nothing cancels."""
    settings = masked_settings(1)
    real = masked.MaskedCoordinator._pack_manifest

    def split(self: Any, own: Any, manifest: manifests.Manifest, keys: Any) -> Envelope:
        shown = dataclasses.replace(manifest, attempt=7) if own.party == "party-1" else manifest
        return real(self, own, shown, keys)

    with federation(tmp_path, settings, simulation=False) as bus:
        attacker = Attacker(monkeypatch)
        monkeypatch.setattr(masked.MaskedCoordinator, "_pack_manifest", split)
        serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        assert size([attacker.sums[0]]) > 2**21  # uniform on 24 bits


ODD_LINES: dict[str, dict[str, Any]] = {
    "tiny": {"weight": 1e-160, "C": 1e-160, "sigma": 1.0, "tau": 1e-320},
    "small": {"weight": 1e-10, "C": 1e-10, "sigma": 1e-9, "tau": 1e-10 * 1e-10 * 1e-9},
    "huge": {"weight": 9e29, "C": 1.0, "sigma": 1.0, "tau": 9e29},
    "beyond": {"weight": 1e300, "C": 1e300, "sigma": 1e-300, "tau": 1e300},
    "many units": {"units": 2**31 - 1},
}


@pytest.mark.parametrize("odd", ODD_LINES)
def test_a_colluders_odd_numbers_are_refused_or_cost_the_honest_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    """Lines of two colluders lie; the honest party refuses in words, or masks with at least the noise it is owed."""
    settings = masked_settings(1)
    kept: list[manifests.Manifest] = []
    build = masked.MaskedCoordinator.make_manifest

    def lie(self: Any, *given: Any) -> manifests.Manifest:
        true = build(self, *given)
        lines = [
            line if line.party == "party-0" else dataclasses.replace(line, **ODD_LINES[odd])
            for line in true.participants
        ]
        try:
            grid, bits = manifests.compute_grid(lines, true.colluders)
        except (ValueError, OverflowError):
            grid, bits = true.grid, true.bits
        kept.append(dataclasses.replace(true, participants=tuple(lines), grid=grid, bits=bits))
        return kept[-1]

    replies: list[Envelope] = []
    with federation(tmp_path, settings, simulation=False) as bus:
        attacker = Attacker(monkeypatch)
        monkeypatch.setattr(masked.MaskedCoordinator, "make_manifest", lie)
        monkeypatch.setattr(masked, "MAX_ATTEMPTS", 1)

        def watch(k: int, request: Envelope, reply: Envelope) -> Envelope:
            if k == 0 and kind(request) == "manifest":
                replies.append(reply)
            return reply

        bus.tamper = watch
        with pytest.raises(Exception, match="void"):
            serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)
        rows = len(bus.services[0].ledger.entries("party-0"))
    assert attacker.requests
    (reply,) = replies
    header = read_message_header(reply, ("refused", "update"))
    if header["kind"] == "refused":
        assert header["code"] in ("manifest", "message")
        assert rows == 0
        return
    assert rows == 1
    # It took part: its own noise alone is at least what it is owed with all lines of the others false.
    own = next(line for line in kept[0].participants if line.party == "party-0")
    scales = manifests.compute_scales(kept[0].participants, kept[0].colluders)
    place = kept[0].place("party-0")
    assert scales[place] >= own.tau * (1 - 1e-9) / (len(scales) - kept[0].colluders) ** 0.5


def test_keys_of_another_run_or_party_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server relays party-1's key of an earlier run, whose signature is genuine, in place of the present one."""
    settings = masked_settings(1)
    with federation(tmp_path, settings, simulation=False) as bus:
        attacker = Attacker(monkeypatch)
        old: dict[str, Any] = {}
        read = masked.MaskedCoordinator._read_ready

        def note(self: Any, k: int, *given: Any) -> Any:
            found = read(self, k, *given)
            assert found is not None
            old.setdefault(found.key.party, found.key)
            return found

        monkeypatch.setattr(masked.MaskedCoordinator, "_read_ready", note)
        serve(bus, settings, tmp_path / "run", monkeypatch, simulation=False)

        def swap(self: Any, k: int, *given: Any) -> Any:
            found = read(self, k, *given)
            assert found is not None
            return dataclasses.replace(found, key=old["party-1"]) if found.key.party == "party-1" else found

        monkeypatch.setattr(masked.MaskedCoordinator, "_read_ready", swap)
        monkeypatch.setattr(masked, "MAX_ATTEMPTS", 1)
        codes: list[str] = []

        def watch(k: int, request: Envelope, reply: Envelope) -> Envelope:
            if kind(request) == "manifest" and kind(reply) == "refused":
                codes.append(json.loads(reply.header)["code"])
            return reply

        bus.tamper = watch
        with pytest.raises(Exception, match="void"):
            serve(bus, settings, tmp_path / "again", monkeypatch, simulation=False)
        assert set(codes) == {"peers", "manifest"}  # its peers refuse the key, and it refuses its own line
        assert attacker.requests
