"""Runs prepared jobs where little is installed: Python, torch, numpy and safetensors.

    fulcrum study prepare paper-tune > jobs.json                          # here, where the accountant is
    python -m fulcrum.study.worker jobs.json --out DIR --data-dir DATA    # there
    fulcrum study merge DIR --into results/paper                          # here again

Results are written as they come; a job with a result in --out (or --done) is not run again, so
the same command continues after a crash. With --seconds it stops before the time is up.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fulcrum.errors import FulcrumError, RunError
from fulcrum.study.backends import BACKENDS, BackendOptions, MessageFn, TimeBudget, choose_backend, run_jobs
from fulcrum.study.job import JobShard, StudyJob, job_from_json, parse_shard
from fulcrum.study.provenance import MadeBy, describe_command, get_command_line, get_source_commit
from fulcrum.study.run_job import describe_machine, make_job_record
from fulcrum.study.store import ShardWriter, find_missing_jobs, load_finished_ids


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns 0 when all jobs are done, 3 when some are left, 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m fulcrum.study.worker", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("jobs", type=Path, help="file that `fulcrum study prepare` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--done", type=Path, action="append", default=[], help="further folder with finished runs")
    parser.add_argument("--data-dir", default="", help="folder that holds the data sets")
    parser.add_argument("--backend", default="auto", choices=["auto", *BACKENDS])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--stack", type=int, default=BackendOptions.stack, help="the most runs in one tensor program")
    parser.add_argument("--precision", default="", help="float32, tf32 or bf16; default: that of each job")
    parser.add_argument("--workers", type=int, default=0, help="processes, for backend processes; 0: one a core")
    parser.add_argument("--shard", default="0/1", help="i/n: run only part i of n of the jobs")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop cleanly before this time is up; 0: no limit")
    parser.add_argument("--commit", default="", help="commit of the source, where there is no git to tell it")
    words = parser.parse_args(argv)
    try:
        clock = TimeBudget(words.seconds)  # it starts before the jobs are read: the machine's limit counts that too
        how = BackendOptions(
            words.data_dir, words.device, words.stack, words.precision, words.workers, clock, print_progress_line
        )
        jobs = read_jobs_file(words.jobs)
        made_by = MadeBy(words.commit or get_source_commit(), describe_command("fulcrum.study.worker", argv))
        left = run_missing_jobs(
            jobs, words.out, words.backend, how, parse_shard(words.shard), words.done, made_by=made_by
        )
    except FulcrumError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 3 if left else 0


def print_progress_line(line: str) -> None:
    """A line of progress, at once."""
    print(line, file=sys.stderr, flush=True)


def read_jobs_file(file: Path) -> list[StudyJob]:
    """The jobs of a file that `fulcrum study prepare` wrote."""
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        return [job_from_json(job) for job in plain["jobs"]]
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is not what `fulcrum study prepare` writes: {error}.") from error


def run_missing_jobs(
    jobs: Sequence[StudyJob],
    out: Path,
    backend: str = "auto",
    how: BackendOptions | None = None,
    shard: JobShard | None = None,
    done: Sequence[Path] = (),
    on_done: MessageFn | None = None,
    made_by: MadeBy | None = None,
) -> int:
    """Run the jobs without a result and store each result at once; returns the shard's number of unfinished jobs.

    made_by: commit and command that each result names; default: those of this process.
    """
    how, shard = how or BackendOptions(say=print_progress_line), shard or JobShard()
    todo = [job for job in find_missing_jobs(jobs, load_finished_ids([out, *done])) if shard.contains_job(job)]
    if not todo:
        how.say(f"nothing to do: all {len(jobs)} jobs are finished" if shard.count == 1 else "nothing to do here")
        return 0
    chosen = choose_backend(how.device) if backend == "auto" else backend
    facts, made_by = describe_machine(how.device), made_by or MadeBy(get_source_commit(), get_command_line())
    how.say(f"{len(todo)} of {len(jobs)} jobs to run, backend {chosen}, device {facts['device']}")
    began, count = time.monotonic(), 0
    with ShardWriter(out, f"runs-{socket.gethostname()}-{shard}") as writer:
        for job, result in run_jobs(todo, chosen, how):
            writer.add(
                make_job_record(
                    job,
                    result,
                    {**facts, "backend": chosen, "precision": how.precision or job.settings.run.precision},
                    made_by,
                )
            )
            count += 1
            passed = time.monotonic() - began
            how.say(
                f"{count}/{len(todo)}  {passed:.0f} s  {job.cell} seed {job.seed}"
                + (f" trial {job.trial}" if job.trial is not None else "")
                + f"  {result.score.name} {result.score.text(result.value)}"
            )
            if on_done:
                on_done(job.id)
    if count < len(todo):
        how.say(f"{len(todo) - count} jobs left; the same command goes on with them")
    return len(todo) - count


if __name__ == "__main__":
    sys.exit(main())
