"""Cases in processes of their own, several at a time; one that hangs is ended."""

import multiprocessing
import signal
import time
from dataclasses import replace
from multiprocessing.connection import wait

from tests.support.engine_process import end_with_parent
from tests.vllm.harness.report import Outcome
from tests.vllm.harness.runner import run_case
from tests.vllm.harness.scenarios import slept

GRACE_S = 45.0
"""Seconds that a case may take to end its engines after its time limit; then they are killed with it."""


def is_alone(case):
    """Returns True if no other case may use its GPUs: vLLM compares free memory before and after it sleeps."""
    return case.scenario is slept


def run_jobs(jobs, folder, device, *, at_once, limit_s):
    """Run each `(case, connector)`, the ones that run alone last, and yield the arguments of `Report.add` as they end.
    The rest are ended when the caller closes the generator.
    """
    waiting = sorted(enumerate(jobs), key=lambda each: is_alone(each[1][0]))
    running = {}
    try:
        while waiting or running:
            while waiting and len(running) < (1 if is_alone(waiting[0][1][0]) else at_once):
                number, job = waiting.pop(0)
                pipe, process = _start(job, folder, replace(device, first=2 * number))
                running[pipe] = job, process, time.monotonic()
            ended = wait(list(running), timeout=1.0)
            now = time.monotonic()
            for pipe, (job, process, started) in list(running.items()):
                if pipe in ended or now > started + limit_s:
                    outcome = _result(pipe, f"the case took more than {limit_s:.0f} s")
                    del running[pipe]
                    _end(process)
                    yield job[0].name, job[1], outcome, now - started
    finally:
        if (
            running
        ):  # `timeout` signals the process and then its group: the second signal may not stop this
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        for _, process, _ in running.values():
            process.terminate()
        for _, process, _ in running.values():
            _end(process)


def _start(job, folder, device):
    context = multiprocessing.get_context("fork")
    pipe, child = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(child, *job, folder, device))
    process.start()
    child.close()
    return pipe, process


def _main(pipe, *arguments):
    end_with_parent()
    pipe.send(run_case(*arguments))


def _result(pipe, why_none):
    with pipe:
        try:
            return pipe.recv() if pipe.poll() else Outcome(complaints=[why_none])
        except EOFError:
            return Outcome(complaints=["the case's process died; see its engines' logs"])


def _end(process):
    """End a case's process in order or by force; its engines end with it."""
    process.join(1.0)
    process.terminate()
    process.join(GRACE_S)
    process.kill()
    process.join()
