"""The loop's steps of a direct read of a peer's memory: one part per call, or all at once on a GPU."""

from __future__ import annotations

from kvconnector_kernels.pump import helpers, steps
from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.native import call, load_flag
from kvconnector_kernels.pump.steps import helper


@helper
def _begin(state, read):
    """Make one call for a read."""
    if read.started_ns == 0:
        read.started_ns = steps.now_ns(state)
    value = (read.fence_value + 1) & 0xFFFFFFFF
    status = call(read.function, (read.context, read.jobs, read.fence, value))
    read.num_calls += 1
    if status == r.MORE:
        return
    read.all_begun = 1
    read.fence_value = value
    if status != r.ALL:
        steps.fail(read, r.READ_ERROR, status, 0)


@helper
def begin_reads(state):
    """Make one call for one of the reads, in turn: the loop looks at nothing else meanwhile."""
    reads = steps.reads_of(state)
    for _ in range(reads.shape[0]):
        turn = state.read_turn % reads.shape[0]
        state.read_turn = turn + 1
        read = reads[turn]
        if read.phase == r.RUNNING and not read.stopped and not read.all_begun:
            _begin(state, read)
            return True
    return False


@helper
def end_reads(state):
    """End reads that write nothing more. Returns True if there are any."""
    reads = steps.reads_of(state)
    ended = False
    for index in range(reads.shape[0]):
        read = reads[index]
        if read.phase != r.RUNNING:
            continue
        if read.stopped and not read.all_begun:
            helpers.close(read.fence, read.fence_value)
        if (read.stopped or read.all_begun) and load_flag(read.fence) == read.fence_value:
            read.phase = r.OVER
            read.ended_ns = steps.now_ns(state)
            ended = True
    return ended


@helper
def is_reading(state):
    """Returns True if a read is under way, which no descriptor shows."""
    reads = steps.reads_of(state)
    num_running = 0
    for index in range(reads.shape[0]):
        num_running += reads[index].phase == r.RUNNING
    return num_running > 0
