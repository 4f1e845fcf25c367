"""The scheduler half of a prefill engine, beside its scheduler. It decides and records; the workers move bytes.

Each engine step: `build_step` gives the news for every worker, and `update` takes their aggregated output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvconnector.config import ConnectorConfig
from kvconnector.errors import LocalError
from kvconnector.ids import new_secret
from kvconnector.runtime.channels import open_control
from kvconnector.runtime.directory import DirectoryService
from kvconnector.runtime.engine import directory_of, engine_geometry
from kvconnector.runtime.params import TransferParams, wants_remote_decode
from kvconnector.runtime.steps import BlockList, HoldRequest, StepMetadata, WorkerMetadata
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
