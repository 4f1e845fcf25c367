"""Reads the scheduler output of any engine whose fields have vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Protocol, TypeAlias

BlockIdsByGroup: TypeAlias = Sequence[Sequence[int]]
"""New block ids, a list per cache group."""


class NewRequest(Protocol):
    """A request that is scheduled for the first time."""

    @property
    def req_id(self) -> str: ...
    @property
    def block_ids(self) -> BlockIdsByGroup: ...


class RunningRequests(Protocol):
    """Requests that were scheduled before, as parallel lists. `new_block_ids[i]` is None if it got no new blocks."""

    @property
    def req_ids(self) -> Sequence[str]: ...
    @property
    def new_block_ids(self) -> Sequence[BlockIdsByGroup | None]: ...
    @property
    def resumed_req_ids(self) -> Set[str]: ...


class EngineStep(Protocol):
    """One step of an engine's scheduler, in the names that vLLM uses."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]: ...
    @property
    def scheduled_cached_reqs(self) -> RunningRequests: ...


def yield_req_data(
    step: EngineStep, *, release: tuple[int, int]
) -> Iterator[tuple[str, BlockIdsByGroup | None, bool]]:
    """Yield the changes of a step to the block tables of its new and running requests.

    Args:
        step: The scheduler's output.
        release: vLLM's (major, minor), by which the third value is meant.

    Yields:
        The request's id, its new block ids per group (None for no new ones), and a truth value. Up to release 0.32 it
        is True if the request resumes after a preemption. Since 0.33 it is True if the ids are the whole table, as for
        a new or a resumed request. Other ids extend the request's table.
    """
    is_table_whole = release >= (0, 33)
    for request in step.scheduled_new_reqs:
        yield request.req_id, request.block_ids, is_table_whole
    running = step.scheduled_cached_reqs
    for request_id, block_ids in zip(running.req_ids, running.new_block_ids, strict=True):
        yield request_id, block_ids, request_id in running.resumed_req_ids
