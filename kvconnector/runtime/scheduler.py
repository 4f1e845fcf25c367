"""The scheduler half of an engine, used by its scheduler. It decides and records; the workers move bytes.

In each engine step `build_step` returns the orders for every worker, and `update` takes their aggregated output.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal

from kvconnector.allowed_producers import AllowedProducers
from kvconnector.config import ConnectorConfig, checked_config
from kvconnector.errors import (
    IncompatiblePeerError,
    LocalError,
    ProducerNotAllowedError,
    RemoteProtocolError,
    UnknownRequestError,
    require_counts,
)
from kvconnector.planning import Retention
from kvconnector.runtime.channels import open_directory_control
from kvconnector.runtime.directory import DirectoryService
from kvconnector.runtime.engine import (
    WorkerMetadata,
    checked_retentions,
    checked_tables,
    directory_of,
    joined_geometry,
)
from kvconnector.runtime.failures import FailureLog
from kvconnector.runtime.offers import Offers
from kvconnector.runtime.own_process import OwnProcess
from kvconnector.runtime.params import StreamRequest, TransferParams, wants_remote_prefill
from kvconnector.runtime.remote_request import RemoteRequest
from kvconnector.session import WorkerOutput
from kvconnector.session.orders import (
    DropRequest,
    Order,
    StepMetadata,
    WantRequest,
    WithdrawRequest,
)


class Scheduler:
    """Decides which finished requests to hold for a consumer, and how many tokens of a new one to load from a producer.

    A producer's scheduler runs a directory service on `control.host:port` until `close`. As a context manager it
    closes itself. Call all methods from one thread.

    Args:
        config: The engine's settings, the same as those of its workers.
        workers: The results of `Worker.handshake` of every rank, in any order.
        retentions: Which tokens of a sequence each cache group keeps; consumers load only those that the next token
            needs. By default all groups keep every token.
        tables: For each cache group the number of the engine's block table that it uses. If groups have equal numbers,
            an offer names their blocks only once, in a form that earlier builds refuse. By default each group has its
            own table.

    Raises:
        GeometryError: the workers do not make up one engine, the number of retentions or tables is not that of the
            groups, a group of states has blocks of several tokens, or ranks share the tokens of a group that keeps only
            some.
        ConfigError: `config` is not a `Config`, the workers have another engine id or role, or the address or the keys
            cannot be used.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        workers: Sequence[WorkerMetadata],
        *,
        retentions: Sequence[Retention] | None = None,
        tables: Sequence[int] | None = None,
    ) -> None:
        self._config = checked_config(config)
        self._allowed = AllowedProducers(self._config.control.allowed_producers)
        self._engine = joined_geometry(config, workers)
        self._retentions = checked_retentions(self._engine, retentions)
        self._tables = checked_tables(self._engine, tables)
        self._offers = Offers(self._engine, self._retentions, workers, config.lease.reclaim_above)
        self._announced: Literal["no", "sent", "acknowledged"] = "no"
        self._orders: list[Order] = []
        self._requests: dict[str, RemoteRequest] = {}
        self._failures = FailureLog(config.engine_id)
        self._is_closed = False
        self._process = OwnProcess("scheduler")
        self._service: DirectoryService | None = None
        if config.role != "consumer":
            directory = directory_of(self._engine, workers, stream=config.stream)
            control = open_directory_control(config, config.control.port)
            self._service = DirectoryService(control, directory).start()
            weakref.finalize(self, self._service.abandon).atexit = False

    def __repr__(self) -> str:
        return (
            f"<Scheduler {self._config.engine_id} {self._config.role}: {len(self._offers.held)} held,"
            f" {len(self._requests)} remote, {len(self._orders)} orders{', closed' * self._is_closed}>"
        )

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(
        self,
        request_id: str,
        *,
        blocks: Sequence[Sequence[int]],
        num_tokens: int,
        num_encoder_tokens: int = 0,
        first_blocks: Sequence[int] | None = None,
        lease_duration_s: float = 0.0,
        extra: bytes = b"",
    ) -> dict[str, Any]:
        """Hold a finished request's blocks for a consumer. The engine must keep them until `finished_sending` names the
        request. If block ids are outside a rank's pool, that happens soon, with the reason in `failed_sending`.

        Args:
            request_id: The engine's name for the request.
            blocks: Block ids by cache group. They hold those of the first `num_tokens` tokens that the group keeps.
            num_tokens: Tokens of the sequence whose cache is complete.
            first_blocks: Where each group's blocks begin, as an index into the sequence's blocks; by default at 0.
            num_encoder_tokens: Tokens of the encoder's input, if a group keeps these.
            lease_duration_s: If above zero, it replaces `lease.duration_s` until a consumer reads or renews the lease.
            extra: At most 256 bytes for the engines of consumers that follow the request: see `WorkerOutput.extras`.

        Returns:
            The `kv_transfer_params` for the consumer's request.

        Raises:
            LocalError: this engine is a consumer or closed, the request is already offered, a message cannot carry its
                id (1 to 512 printable characters), `extra` is too long, or `lease_duration_s` is not a number from 0 to
                10^6.
            BlockIdError: the number of cache groups is wrong, no pool has a block id, a block is named twice in a
                group, there are too few blocks, or a count is not an integer from 0 to 2^31 - 1.
        """
        self._process.check()
        if self._service is None:
            raise LocalError(
                "an engine with the role consumer cannot offer requests", request=request_id
            )
        if self._is_closed:
            raise LocalError(
                "the scheduler is closed, so other engines can no longer find this one"
            )
        hold = self._offers.hold(
            request_id,
            blocks=blocks,
            first_blocks=first_blocks,
            num_tokens=num_tokens,
            num_encoder_tokens=num_encoder_tokens,
            lease_duration_s=lease_duration_s,
            extra=extra,
        )
        self._orders.append(hold)
        self._orders += self._offers.reclaim()
        control = self._service.control
        where = control.address, control.server_key
        params = TransferParams.of(hold, num_tokens, self._engine, *where, tables=self._tables)
        return params.to_mapping()

    def grow(
        self,
        request_id: str,
        *,
        blocks: Sequence[Sequence[int]],
        num_tokens: int,
        ahead_tokens: int = 0,
    ) -> None:
        """Let a consumer that streams a request read its computed tokens. Call this for every step that computes a part
        of the request, before `build_step`. If there are fewer tokens than before, this is a `withdraw`. It has no
        effect on requests that are not streamed.

        Args:
            request_id: The engine's name for the request.
            blocks: Block ids by cache group, from the request's first token on. Groups that keep only some tokens are
                read at the end.
            num_tokens: Tokens in `blocks` after the kernels that were launched before `Worker.start_step`.
            ahead_tokens: Tokens in `blocks` after this step. If the engine calls `Worker.layer_written` for each layer,
                the consumer reads the step's first layers while the others are being computed.

        Raises:
            BlockIdError: no pool has a block id, there are too few blocks for the tokens, or the number of cache groups
                is wrong.
        """
        self._orders += self._offers.grow(request_id, blocks, num_tokens, ahead_tokens)

    def withdraw(self, request_id: str) -> None:
        """Take back a request's blocks. Its consumers compute the prompt themselves.

        If the request is streamed and still being computed, as when it is preempted, the engine may reuse the blocks at
        once. If it was offered, the blocks are free when `finished_sending` names the request, with the reason in
        `failed_sending`. It has no effect on other requests.

        Args:
            request_id: The engine's name for the request.
        """
        self._orders += self._offers.withdraw(request_id)
        if request_id in self._offers.held:
            self._orders.append(WithdrawRequest(request_id))

    @property
    def address(self) -> str | None:
        """Where consumers find this engine: the address of its directory service, as "tcp://host:port". A consumer has
        no such service: None.
        """
        return None if self._service is None else self._service.control.address

    @property
    def held(self) -> Set[str]:
        """Requests whose blocks must be kept for a consumer: a view, which later calls change."""
        return self._offers.held.keys()

    @property
    def num_loading(self) -> int:
        """Number of requests that are being loaded."""
        return sum(remote.stage == "loading" for remote in self._requests.values())

    def on_new_request(self, request_id: str, kv_transfer_params: Mapping[str, Any] | None) -> None:
        """Take note of a queued request. If it has a producer, connect to that and keep the request's lease alive. If a
        router asked for it, let a consumer stream the request while it is being computed here.

        Args:
            request_id: The engine's name for the request.
            kv_transfer_params: The parameters that came with the request, or None.

        Raises:
            RemoteProtocolError: the parameters name a remote prefill or a transfer but cannot be used.
            ProducerNotAllowedError: they name a producer that `control.allowed_producers` does not list.
            IncompatiblePeerError: they are for a different number of cache groups.
            LocalError: this engine is a producer, the request is already queued, its blocks are held, or an order
                cannot carry its id.
        """
        if kv_transfer_params is None:
            return
        try:
            str.encode(request_id)
        except (TypeError, UnicodeEncodeError) as error:
            raise LocalError(
                "an order cannot carry this request's id: it must be a string that UTF-8 can encode",
                request=request_id,
            ) from error
        if not isinstance(kv_transfer_params, Mapping):
            raise RemoteProtocolError(
                "kv_transfer_params must be a mapping",
                request=request_id,
                got=type(kv_transfer_params).__name__,
            )
        wanted = self._wanted(request_id, kv_transfer_params)
        asked = StreamRequest.from_mapping(kv_transfer_params)
        if asked is not None and self._config.stream and self._service is not None:
            self._orders.append(self._offers.open(request_id, asked))
        if wanted is None:
            return
        self._requests[request_id] = RemoteRequest(wanted, self._retentions)
        self._orders.append(
            WantRequest(
                request_id=request_id,
                transfer_id=wanted.remote_request_id,
                secret=wanted.transfer_secret,
                engine=wanted.engine,
                is_followed=wanted.is_followed,
            )
        )

    def _wanted(self, request_id: str, params: Mapping[str, Any]) -> TransferParams | None:
        """Return the producer's offer that a request is to load, if any. Errors are those of `on_new_request`."""
        asked = params.get("do_remote_prefill")
        if asked is not None and not isinstance(asked, bool):
            raise RemoteProtocolError(
                "do_remote_prefill of kv_transfer_params must be true or false",
                request=request_id,
                do_remote_prefill=asked,
            )
        if not wants_remote_prefill(params):
            return None
        if self._config.role == "producer":
            raise LocalError(
                "an engine with the role producer cannot load requests", request=request_id
            )
        if request_id in self._requests:
            raise LocalError("a request was queued twice", request=request_id)
        wanted = TransferParams.from_mapping(params)
        if not self._allowed.allows(wanted.remote_host, wanted.remote_port):
            raise ProducerNotAllowedError(
                "control.allowed_producers does not list the producer that a request names",
                request=request_id,
                engine=wanted.remote_engine_id,
                host=wanted.remote_host,
                port=wanted.remote_port,
            )
        # the producer may have optional groups that we lack, which its greeting shows
        named = wanted.num_groups
        if not wanted.is_followed and named < self._engine.num_required:
            raise IncompatiblePeerError(
                "the request's blocks are for a different number of cache groups",
                request=request_id,
                theirs=named,
                ours=self._engine.num_groups,
            )
        return wanted

    def matched_tokens(
        self, request_id: str, num_prompt_tokens: int, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens of a prompt to load. Call `is_early` first.

        The last prompt token is never loaded: its query must run here to sample the next token. A producer has
        recurrent states of one position only: the request continues at that position, or loads nothing.

        Args:
            request_id: The engine's name for the request.
            num_prompt_tokens: The prompt's length.
            num_computed_tokens: Tokens that the engine has cached.

        Returns:
            The number of tokens to load beyond those cached, and True if it is not 0: the load is asynchronous.

        Raises:
            LocalError: a count is not an integer from 0 to 2^31 - 1.
        """
        require_counts(
            LocalError, num_prompt_tokens=num_prompt_tokens, num_computed_tokens=num_computed_tokens
        )
        remote = self._requests.get(request_id)
        if remote is None or remote.stage != "wanted":
            return 0, False
        remote.num_computed_tokens = num_computed_tokens
        stop = remote.resume_at(num_prompt_tokens - 1)
        external = max(0, stop - num_computed_tokens)
        return external, external > 0

    def is_early(self, request_id: str) -> bool:
        """Return True while the prompt is in the producer's queue, or is being computed there and `stream` is off here.
        Blocks allocated for it would be idle, so leave the request in your queue and ask again after an `update`.

        Args:
            request_id: The engine's name for the request.
        """
        remote = self._requests.get(request_id)
        if remote is None or remote.stage != "wanted":
            return False  # the engine has decided meanwhile
        return remote.params.is_followed and not remote.producer_started

    def load(
        self,
        request_id: str,
        *,
        blocks: Sequence[Sequence[int]],
        num_tokens: int,
        num_encoder_tokens: int = 0,
        first_blocks: Sequence[int] | None = None,
        computed_tokens: Sequence[int] | None = None,
        cache_block_tokens: Sequence[int] = (),
    ) -> tuple[tuple[int, int], ...]:
        """Load a request into its blocks, or free the producer's blocks if there is nothing to load.

        Args:
            request_id: The engine's name for the request.
            blocks: Block ids by cache group; for a group that keeps states, the one block of the state.
            num_tokens: Tokens to load beyond those cached, as `matched_tokens` returned; or 0.
            num_encoder_tokens: Tokens of the encoder's input, if a group keeps these: all are loaded.
            first_blocks: Where each group's blocks begin, as an index into the sequence's blocks; by default at 0.
            computed_tokens: Leading tokens that each group does not need; by default as many as the engine had cached.
            cache_block_tokens: Tokens in a block of each group's prefix cache. The first block is loaded whole, if
                possible.

        Returns:
            For each group the first token that is loaded, and the end of the range; () if nothing is loaded.

        Raises:
            UnknownRequestError: the request has no producer, or was already loaded.
            BlockIdError: no pool has a block id, there is not one list, first block and count per cache group, or a
                count is not an integer from 0 to 2^31 - 1.
        """
        remote = self._requests.get(request_id)
        if remote is None or remote.stage != "wanted":
            if not num_tokens:
                return ()
            raise UnknownRequestError(
                "there is nothing to load for this request", request=request_id
            )
        if num_tokens == 0:
            self._orders.append(DropRequest(request_id, needs_none=True))
            remote.stage = "over"
            return ()
        order = remote.load_order(
            request_id,
            blocks=blocks,
            first_blocks=first_blocks,
            num_tokens=num_tokens,
            num_encoder_tokens=num_encoder_tokens,
            computed_tokens=computed_tokens,
        )
        order = remote.in_whole_blocks(order, cache_block_tokens, self._engine.ranks[0].groups)
        self._orders.append(order)
        remote.stage = "loading"
        return order.token_ranges

    def is_loading(self, request_id: str) -> bool:
        """Return True while transfers write the request's blocks. Do not free them before `finished_recving` names it.

        Args:
            request_id: The engine's name for the request.
        """
        remote = self._requests.get(request_id)
        return remote is not None and remote.stage == "loading"

    def is_pending(self, request_id: str) -> bool:
        """Return True while the request waits for the permission to load, or for its load to end.

        Args:
            request_id: The engine's name for the request.
        """
        remote = self._requests.get(request_id)
        return remote is not None and remote.stage != "over"

    def finish(self, request_id: str) -> None:
        """Forget a request that the engine has finished. If it is being loaded, the load is stopped: keep its blocks
        until `finished_recving` names it. If it was never offered, consumers that stream it are notified.

        Args:
            request_id: The engine's name for the request. An unknown one is ignored.
        """
        self._orders += self._offers.withdraw(request_id)
        self._offers.close(request_id)
        remote = self._requests.get(request_id)
        if remote is None:
            return
        if remote.stage != "over" and not remote.is_finished:
            self._orders.append(DropRequest(request_id))
        remote.is_finished = True
        if remote.stage != "loading":
            del self._requests[request_id]

    def abort(self, request_id: str) -> None:
        """Forget a request, and withdraw its offer: `finished_sending` names it once nothing reads its blocks.

        Args:
            request_id: The engine's name for the request. An unknown one is ignored.
        """
        self.finish(request_id)
        self.withdraw(request_id)

    def build_step(self) -> StepMetadata:
        """Return the orders since the last call, for every worker.

        Raises:
            LocalError: the scheduler belongs to another process, which has forked this one.
        """
        orders, self._orders = tuple(self._orders), []
        self._process.check()
        # a worker may miss a step: the engine's geometry is sent again until a worker's output shows that it has it
        announces = self._announced == "no" or (self._announced == "sent" and bool(orders))
        if announces:
            self._announced = "sent"
        return StepMetadata(engine=self._engine if announces else None, orders=orders)

    def get_finished_count(self) -> int:
        """Return the number of workers that report each request, which is all of them, for
        `KVOutputAggregator.from_connector`.
        """
        return self._engine.world_size

    def update(self, output: WorkerOutput) -> None:
        """Take the engine's aggregated output of one step. Failed requests are logged once for the whole engine.

        Args:
            output: The result of `KVOutputAggregator.aggregate`, or of the only worker's `poll`. If the aggregator
                returned None, do not call this in that step.

        Raises:
            LocalError: `output` is not a `WorkerOutput`.
        """
        if not isinstance(output, WorkerOutput):
            raise LocalError(
                "update needs the output that the aggregator returned", got=type(output).__name__
            )
        self._failures.note("load", output.failed_recving)
        self._failures.note("lease", output.failed_sending)
        if output.finished_sending or output.finished_recving - set(output.failed_recving):
            self._announced = "acknowledged"
        for request_id in output.finished_sending:
            self._offers.released(request_id)
        for request_id in output.producer_started & self._requests.keys():
            self._requests[request_id].producer_started = True
        for request_id in output.finished_recving & self._requests.keys():
            remote = self._requests[request_id]
            remote.stage = "over"
            if remote.is_finished:
                del self._requests[request_id]

    def close(self) -> None:
        """Stop the directory service: new consumers no longer find this engine, and `offer` raises. Idempotent.

        Raises:
            LocalError: the scheduler belongs to another process, which alone can close it.
        """
        self._process.check()
        self._is_closed = True
        if self._service is not None:
            self._service.close()
