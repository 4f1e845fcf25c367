"""The scheduler half of an engine, beside its scheduler. It decides and records; the workers move bytes.

Each engine step: `build_step` gives the orders for every worker, and `update` takes their aggregated output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from kvconnector.config import ConnectorConfig
from kvconnector.errors import (
    BlockIdError,
    GeometryError,
    IncompatiblePeerError,
    LocalError,
    UnknownRequestError,
)
from kvconnector.ids import new_secret
from kvconnector.planning import KeepsAll, KeepsState, Retention
from kvconnector.runtime.channels import open_control
from kvconnector.runtime.directory import DirectoryService
from kvconnector.runtime.engine import directory_of, engine_geometry
from kvconnector.runtime.params import TransferParams, wants_remote_prefill
from kvconnector.runtime.steps import (
    BlockList,
    DropRequest,
    HoldRequest,
    LoadRequest,
    Order,
    StepMetadata,
    WantRequest,
    WithdrawRequest,
    WorkerMetadata,
)
from kvconnector.session import WorkerOutput
from kvconnector.topology import EngineGeometry, GroupGeometry


@dataclass(slots=True)
class _Remote:
    """A request whose blocks are on a producer. `is_finished`: the engine has done with it, and only the load is still
    to end.
    """

    params: TransferParams
    stage: Literal["wanted", "loading", "over"] = "wanted"
    is_finished: bool = False
    num_computed_tokens: int = 0

    def blocks(self) -> tuple[BlockList, ...]:
        """The producer's blocks by cache group."""
        return tuple(
            BlockList.of(ids, self.params.first_block(group))
            for group, ids in enumerate(self.params.remote_block_ids)
        )


class Scheduler:
    """Decides which finished requests are held for a consumer, and how many tokens of a new one come from a producer.

    `workers` is what every worker's `handshake` gave. `retentions[group]` says what that cache group keeps of a
    sequence (None: all groups keep every token): only what the next token needs is loaded. An engine that holds
    requests has a directory service on `control.host:port` until `close`.

    Raises:
        GeometryError: the workers do not make up one engine, there are not as many retentions as groups, a group of
            states has blocks of several tokens, or ranks share the tokens of a group that keeps only some.
        ConfigError: the address or the keys cannot be used.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        workers: Sequence[WorkerMetadata],
        *,
        retentions: Sequence[Retention] | None = None,
    ) -> None:
        self._config = config
        self._engine = engine_geometry(workers)
        self._retentions = _checked_retentions(self._engine, retentions)
        self._announced: Literal["no", "sent", "acknowledged"] = "no"
        self._orders: list[Order] = []
        self._held: set[str] = set()
        self._requests: dict[str, _Remote] = {}
        self._service: DirectoryService | None = None
        if config.role != "consumer":
            directory = directory_of(self._engine, workers)
            self._service = DirectoryService(open_control(config, config.control.port), directory)

    # -- an engine that holds requests --

    def offer(
        self,
        request_id: str,
        *,
        blocks: Sequence[Sequence[int]],
        num_tokens: int,
        first_blocks: Sequence[int] | None = None,
        lease_duration_s: float = 0.0,
    ) -> dict[str, Any]:
        """Hold a finished request's blocks for a consumer: the `kv_transfer_params` for it. The blocks must be kept
        until `finished_sending` names the request.

        `blocks[group]` hold the first `num_tokens` tokens, from block `first_blocks[group]` of the sequence on. A
        `lease_duration_s` above zero takes the place of the configured one until a consumer reads or renews.

        Raises:
            LocalError: this engine is a consumer, or the request is held already.
            BlockIdError: block ids that no pool has.
        """
        if self._service is None:
            raise LocalError("a consumer holds no requests", request=request_id)
        if request_id in self._held:
            raise LocalError("a request finished twice", request=request_id)
        firsts = list(first_blocks) if first_blocks is not None else [0] * len(blocks)
        hold = HoldRequest(
            request_id=request_id,
            transfer_id=request_id,
            secret=new_secret(),
            blocks=tuple(BlockList.of(*each) for each in zip(blocks, firsts, strict=True)),
            num_tokens=num_tokens,
            lease_duration_s=lease_duration_s,
        )
        address = urlsplit(self._service.address)
        params = TransferParams(
            remote_engine_id=self._config.engine_id,
            remote_request_id=request_id,
            remote_block_ids=[[int(block) for block in ids] for ids in blocks],
            remote_host=str(address.hostname),
            remote_port=int(address.port or 0),
            remote_num_tokens=num_tokens,
            transfer_secret=hold.secret,
            tp_size=self._engine.tp_size,
            pp_size=self._engine.pp_size,
            remote_first_blocks=firsts if any(firsts) else [],
            remote_public_key=self._service.server_key,
        )
        self._held.add(request_id)
        self._orders.append(hold)
        return params.to_mapping()

    @property
    def held(self) -> frozenset[str]:
        """Requests whose blocks must be kept for a consumer."""
        return frozenset(self._held)

    # -- an engine that loads requests --

    @property
    def num_loading(self) -> int:
        """Requests whose KV cache is on its way."""
        return sum(remote.stage == "loading" for remote in self._requests.values())

    def on_new_request(self, request_id: str, kv_transfer_params: Mapping[str, Any] | None) -> None:
        """A request was queued: connect to its producer, if it has one, and keep its lease alive.

        Raises:
            RemoteProtocolError: the parameters name a remote prefill but cannot be used.
            IncompatiblePeerError: they are for another number of cache groups.
            LocalError: this engine is a producer, or the request is queued already.
        """
        if kv_transfer_params is None or not wants_remote_prefill(kv_transfer_params):
            return
        if self._config.role == "producer":
            raise LocalError("a producer loads no requests", request=request_id)
        if request_id in self._requests:
            raise LocalError("a request was queued twice", request=request_id)
        params = TransferParams.from_mapping(kv_transfer_params)
        if len(params.remote_block_ids) != self._engine.num_groups:
            raise IncompatiblePeerError(
                "the request's blocks are for another number of cache groups",
                request=request_id,
                theirs=len(params.remote_block_ids),
                ours=self._engine.num_groups,
            )
        self._requests[request_id] = _Remote(params)
        self._orders.append(
            WantRequest(
                request_id=request_id,
                transfer_id=params.remote_request_id,
                secret=params.transfer_secret,
                engine_id=params.remote_engine_id,
                address=params.address,
                public_key=params.remote_public_key,
            )
        )

    def matched_tokens(
        self, request_id: str, num_prompt_tokens: int, num_computed_tokens: int
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

    def load(
        self,
        request_id: str,
        *,
        blocks: Sequence[Sequence[int]],
        num_tokens: int,
        first_blocks: Sequence[int] | None = None,
        computed_tokens: Sequence[int] | None = None,
    ) -> None:
        """The request's blocks are allocated: load `num_tokens` into them, or free the producer's if it is 0.

        `blocks[group]` hold the sequence from its block `first_blocks[group]` on (None: from its first token); of a
        group that keeps states, they are the one block for it. `computed_tokens[group]` is how many leading tokens the
        group needs no more, where groups found a different number of them cached (None: in all as many as the engine
        had computed).

        Raises:
            UnknownRequestError: the request has no producer, or was loaded already.
            BlockIdError: block ids that no pool has, or not one list, first block and count per cache group.
        """
        remote = self._requests.get(request_id)
        if remote is None or remote.stage != "wanted":
            if num_tokens == 0:
                return
            raise UnknownRequestError(
                "nothing is to be loaded for this request", request=request_id
            )
        if num_tokens == 0:
            remote.stage = "over"
            self._orders.append(DropRequest(request_id))
            return
        firsts = [0] * len(blocks) if first_blocks is None else first_blocks
        computed = computed_tokens
        if computed is None:
            computed = [remote.num_computed_tokens] * len(blocks)
        if {len(blocks), len(firsts), len(computed)} != {len(self._retentions)}:
            raise BlockIdError(
                "a load names blocks, a first block and computed tokens of each cache group",
                request=request_id,
                groups=len(self._retentions),
                blocks=len(blocks),
                first_blocks=len(firsts),
                computed_tokens=len(computed),
            )
        stop = remote.num_computed_tokens + num_tokens
        ranges = [
            retention.missing(count, stop)
            for retention, count in zip(self._retentions, computed, strict=True)
        ]
        load = LoadRequest(
            request_id=request_id,
            token_ranges=tuple((tokens.start, tokens.stop) for tokens in ranges),
            local_blocks=self._local_blocks(blocks, firsts, stop),
            remote_blocks=remote.blocks(),
        )
        remote.stage = "loading"
        self._orders.append(load)

    def _local_blocks(
        self, blocks: Sequence[Sequence[int]], firsts: Sequence[int], stop: int
    ) -> tuple[BlockList, ...]:
        """Blocks that are loaded up to token `stop`; a state is the token in front of it."""
        return tuple(
            BlockList.of(ids, stop - 1 if isinstance(retention, KeepsState) else first)
            for retention, ids, first in zip(self._retentions, blocks, firsts, strict=True)
        )

    def is_loading(self, request_id: str) -> bool:
        """Whether the request's blocks are being written: they must not be freed before `finished_recving`."""
        remote = self._requests.get(request_id)
        return remote is not None and remote.stage == "loading"

    def is_pending(self, request_id: str) -> bool:
        """Whether the request waits for its load to be asked for, or to end."""
        remote = self._requests.get(request_id)
        return remote is not None and remote.stage != "over"

    # -- every engine --

    def finish(self, request_id: str) -> None:
        """The engine has done with the request. What is still loading stops; `finished_recving` names it once nothing
        writes its blocks: keep them until then. Unknown requests are ignored.
        """
        remote = self._requests.get(request_id)
        if remote is None:
            return
        if remote.stage != "over" and not remote.is_finished:
            self._orders.append(DropRequest(request_id))
        remote.is_finished = True
        if remote.stage != "loading":
            del self._requests[request_id]

    def abort(self, request_id: str) -> None:
        """The same, and an offer is taken back: `finished_sending` names the request once nothing reads its blocks."""
        self.finish(request_id)
        if request_id in self._held:
            self._orders.append(WithdrawRequest(request_id))

    def build_step(self) -> StepMetadata:
        """The orders since the last call, for every worker."""
        orders, self._orders = tuple(self._orders), []
        # a worker may lose a step: until one of them has shown that it knows the engine, it is told again
        tells = self._announced == "no" or (self._announced == "sent" and bool(orders))
        if tells:
            self._announced = "sent"
        return StepMetadata(engine=self._engine if tells else None, orders=orders)

    def update(self, output: WorkerOutput | None) -> None:
        """Take the engine's aggregated output of one step."""
        if output is None:
            return
        if output.finished_sending or output.finished_recving - set(output.failed_recving):
            self._announced = "acknowledged"
        self._held -= output.finished_sending
        for request_id in output.finished_recving:
            remote = self._requests.get(request_id)
            if remote is None:
                continue
            remote.stage = "over"
            if remote.is_finished:
                del self._requests[request_id]

    def close(self) -> None:
        """Stop the directory service. Idempotent."""
        if self._service is not None:
            self._service.close()


def _checked_retentions(
    engine: EngineGeometry, retentions: Sequence[Retention] | None
) -> tuple[Retention, ...]:
    kept = tuple(retentions or [KeepsAll()] * engine.num_groups)
    if len(kept) != engine.num_groups:
        raise GeometryError(
            "there is one retention per cache group", retentions=len(kept), groups=engine.num_groups
        )
    for index, (retention, group) in enumerate(zip(kept, engine.ranks[0].groups, strict=True)):
        _check_retention(index, retention, group)
    return kept


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
