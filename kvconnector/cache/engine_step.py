"""Reading an engine's scheduler output, whatever engine it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Protocol, TypeAlias

BlockIdsByGroup: TypeAlias = Sequence[Sequence[int]]
"""New block ids, one list a cache group."""


class NewRequest(Protocol):
    """A request that is scheduled for the first time."""

    @property
    def req_id(self) -> str: ...
    @property
    def block_ids(self) -> BlockIdsByGroup: ...


class RunningRequests(Protocol):
    """Requests that were scheduled before: parallel lists. `new_block_ids[i]` is None where nothing was allocated."""

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
    """Yield what a step changes in the block tables of its new and running requests.

    Args:
        step: the scheduler's output.
        release: the release of vLLM whose meaning the third value has.

    Yields:
        The request's id, its new block ids per group (None: no new ones), and until release 0.32 whether it is resumed
        after a preemption; since 0.33 whether the ids are its whole table, as those of a new or a resumed request are.
        Other ids come after those that the request has.
    """
    is_table_whole = release >= (0, 33)
    for request in step.scheduled_new_reqs:
        yield request.req_id, request.block_ids, is_table_whole
    running = step.scheduled_cached_reqs
    for request_id, block_ids in zip(running.req_ids, running.new_block_ids, strict=True):
        yield request_id, block_ids, request_id in running.resumed_req_ids
