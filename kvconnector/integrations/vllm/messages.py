"""The messages that vLLM carries between our halves: its own base classes around `msgspec` bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvconnector.errors import LocalError
from kvconnector.runtime import StepMetadata, WorkerMetadata
from kvconnector.session import RequestTrace


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of our cache groups in vLLM's terms.

    `vllm_group` is the index of its block table, `kernel_blocks` the number of our blocks in one of vLLM's. Where
    `tile_tokens` tokens lie in one tile, a tile is a token of ours.
    `keeps` names what vLLM keeps: all, those in a sliding window or a chunk of `extent_tokens`, or one state in
    the last block but `scratch_blocks`.
    """

    vllm_group: int
    kernel_blocks: int
    keeps: Literal["all", "window", "chunk", "state"] = "all"
    extent_tokens: int = 0
    scratch_blocks: int = 0
    tile_tokens: int = 1


class Handshake(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's registration."""

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
    """A step's `StepMetadata`, encoded, or nothing. `is_idle`: neither it nor a step in flight computes."""

    payload: bytes
    is_idle: bool = False

    @classmethod
    def of(cls, step: StepMetadata, *, is_idle: bool = False) -> ConnectorStep:
        return cls(b"" if step.is_empty else msgspec.msgpack.encode(step), is_idle)

    def decode(self) -> StepMetadata:
        if not self.payload:
            return StepMetadata()
        return msgspec.msgpack.decode(self.payload, type=StepMetadata)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What workers report to the scheduler half beside the ends of transfers.

    `begun` are requests whose load may be asked for: their prefill engine computes them, or never will. It has `traces`
    where vLLM traces requests. `failed` and `unsent` say why loads and leases failed, for the log. `extras` are first
    tokens of streamed prompts.
    """

    begun: set[str] = field(default_factory=set)
    traces: list[RequestTrace] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unsent: dict[str, str] = field(default_factory=dict)
    extras: dict[str, bytes] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both reports, as one. Raises LocalError: the other one is another connector's."""
        if not isinstance(other, WorkerReport):
            raise LocalError("this is another connector's metadata", found=type(other).__name__)
        return WorkerReport(
            self.begun | other.begun,
            self.traces + other.traces,
            other.failed | self.failed,
            other.unsent | self.unsent,
            other.extras | self.extras,
        )
