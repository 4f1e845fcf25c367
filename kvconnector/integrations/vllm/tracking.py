"""The scheduler half's memory of requests, across their lives. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvconnector.integrations.vllm.blocks import block_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from kvconnector.integrations.vllm.messages import GroupInfo
    from kvconnector.topology import GroupGeometry

REMEMBERED_REPORTS = 16384


class Reports:
    """The last `capacity` requests that workers reported, to distinguish a repeated report from another connector's."""

    def __init__(self, capacity: int = REMEMBERED_REPORTS) -> None:
        self._capacity = capacity
        self._seen: dict[str, None] = {}
        self._reasons: dict[str, str] = {}

    def explain(self, request_id: str, reason: str) -> None:
        """Remember why a request failed, until every worker has reported it."""
        self._reasons.setdefault(request_id, reason)

    def take_reason(self, request_id: str) -> str:
        """Return why a request that all workers have reported failed; "" if none of them gave a reason."""
        return self._reasons.pop(request_id, "")

    def add(self, request_ids: Iterable[str]) -> None:
        """Remember reported requests, and forget the oldest ones."""
        for request_id in request_ids:
            self._seen.pop(request_id, None)
            self._seen[request_id] = None
        while len(self._seen) > self._capacity:
            del self._seen[next(iter(self._seen))]

    def forget(self, request_id: str) -> None:
        """Forget a request, which may then be reported again."""
        self._seen.pop(request_id, None)

    def repeated(self, request_ids: Iterable[str]) -> set[str]:
        """Return those requests that were reported before."""
        return {request_id for request_id in request_ids if request_id in self._seen}


class IdleSteps:
    """Counts steps, to find those in which no tokens are computed while no step that computes some is in flight."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        # number of steps that vLLM plans before it takes the first one's results
        self._at_once = int(vllm_config.max_concurrent_batches)
        self._num_empty = self._at_once  # nothing is in flight before the first step
        # data parallel ranks run in lockstep: waiting here would delay the tokens of the others
        self._has_peers = vllm_config.parallel_config.data_parallel_size > 1

    def plan(self, num_tokens: int) -> bool:
        """Count a step that computes `num_tokens` tokens. Returns True if it is idle."""
        self._num_empty = 0 if num_tokens else self._num_empty + 1
        return self._num_empty >= self._at_once and not self._has_peers


class Siblings:
    """Requests that name the same producer request, as several completions of one prompt do.

    A producer's blocks are read once. The first request reads them; the others wait, and then find the blocks in the
    prefix cache.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], str] = {}
        self._source: dict[str, tuple[str, str]] = {}
        self._waiting: dict[str, str] = {}

    def add(self, request_id: str, engine_id: str, transfer_id: str) -> bool:
        """Add a request. Returns True if it is the first one for this transfer, and so the one that reads."""
        source = (engine_id, transfer_id)
        first = self._first.setdefault(source, request_id)
        if first == request_id:
            self._source[request_id] = source
            return True
        self._waiting[request_id] = first
        return False

    def first_of(self, request_id: str) -> str | None:
        """Return the request that this one waits for; None if it reads itself."""
        return self._waiting.get(request_id)

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended. Unknown ones are ignored."""
        self._waiting.pop(request_id, None)
        source = self._source.pop(request_id, None)
        if source is not None:
            del self._first[source]


class PartlyFilled:
    """Blocks of a window that a load does not fill: those before its first token, of which vLLM keeps some for models
    with several draft modules, and the one in which that token lies, if it is not the block's first.

    vLLM caches them like whole ones, and would give them to a request whose window begins earlier. So they are taken
    out of its prefix cache when a request that was loaded is scheduled or ends, before vLLM looks up another one. They
    are not offered to other engines either.
    """

    def __init__(self) -> None:
        self.evict_blocks: Callable[[set[int]], None] = lambda block_ids: None
        """Takes blocks out of the prefix cache; does nothing until vLLM has made one."""
        self.block_tokens: tuple[int, ...] = ()
        self._groups: tuple[GroupInfo, ...] = ()
        self._blocks: dict[str, list[tuple[int, int, int]]] = {}
        """Group, place in its table and id of each block, by request."""

    def register(self, groups: Sequence[GroupInfo], geometries: Sequence[GroupGeometry]) -> None:
        """Take the engine's cache groups, and their geometries on one rank."""
        self._groups = tuple(groups)
        self.block_tokens = tuple(map(block_tokens, groups, geometries))

    def expect(
        self,
        request_id: str,
        loaded: Sequence[tuple[int, int]],
        tables: Sequence[Sequence[KVCacheBlock]],
    ) -> None:
        """Record which blocks a load does not fill. `loaded` are the first token and the stop of each of our groups, if
        there is a load, in rows if it is compressed, and `tables` the blocks of each of vLLM's.
        """
        blocks = []
        for info, size, (start, stop) in zip(self._groups, self.block_tokens, loaded, strict=False):
            index, inside = divmod(start * info.row_tokens, size)
            if start >= stop:
                continue
            table, number = tables[info.vllm_group], info.vllm_group
            places = [index] if inside else []
            if info.keeps == "window":
                # down to those of a prefix hit, which have a hash, or to where the window kept nothing
                for place in range(min(index, len(table)) - 1, -1, -1):
                    if table[place].is_null or table[place].block_hash is not None:
                        break
                    places.append(place)
            blocks += [(number, place, table[place].block_id) for place in places]
        if blocks:
            self._blocks[request_id] = blocks

    def evict(self, request_id: str) -> None:
        """Take the blocks of a request's load out of the prefix cache, if there are any."""
        if blocks := self._blocks.get(request_id):
            self.evict_blocks({block for _, _, block in blocks})

    def are_in(self, request_id: str, tables: Sequence[Sequence[int]]) -> bool:
        """Return True if a request still has such a block: its window has not left it."""
        blocks = self._blocks.get(request_id, ())
        return any(tables[group][index] == block for group, index, block in blocks)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._blocks.pop(request_id, None)
