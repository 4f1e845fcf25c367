"""Cases in processes of their own, several at a time; one that hangs is ended."""

import multiprocessing
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from tests.vllm.harness.cases import Case
from tests.vllm.harness.engine import end_with_parent
from tests.vllm.harness.runner import run_case
from tests.vllm.harness.scenarios import Outcome

GRACE_S = 45.0
"""For a case whose time is over, to end its engines; then they end with it."""


@dataclass(frozen=True)
class Job:
    """A case with one connector."""

    case: Case
    connector: str


@dataclass(frozen=True)
class Done:
    """How a job went, and its time in seconds."""

    job: Job
    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class _Running:
    job: Job
    process: BaseProcess
    started: float


def run_jobs(jobs, folder, device, *, at_once, limit_s):
    """Each job's result, in the order in which they end, those alone last; the rest is ended when the caller stops
    listening.
    """
    waiting = sorted(enumerate(jobs), key=lambda each: each[1].case.is_alone)
    running = {}
    try:
        while waiting or running:
            while waiting and len(running) < (1 if waiting[0][1].case.is_alone else at_once):
                number, job = waiting.pop(0)
                place = replace(device, first=2 * number)
                pipe, entry = _start(job, folder, place)
                running[pipe] = entry
            ended = wait(list(running), timeout=1.0)
            now = time.monotonic()
            for pipe, entry in list(running.items()):
                if pipe in ended or now > entry.started + limit_s:
                    del running[pipe]
                    found = _result(pipe, entry, f"the case took more than {limit_s:.0f} s")
                    yield Done(entry.job, found, now - entry.started)
    finally:
        for entry in running.values():
            entry.process.terminate()
        for entry in running.values():
            _end(entry.process)


def _start(job, folder, device):
    context = multiprocessing.get_context("fork")
    pipe, child = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(child, job, folder, device))
    process.start()
    child.close()
    return pipe, _Running(job, process, time.monotonic())


def _main(pipe, job, folder, device):
    end_with_parent()
    pipe.send(run_case(job.case, job.connector, folder, device))


def _result(pipe, entry, why_none):
    outcome = None
    if pipe.poll():
        why_none = "the case's process died; see its engines' logs"
        with suppress(EOFError):
            outcome = pipe.recv()
    if not isinstance(outcome, Outcome):
        outcome = Outcome(complaints=[why_none])
    pipe.close()
    _end(entry.process)
    return outcome


def _end(process):
    """In order, or not; engines go with the process that started them."""
    process.join(1.0)
    process.terminate()
    process.join(GRACE_S)
    process.kill()
    process.join()
