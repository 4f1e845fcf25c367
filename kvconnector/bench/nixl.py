"""NIXL as a peer: READ of one descriptor per block and part, prepared once for all blocks."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.bench.options import TIMEOUT_S
from kvconnector.bench.pools import RankPools
from kvconnector.errors import ConfigError, TransferTimeoutError, TransportError


class NixlSetting(NamedTuple):
    """How NIXL is run: with these variables, and this many threads of its own."""

    name: str
    environment: dict[str, str]
    num_threads: int = 0

    def variables(self, tls: str) -> dict[str, str]:
        """Those of its processes, with this UCX_TLS unless it is empty."""
        return {**self.environment, **({"UCX_TLS": tls} if tls else {})}


NIXL_SETTINGS = (
    NixlSetting("nixl", {}),
    NixlSetting("nixl, scatter-gather", {"NIXL_UCX_SGL_ENABLE": "1"}),
    NixlSetting("nixl, 4 threads", {}, num_threads=4),
)
"""The default first. Scatter-gather lists are off by default; more threads share long descriptor lists."""


class AgentOpened(msgspec.Struct, frozen=True):
    """An agent's metadata, and the pools' addresses in the order of their parts."""

    metadata: bytes
    addresses: list[int]
    device_index: int


class NixlAgent:
    """One rank's agent over its pools. Raises ConfigError: NIXL cannot be imported. TransportError: it refuses."""

    def __init__(self, pools: RankPools, num_threads: int) -> None:
        try:
            api = importlib.import_module("nixl._api")
        except ImportError as error:
            raise ConfigError(
                f"NIXL cannot be imported: {error}; install nixl, or name its directory in PYTHONPATH"
            ) from error
        self._pools = pools
        self._memory = "DRAM" if pools.device == "cpu" else "VRAM"
        self._index = int(pools.device.partition(":")[2] or 0)
        config = api.nixl_agent_config(backends=["UCX"], num_threads=num_threads)
        nbytes = pools.num_blocks * pools.block_bytes
        regions = [(address, nbytes, self._index, "") for address in pools.addresses()]
        try:
            self._agent: Any = api.nixl_agent(f"agent-{os.getpid()}", config)
            self._registration = self._agent.register_memory(regions, self._memory)
        except Exception as error:
            raise TransportError(f"NIXL cannot start: {error}") from error
        self._peer_name = ""
        self._lists: tuple[Any, Any] | None = None

    def opened(self) -> AgentOpened:
        return AgentOpened(self._agent.get_agent_metadata(), self._pools.addresses(), self._index)

    def join(self, peer: AgentOpened) -> None:
        """Connect, and prepare descriptors of every block of both pools. Raises TransportError: NIXL refused."""
        try:
            name = self._agent.add_remote_agent(peer.metadata)
            self._peer_name = name.decode() if isinstance(name, bytes) else str(name)
            self._agent.make_connection(self._peer_name)
            mine = self._descriptors(self._pools.addresses(), self._index)
            theirs = self._descriptors(peer.addresses, peer.device_index)
            self._lists = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", mine, self._memory),
                self._agent.prep_xfer_dlist(self._peer_name, theirs, self._memory),
            )
        except Exception as error:
            raise TransportError(f"NIXL cannot connect: {error}") from error

    def read(self, remote: Sequence[int], local: Sequence[int]) -> float:
        """Read blocks of all parts and wait for them as an engine would, by polling: seconds with making the request.
        Raises TransportError: the transfer failed. TransferTimeoutError: it did not end in time.
        """
        if self._lists is None:
            raise TransportError("the agents are not connected")
        mine, theirs = self._indices(local), self._indices(remote)
        deadline = time.monotonic() + TIMEOUT_S
        began_s = time.perf_counter()
        handle = self._agent.make_prepped_xfer("READ", self._lists[0], mine, self._lists[1], theirs)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
            if time.monotonic() > deadline:
                raise TransferTimeoutError("a NIXL transfer did not end in time", state=state)
        ended_s = time.perf_counter()
        if state != "DONE":
            raise TransportError("a NIXL transfer failed", state=state)
        self._agent.release_xfer_handle(handle)
        return ended_s - began_s

    def close(self) -> None:
        for prepared in self._lists or ():
            self._agent.release_dlist_handle(prepared)
        self._agent.deregister_memory(self._registration)
        if self._peer_name:
            self._agent.remove_remote_agent(self._peer_name)

    def _descriptors(self, addresses: Sequence[int], device_index: int) -> npt.NDArray[np.uint64]:
        """`(address, bytes, device)` of every block of every part, part by part."""
        block_bytes = self._pools.block_bytes
        offsets = np.arange(self._pools.num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        starts = (np.array(addresses, dtype=np.uint64)[:, None] + offsets).reshape(-1)
        table = np.empty((len(starts), 3), dtype=np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = starts, block_bytes, device_index
        return table

    def _indices(self, block_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        parts = np.arange(len(self._pools.storage), dtype=np.int32)[:, None]
        return (parts * self._pools.num_blocks + np.asarray(block_ids, dtype=np.int32)).reshape(-1)
