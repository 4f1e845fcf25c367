"""The loop's steps of a pull, which reads a peer's memory: a part a call, or all at once if a device does the rest."""

from __future__ import annotations

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import call, load_flag
from kvconnector_kernels.pump.steps import fail, helper, now_ns


@helper
def _begin(calls, pulls, pull):
    """One call for the pull."""
    if pulls[pull, r.STARTED_NS] == 0:
        pulls[pull, r.STARTED_NS] = now_ns(calls)
    value = (pulls[pull, r.PULL_FENCE_VALUE] + 1) & 0xFFFFFFFF
    status = call(
        pulls[pull, r.PULL],
        (pulls[pull, r.PULL_CONTEXT], pulls[pull, r.JOBS], pulls[pull, r.PULL_FENCE], value),
    )
    pulls[pull, r.NUM_CALLS] += 1
    if status == r.MORE:
        return
    pulls[pull, r.ALL_BEGUN] = 1
    pulls[pull, r.PULL_FENCE_VALUE] = value
    if status != r.ALL:
        fail(pulls, pull, r.PULL_ERROR, status, 0)


@helper
def begin_pulls(calls, head, pulls):
    """One call for one of the pulls, in turn: control waits for no more than that."""
    num_pulls = pulls.shape[0]
    for _ in range(num_pulls):
        pull = head[r.PULL_TURN] % num_pulls
        head[r.PULL_TURN] = pull + 1
        if (
            pulls[pull, r.PHASE] == r.RUNNING
            and not pulls[pull, r.STOPPED]
            and not pulls[pull, r.ALL_BEGUN]
        ):
            _begin(calls, pulls, pull)
            return True
    return False


@helper
def end_pulls(calls, pulls):
    """Whether a pull writes its blocks no more."""
    ended = False
    for pull in range(pulls.shape[0]):
        if pulls[pull, r.PHASE] != r.RUNNING:
            continue
        if pulls[pull, r.ALL_BEGUN]:
            is_over = load_flag(pulls[pull, r.PULL_FENCE]) == pulls[pull, r.PULL_FENCE_VALUE]
        else:
            # between two calls nothing is under way
            is_over = pulls[pull, r.STOPPED] != 0
        if is_over:
            pulls[pull, r.PHASE] = r.OVER
            pulls[pull, r.ENDED_NS] = now_ns(calls)
            ended = True
    return ended


@helper
def is_pulling(pulls):
    """Whether a pull is under way, of which no descriptor tells."""
    num_running = 0
    for pull in range(pulls.shape[0]):
        num_running += pulls[pull, r.PHASE] == r.RUNNING
    return num_running > 0
