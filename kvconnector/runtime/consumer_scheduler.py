"""The scheduler half of a decode engine, beside its scheduler. It decides and records; the workers move bytes.

Each engine step: `build_step` gives the news for every worker, and `update` takes their aggregated output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvconnector.config import ConnectorConfig
from kvconnector.errors import (
    BlockIdError,
    GeometryError,
    IncompatiblePeerError,
    LocalError,
    UnknownRequestError,
)
from kvconnector.planning import KeepsAll, KeepsState, Retention
from kvconnector.runtime.engine import engine_geometry
from kvconnector.runtime.params import TransferParams, wants_remote_prefill
from kvconnector.runtime.steps import (
    BlockList,
    LoadRequest,
    StepMetadata,
    WantRequest,
    WorkerMetadata,
)
from kvconnector.session import WorkerOutput
from kvconnector.topology import EngineGeometry, GroupGeometry


@dataclass(slots=True)
class _Remote:
    """A request whose blocks are on a producer. `stage`: wanted, loading, or over. `is_finished`: the engine has done
    with it, and only the load is still to end.
    """

    params: TransferParams
    stage: str = "wanted"
    is_finished: bool = False
    num_computed_tokens: int = 0

    def blocks(self) -> tuple[BlockList, ...]:
        """The producer's blocks by cache group."""
        return tuple(
            BlockList.of(ids, self.params.first_block(group))
            for group, ids in enumerate(self.params.remote_block_ids)
        )


def _check_retention(index: int, retention: Retention, group: GroupGeometry) -> None:
    if isinstance(retention, KeepsState) and group.block_size != 1:
        raise GeometryError(
            "a state is one token, and a block holds one", group=index, block_size=group.block_size
        )
    if not isinstance(retention, KeepsAll) and group.dcp_size > 1:
        raise GeometryError(
            "context parallel ranks share the tokens of groups that keep all of them, and of no others",
            group=index,
            retention=retention,
            dcp_size=group.dcp_size,
        )


class KVConsumerScheduler:
    """Decides how many tokens of a request come from its producer, and asks the workers to load them."""

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._retentions: tuple[Retention, ...] = ()
        self._engine: EngineGeometry | None = None
        self._is_announced = False
        self._requests: dict[str, _Remote] = {}
        self._wants: list[WantRequest] = []
        self._loads: list[LoadRequest] = []
        self._dropped: list[str] = []

    def set_worker_metadata(
        self,
        metadata: Sequence[WorkerMetadata],
        *,
        tp_size: int,
        pp_size: int,
        retentions: Sequence[Retention] | None = None,
    ) -> None:
        """Take what every worker registered.

        `retentions[group]` says what that cache group keeps of a sequence (None: all groups keep every token): only
        what the next token needs is loaded.

        Raises:
            GeometryError: the workers do not make up one engine, there are not as many retentions as groups, a group
                of states has blocks of several tokens, or ranks share the tokens of a group that keeps only some.
        """
        engine = engine_geometry(metadata, tp_size=tp_size, pp_size=pp_size)
        kept = tuple(retentions or [KeepsAll()] * engine.num_groups)
        if len(kept) != engine.num_groups:
            raise GeometryError(
                "there is one retention per cache group",
                retentions=len(kept),
                groups=engine.num_groups,
            )
        for index, (retention, group) in enumerate(zip(kept, engine.ranks[0].groups, strict=True)):
            _check_retention(index, retention, group)
        self._engine, self._retentions = engine, kept

    def on_new_request(self, request_id: str, kv_transfer_params: Mapping[str, Any] | None) -> None:
        """A request was queued: connect to its producer and keep its lease alive.

        Raises:
            RemoteProtocolError: the parameters name a remote prefill but cannot be used.
            IncompatiblePeerError: they are for another number of cache groups.
            LocalError: no worker metadata yet, or the request is queued already.
        """
        if not wants_remote_prefill(kv_transfer_params):
            return
        if request_id in self._requests:
            raise LocalError("a request was queued twice", request=request_id)
        params = TransferParams.from_mapping(kv_transfer_params or {})
        if self._engine is None:
            raise LocalError("worker metadata comes before the first request", request=request_id)
        if len(params.remote_block_ids) != self._engine.num_groups:
            raise IncompatiblePeerError(
                "the request's blocks are for another number of cache groups",
                request=request_id,
                theirs=len(params.remote_block_ids),
                ours=self._engine.num_groups,
            )
        self._requests[request_id] = _Remote(params)
        self._wants.append(
            WantRequest(
                request_id=request_id,
                transfer_id=params.remote_request_id,
                secret=params.transfer_secret,
                engine_id=params.remote_engine_id,
                address=params.address,
                public_key=params.remote_public_key,
            )
        )

    def get_num_new_matched_tokens(
        self, request_id: str, *, num_prompt_tokens: int, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """`(tokens to load beyond those computed here, whether that is asynchronous)`.

        `num_computed_tokens`: where the engine could go on by itself. The last prompt token is never among those to
        load: its query must run here to sample the next token. A producer's states are those of one position: the
        request goes on there, or nothing is loaded.
        """
        remote = self._requests.get(request_id)
        if remote is None or remote.stage != "wanted":
            return 0, False
        remote.num_computed_tokens = num_computed_tokens
        stop = self._resume_at(remote.params, num_prompt_tokens - 1)
        external = max(0, stop - num_computed_tokens)
        return external, external > 0

    def _resume_at(self, params: TransferParams, limit: int) -> int:
        """The position, up to `limit`, in front of which the producer has all that is needed; 0 if there is none."""
        available = min(params.remote_num_tokens, limit)
        states = {
            params.first_block(group) + len(params.remote_block_ids[group])
            for group, retention in enumerate(self._retentions)
            if isinstance(retention, KeepsState)
        }
        if not states:
            return available
        position = states.pop()
        return position if not states and position <= available else 0

    def update_state_after_alloc(
        self,
        request_id: str,
        *,
        block_ids: Sequence[Sequence[int]],
        num_external_tokens: int,
        first_blocks: Sequence[int] | None = None,
        computed_tokens: Sequence[int] | None = None,
    ) -> None:
        """The request's blocks are allocated: load `num_external_tokens` into them, or free the producer's if it is 0.

        `block_ids[group]` hold the sequence from its block `first_blocks[group]` on (None: from its first token); of a
        group that keeps states, they are the one block for it. `computed_tokens[group]` is how many leading tokens the
        group needs no more, where groups found a different number of them cached (None: in all as many as the engine
        had computed).

        Raises:
            UnknownRequestError: the request has no producer, or was loaded already.
            BlockIdError: block ids that no pool has, or not one list, first block and count per cache group.
        """
        remote = self._requests.get(request_id)
        if remote is None or remote.stage != "wanted":
            if num_external_tokens == 0:
                return
            raise UnknownRequestError(
                "nothing is to be loaded for this request", request=request_id
            )
        if num_external_tokens == 0:
            remote.stage = "over"
            self._dropped.append(request_id)
            return
        firsts = [0] * len(block_ids) if first_blocks is None else first_blocks
        computed = computed_tokens
        if computed is None:
            computed = [remote.num_computed_tokens] * len(block_ids)
        if {len(block_ids), len(firsts), len(computed)} != {len(self._retentions)}:
            raise BlockIdError(
                "a load names blocks, a first block and computed tokens of each cache group",
                request=request_id,
                groups=len(self._retentions),
                block_ids=len(block_ids),
                first_blocks=len(firsts),
                computed_tokens=len(computed),
            )
        stop = remote.num_computed_tokens + num_external_tokens
        ranges = [
            retention.missing(count, stop)
            for retention, count in zip(self._retentions, computed, strict=True)
        ]
        load = LoadRequest(
            request_id=request_id,
            token_ranges=tuple((tokens.start, tokens.stop) for tokens in ranges),
            local_blocks=self._local_blocks(block_ids, firsts, stop),
            remote_blocks=remote.blocks(),
        )
        remote.stage = "loading"
        self._loads.append(load)

    def _local_blocks(
        self, block_ids: Sequence[Sequence[int]], firsts: Sequence[int], stop: int
    ) -> tuple[BlockList, ...]:
        """Blocks that are loaded up to token `stop`; a state is the token in front of it."""
        return tuple(
            BlockList.of(ids, stop - 1 if isinstance(retention, KeepsState) else first)
            for retention, ids, first in zip(self._retentions, block_ids, firsts, strict=True)
        )

    def request_finished(self, request_id: str) -> None:
        """The request ended or was aborted here. What is still loading stops; `finished_recving` names it once nothing
        writes its blocks: keep them until then.
        """
        remote = self._requests.get(request_id)
        if remote is None:
            return
        if remote.stage != "over" and not remote.is_finished:
            self._dropped.append(request_id)
        remote.is_finished = True
        if remote.stage != "loading":
            del self._requests[request_id]

    def abort(self, request_id: str) -> None:
        """The same as `request_finished`, under the name that the producer's half has for it."""
        self.request_finished(request_id)

    def is_loading(self, request_id: str) -> bool:
        """Whether the request's blocks are being written: they must not be freed before `finished_recving`."""
        remote = self._requests.get(request_id)
        return remote is not None and remote.stage == "loading"

    def is_pending(self, request_id: str) -> bool:
        """Whether the request waits for its load to be asked for, or to end."""
        remote = self._requests.get(request_id)
        return remote is not None and remote.stage != "over"

    def build_step(self) -> StepMetadata:
        """The news since the last call, for every worker."""
        step = StepMetadata(
            engine=None if self._is_announced else self._engine,
            wants=tuple(self._wants),
            loads=tuple(self._loads),
            dropped=tuple(self._dropped),
        )
        self._is_announced = self._engine is not None
        self._wants, self._loads, self._dropped = [], [], []
        return step

    def update(self, output: WorkerOutput | None) -> None:
        """Take the engine's aggregated output of one step."""
        for request_id in output.finished_recving if output is not None else ():
            remote = self._requests.get(request_id)
            if remote is None:
                continue
            remote.stage = "over"
            if remote.is_finished:
                del self._requests[request_id]

    def close(self) -> None:
        """Nothing is held open; here for symmetry with the producer's half."""
        self._requests.clear()
