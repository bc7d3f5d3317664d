"""Several runs at once, in one tensor program, for studies: see `runs`.

runs.py         run_many: which runs share a stack, and the loop over rounds
stacking.py     what runs must have in common to share a stack
server.py       models, server optimisers, averages and clipping states of all runs
single_step.py  rounds of one local step: one sum per run
local_steps.py  rounds of several local steps, or of whole parties as units, over a table of jobs
jobs.py         the table of jobs: which party trains in which round
noise_at.py     clipping and noise: of local steps at the parties, or of updates at the server
per_job.py      any other round, job by job
watching.py     what a curious server may look at meanwhile: each party's releases
chunks.py       samples of jobs of any size, in chunks of equal length
"""

from __future__ import annotations

from fulcrum.engines.batched.runs import BatchedRoundResult, run_many
from fulcrum.engines.batched.stacking import can_stack_runs, make_stack_key

__all__ = ["BatchedRoundResult", "can_stack_runs", "make_stack_key", "run_many"]
