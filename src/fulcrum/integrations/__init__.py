"""Other people's loops: an ordinary PyTorch loop, Lightning, the Hugging Face Trainer (docs/own-loop.md).

loop.py        `fulcrum.private`, and the handle that it returns
terms.py       the public terms: settings, plan, sampling rate
loader.py      the Poisson loader
recording.py   the model's forward, recorded
following.py   how its parameters are followed; the only file that knows the insides of `gradients`
loss_trace.py  the loss of each example, from a loss of the batch
stepping.py    clipped sums, the release, what the optimizer gets
account.py     the ledger's side, and the statement
checks.py      what is refused before the start
"""

from __future__ import annotations

from fulcrum.integrations.loop import Privacy, PrivateLoop, private

__all__ = ["Privacy", "PrivateLoop", "private"]
