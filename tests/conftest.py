"""Which tests run where: `slow` in CI and on request, `gpu` where kernels run, `flower` with real processes.

make test                      # all but slow and flower, in under five minutes on two cores
make test-slow                 # the slow ones
FULCRUM_FLOWER=1 pytest tests/flower   # real Flower processes on loopback; needs the flower extra
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest

from support.devices import KERNELS_RUN


@pytest.fixture(scope="session", autouse=True)
def _own_record_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests key the fingerprints of private data by a file of their own, not by the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULCRUM_KEY_FILE", str(tmp_path_factory.mktemp("key") / "record.key"))
        yield


@pytest.fixture(autouse=True)
def _no_rehearsals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """moo rehearses before it trains, which takes seconds: only tests that ask for it do."""
    if not request.node.get_closest_marker("rehearsal"):
        monkeypatch.setattr("fulcrum.runs.rehearsal.apply.wants_rehearsal", lambda federation: False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and say why."""
    gpu = pytest.mark.skip(reason="needs a GPU, or triton and TRITON_INTERPRET=1")
    flower = pytest.mark.skip(reason="takes minutes: make test-flower, or FULCRUM_FLOWER=1 pytest")
    seen: Counter[str] = Counter()
    for item in items:
        if table := item.get_closest_marker("every"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % table.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
        if item.get_closest_marker("gpu") and not KERNELS_RUN:
            item.add_marker(gpu)
        if item.get_closest_marker("flower") and not os.environ.get("FULCRUM_FLOWER"):
            item.add_marker(flower)
