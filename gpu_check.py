"""Scratch: every rule on cuda, stacked engine against reference on the same device."""
import sys, time
sys.path[:0] = ["src", "tests"]
import dataclasses, torch, warnings
from fulcrum.clip import RULES
from fulcrum.config import Clip
from fulcrum.engine.reference import ReferenceEngine
from fulcrum.engine.stacked import StackedEngine
from fulcrum.rng import Secure
from fulcrum.types import Assignment, RoundRequest
from helpers import toy_data, toy_model, toy_problem
dev = torch.device("cuda")
print(torch.__version__, torch.cuda.get_device_name())
bad = 0
for rule in RULES:
    try:
        for every in (1, 2):
            p = toy_problem(rule, parties=3, device=dev, model=toy_model().to(dev))
            state = {n: v.to(dev) for n, v in p.rule.init(Clip(C0=0.5, kappa=0.1, reading="hypergradient"), p.shape).items()}
            tasks = tuple(Assignment(k, 0.5, 0.0, 2, 0.3, every) for k in range(3))
            req = RoundRequest(1, 10, p.layout.flatten(p.model).to(dev), tasks, (state,) * 3, 0.01)
            full = dataclasses.replace(req, assignments=tuple(dataclasses.replace(t, rate=1.0) for t in tasks))
            a, e = list(ReferenceEngine(p).run(full)), StackedEngine(p)
            b = list(e.run(full)); b = list(e.run(full))
            for x, y in zip(a, b):
                torch.testing.assert_close(x.delta, y.delta, rtol=1e-3, atol=1e-5)
                torch.testing.assert_close(x.extra, y.extra, rtol=1e-3, atol=1e-5)
                torch.testing.assert_close(x.state["C"], y.state["C"], rtol=1e-4, atol=1e-6)
                assert x.events == y.events
            noisy = dataclasses.replace(req, assignments=tuple(dataclasses.replace(t, sigma=1.0) for t in tasks))
            assert all(torch.isfinite(r.delta).all() for r in e.run(noisy))
        print("ok", rule, e.notes)
    except Exception as error:
        bad += 1
        print("FAIL", rule, type(error).__name__, str(error)[:300])
from fulcrum.config import Settings, Data
from fulcrum.data import split, unit_counts
from fulcrum.engine import find_engine
from fulcrum.federate import Federation, federate
from fulcrum.ledger import Ledger
from fulcrum.many import run_many
from fulcrum.methods import METHODS
from fulcrum.models import Layout
from fulcrum.plan import make_plan
from fulcrum.clip import find_rule
from fulcrum.local import Problem
from fulcrum.rng import Seeded
data = toy_data(600)
def make(m):
    s = Settings().replace(data={"source": "toy", "parties": 4, "partition": "iid", "min_examples": 5}, train={"rounds": 6, "rate": 0.2, "lr": 0.5}, privacy={"sigma": 1.0})
    s = s.replace(**{k: dict(v) for k, v in METHODS[m].parts.items()})
    part = split(data, s.data, 0)
    model = toy_model().to(dev)
    prob = Problem(data, part, model, Layout.of(model), find_rule(s.clip.rule), Seeded(0), device=dev)
    plan = make_plan(s, part, unit_counts(data, part, "example"), prob.rule)
    return Federation(s, prob, plan, find_engine("auto", prob))
for m in METHODS:
    if METHODS[m].unit == "client":
        continue
    try:
        t = time.time()
        f = make(m)
        with Ledger.open(":memory:") as ledger:
            rounds = [r for r, _ in federate(f, ledger, "r")]
        many = list(run_many([make(m), make(m)]))
        print("run", m, rounds[-1].accuracy, many[-1].accuracy.tolist(), rounds[-1].C[:2], many[-1].C[0, :2].tolist(), round(rounds[-1].epsilon, 3), round(time.time() - t, 1), f.engine.notes)
    except Exception as error:
        import traceback; traceback.print_exc()
        bad += 1
        print("RUN FAIL", m, type(error).__name__, str(error)[:300])
print("bad", bad)
