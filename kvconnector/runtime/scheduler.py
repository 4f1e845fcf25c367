"""The scheduler halves: one per engine, beside its scheduler. They decide and record; the workers move bytes.

Each engine step: `build_step` gives the news for every worker, and `update` takes their aggregated output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
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
from kvconnector.runtime.channels import open_control
from kvconnector.runtime.directory import DirectoryService
from kvconnector.runtime.engine import directory_of, engine_geometry
from kvconnector.runtime.params import TransferParams, wants_remote_decode, wants_remote_prefill
from kvconnector.runtime.steps import (
    BlockList,
    HoldRequest,
    LoadRequest,
    StepMetadata,
    WantRequest,
    WorkerMetadata,
)
from kvconnector.session import WorkerOutput
from kvconnector.topology import EngineGeometry


class KVProducerScheduler:
    """Decides which finished requests are held for a consumer, and tells where they are."""

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._engine: EngineGeometry | None = None
        self._service: DirectoryService | None = None
        self._is_announced = False
        self._held: set[str] = set()
        self._holds: list[HoldRequest] = []
        self._withdrawn: list[str] = []

    def set_worker_metadata(
        self, metadata: Sequence[WorkerMetadata], *, tp_size: int, pp_size: int
    ) -> None:
        """Take what every worker registered, and start the directory service on `control.host:port`.

        Raises:
            LocalError: called twice.
            GeometryError: the workers do not make up one engine.
            ConfigError: the address or the keys cannot be used.
        """
        if self._service is not None:
            raise LocalError("worker metadata is set once", engine=self._config.engine_id)
        geometry = engine_geometry(metadata, tp_size=tp_size, pp_size=pp_size)
        control = open_control(self._config, self._config.control.port)
        self._service = DirectoryService(control, directory_of(geometry, metadata))
        self._engine = geometry

    def request_finished(
        self,
        request_id: str,
        *,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None,
        first_blocks: Sequence[int] | None = None,
        lease_duration_s: float = 0.0,
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks must be kept until `finished_sending` names it, and the parameters for its
        consumer.

        `block_ids[group]` hold the first `num_tokens` tokens, from block `first_blocks[group]` of the sequence on. A
        request that does not ask for remote decode gives `(False, None)`. A `lease_duration_s` above zero takes the
        place of the configured one until a consumer reads or renews.

        Raises:
            LocalError: no worker metadata yet, or the request is held already.
            BlockIdError: block ids that no pool has.
        """
        if not wants_remote_decode(kv_transfer_params):
            return False, None
        if self._service is None or self._engine is None:
            raise LocalError("worker metadata comes before the first request", request=request_id)
        if request_id in self._held:
            raise LocalError("a request finished twice", request=request_id)
        firsts = list(first_blocks) if first_blocks is not None else [0] * len(block_ids)
        secret = new_secret()
        hold = HoldRequest(
            request_id=request_id,
            transfer_id=request_id,
            secret=secret,
            blocks=tuple(
                BlockList.of(ids, first) for ids, first in zip(block_ids, firsts, strict=True)
            ),
            num_tokens=num_tokens,
            lease_duration_s=lease_duration_s,
        )
        address = urlsplit(self._service.address)
        params = TransferParams(
            remote_engine_id=self._config.engine_id,
            remote_request_id=request_id,
            remote_block_ids=[[int(block) for block in ids] for ids in block_ids],
            remote_host=str(address.hostname),
            remote_port=int(address.port or 0),
            remote_num_tokens=num_tokens,
            transfer_secret=secret,
            tp_size=self._engine.tp_size,
            pp_size=self._engine.pp_size,
            remote_first_blocks=firsts if any(firsts) else [],
            remote_public_key=self._service.server_key,
        )
        self._held.add(request_id)
        self._holds.append(hold)
        return True, params.to_mapping()

    def abort(self, request_id: str) -> None:
        """Take a held request back; `finished_sending` names it once nothing reads its blocks. Unknown ones are
        ignored: they may just have been released.
        """
        if request_id in self._held:
            self._withdrawn.append(request_id)

    def build_step(self) -> StepMetadata:
        """The news since the last call, for every worker."""
        step = StepMetadata(
            engine=None if self._is_announced else self._engine,
            holds=tuple(self._holds),
            withdrawn=tuple(self._withdrawn),
        )
        self._is_announced = self._engine is not None
        self._holds, self._withdrawn = [], []
        return step

    def update(self, output: WorkerOutput | None) -> None:
        """Take the engine's aggregated output of one step."""
        if output is not None:
            self._held -= output.finished_sending

    @property
    def held(self) -> frozenset[str]:
        """Requests whose blocks must be kept."""
        return frozenset(self._held)

    def close(self) -> None:
        """Stop the directory service. Idempotent."""
        if self._service is not None:
            self._service.close()


@dataclass(slots=True)
class _Remote:
    """A request whose blocks are on a producer. `stage`: wanted, loading, or over. `is_finished`: the engine has done
    with it, and only the load is still to end.
    """

    params: TransferParams
    stage: str = "wanted"
    is_finished: bool = False
    num_computed_tokens: int = 0


class KVConsumerScheduler:
    """Decides how many tokens of a request come from its producer, and asks the workers to load them.

    `sliding_windows[group]` is that group's window in tokens (None: full attention): only tokens that the next token
    can still see are loaded.
    """

    def __init__(
        self, config: ConnectorConfig, sliding_windows: Sequence[int | None] | None = None
    ) -> None:
        self._config = config
        self._windows = sliding_windows
        self._engine: EngineGeometry | None = None
        self._is_announced = False
        self._requests: dict[str, _Remote] = {}
        self._wants: list[WantRequest] = []
        self._loads: list[LoadRequest] = []
        self._dropped: list[str] = []

    def set_worker_metadata(
        self, metadata: Sequence[WorkerMetadata], *, tp_size: int, pp_size: int
    ) -> None:
        """Take what every worker registered.

        Raises:
            GeometryError: the workers do not make up one engine, or there are not as many windows as groups.
        """
        engine = engine_geometry(metadata, tp_size=tp_size, pp_size=pp_size)
        if self._windows is not None and len(self._windows) != engine.num_groups:
            raise GeometryError(
                "sliding_windows names one window per cache group",
                windows=len(self._windows),
                groups=engine.num_groups,
            )
        self._engine = engine

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

        The last prompt token is never among them: its query must run here to sample the next token.
        """
        remote = self._requests.get(request_id)
        if remote is None or remote.stage != "wanted":
            return 0, False
        remote.num_computed_tokens = num_computed_tokens
        available = min(remote.params.remote_num_tokens, num_prompt_tokens - 1)
        external = max(0, available - num_computed_tokens)
        return external, external > 0

    def update_state_after_alloc(
        self, request_id: str, *, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """The request's blocks are allocated: load `num_external_tokens` into them, or free the producer's if it is 0.

        `block_ids[group]` hold the sequence from its first token on.

        Raises:
            UnknownRequestError: the request has no producer, or was loaded already.
            BlockIdError: block ids that no pool has, or not one list per cache group.
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
        if self._engine is None or len(block_ids) != self._engine.num_groups:
            raise BlockIdError(
                "a load names one list of blocks per cache group", request=request_id
            )
        local_blocks = tuple(BlockList.of(ids) for ids in block_ids)
        remote.stage = "loading"
        start = remote.num_computed_tokens
        stop = start + num_external_tokens
        params = remote.params
        self._loads.append(
            LoadRequest(
                request_id=request_id,
                token_ranges=tuple(
                    (self._window_start(group, start, stop), stop)
                    for group in range(len(block_ids))
                ),
                local_blocks=local_blocks,
                remote_blocks=tuple(
                    BlockList.of(ids, params.first_block(group))
                    for group, ids in enumerate(params.remote_block_ids)
                ),
            )
        )

    def _window_start(self, group: int, start: int, stop: int) -> int:
        """First token of `[start, stop)` that the token at `stop` can still see in this group."""
        window = self._windows[group] if self._windows is not None else None
        return start if window is None else max(start, stop - window + 1)

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
