"""Messages that vLLM carries between our halves, in its own base classes. Their payloads are encoded by msgspec."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvconnector.errors import LocalError
from kvconnector.integrations.identity import Identity
from kvconnector.planning import Keeps
from kvconnector.runtime import StepMetadata, WorkerMetadata
from kvconnector.session import RequestTrace
from kvconnector.session.orders import WithdrawRequest


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of our cache groups in vLLM's terms.

    `vllm_group` is the index of its block table, and `kernel_blocks` the number of our blocks in one of vLLM's. If the
    attention backend stores tiles of `tile_tokens` tokens, a tile counts as one token of ours. If `row_tokens` tokens
    share a row of a compressed cache, `GroupGeometry.row_tokens` is the same.
    `keeps` says which tokens vLLM keeps: all; those in a sliding window or a chunk of `extent_tokens`; or one state,
    which is in the last block before `scratch_blocks` others.
    """

    vllm_group: int
    kernel_blocks: int
    keeps: Keeps = "all"
    extent_tokens: int = 0
    scratch_blocks: int = 0
    tile_tokens: int = 1
    row_tokens: int = 1


class Handshake(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's registration: its rank's geometry and addresses, and its cache groups in vLLM's terms."""

    worker: WorkerMetadata
    groups: tuple[GroupInfo, ...]


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """A `Handshake`, encoded."""

    payload: bytes

    @classmethod
    def of(cls, handshake: Handshake) -> HandshakeMetadata:
        return cls(msgspec.msgpack.encode(handshake))

    def decode(self) -> Handshake:
        return msgspec.msgpack.decode(self.payload, type=Handshake)


@dataclass
class ConnectorStep(KVConnectorMetadata):
    """A step's `StepMetadata`, encoded if not empty. `is_idle`: neither this step nor one in flight computes tokens.
    `withdraws`: its orders take blocks back. `identities` are those of the step's streamed loads, by request.
    """

    payload: bytes
    is_idle: bool = False
    withdraws: bool = False
    identities: dict[str, tuple[Identity, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: StepMetadata,
        *,
        is_idle: bool = False,
        identities: dict[str, tuple[Identity, ...]] | None = None,
    ) -> ConnectorStep:
        withdraws = any(isinstance(order, WithdrawRequest) for order in step.orders)
        payload = b"" if step.is_empty else msgspec.msgpack.encode(step)
        return cls(payload, is_idle, withdraws, identities or {})

    def decode(self) -> StepMetadata:
        if not self.payload:
            return StepMetadata()
        return msgspec.msgpack.decode(self.payload, type=StepMetadata)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The workers' report to the scheduler half, besides the ends of transfers.

    `producer_started` are requests whose blocks may be allocated now: their prefill engine computes them, or will never
    do so. `traces` are there only if vLLM traces requests. `failed` and `unsent` have the reasons why loads and leases
    failed, by request. `extras` are the first tokens of streamed prompts.
    """

    producer_started: set[str] = field(default_factory=set)
    traces: list[RequestTrace] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unsent: dict[str, str] = field(default_factory=dict)
    extras: dict[str, bytes] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return both reports merged. Raises LocalError: the other one is another connector's."""
        if not isinstance(other, WorkerReport):
            raise LocalError("this is another connector's metadata", found=type(other).__name__)
        return WorkerReport(
            self.producer_started | other.producer_started,
            self.traces + other.traces,
            other.failed | self.failed,
            other.unsent | self.unsent,
            other.extras | self.extras,
        )
