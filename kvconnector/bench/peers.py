"""Other libraries as peers: one descriptor per block and part, one transfer per request.

Each rank has an agent. NIXL's requests of a burst are all posted before the first is waited for.
"""

from __future__ import annotations

import importlib
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.bench.options import TIMEOUT_S
from kvconnector.bench.pools import RankPools
from kvconnector.errors import ConfigError, TransferTimeoutError, TransportError

IdBursts: TypeAlias = Sequence[Sequence[Sequence[int]]]
"""Block ids by request and cache group."""


class AgentOpened(msgspec.Struct, frozen=True):
    """The addresses of an agent, and of its pools in the order of their groups and parts."""

    metadata: bytes
    addresses: list[int]
    device_index: int


class PeerAgent(ExitStack):
    """One rank's agent over its pools; `close` releases its resources. Raises ConfigError: the library is not installed
    here. TransportError: it refuses.
    """

    def __init__(self, pools: Sequence[RankPools]) -> None:
        super().__init__()
        self._pools = pools
        self._device = pools[0].device
        self._index = int(self._device.partition(":")[2] or 0)

    @abstractmethod
    def opened(self) -> AgentOpened:
        """Return the address of this agent and its pools."""

    @abstractmethod
    def join(self, peer: AgentOpened) -> None:
        """Connect, and prepare transfers. Raises TransportError: the library refuses."""

    @abstractmethod
    def read(self, remote: IdBursts, local: IdBursts) -> float:
        """Read requests into these blocks, and wait for them by polling, as an engine would. Returns the seconds,
        including those for making the requests.

        Raises:
            TransportError: a transfer failed.
            TransferTimeoutError: a transfer did not end in time.
        """

    def _addresses(self) -> list[int]:
        return [address for pools in self._pools for address in pools.addresses()]

    def _regions(self) -> list[tuple[int, int]]:
        return [
            (address, pools.num_blocks * pools.block_bytes(index))
            for pools in self._pools
            for (_, index), address in zip(pools.storage, pools.addresses(), strict=True)
        ]

    def _blocks(self, addresses: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Return `(address, bytes)` of every block, part by part, in pools of our shape at `addresses`."""
        tables, left = [], iter(addresses)
        for pools in self._pools:
            blocks = np.arange(pools.num_blocks, dtype=np.uint64)
            for _, index in pools.storage:
                nbytes = pools.block_bytes(index)
                starts = blocks * np.uint64(nbytes) + np.uint64(next(left))
                tables.append(np.stack([starts, np.full_like(starts, nbytes)], axis=1))
        return np.concatenate(tables)

    def _indices(self, blocks: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
        """Return the rows of `_blocks` that belong to a request."""
        found, first = [], 0
        for pools, block_ids in zip(self._pools, blocks, strict=True):
            parts = np.arange(len(pools.storage), dtype=np.int32)[:, None] * pools.num_blocks
            found.append((first + parts + np.asarray(block_ids, dtype=np.int32)).reshape(-1))
            first += len(pools.storage) * pools.num_blocks
        return np.concatenate(found)


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{package} cannot be imported: {error}; install it, or name its directory in PYTHONPATH"
        ) from error


def _await(deadline_s: float, library: str) -> None:
    if time.monotonic() > deadline_s:
        raise TransferTimeoutError("a transfer did not end in time", library=library)


class NixlAgent(PeerAgent):
    """NIXL's READ over UCX. The descriptors of all blocks are prepared once."""

    def __init__(self, pools: Sequence[RankPools], num_threads: int = 0) -> None:
        super().__init__(pools)
        api = _imported("nixl._api", "NIXL")
        self._memory = "DRAM" if self._device == "cpu" else "VRAM"
        config = api.nixl_agent_config(backends=["UCX"], num_threads=num_threads)
        regions = [(address, nbytes, self._index, "") for address, nbytes in self._regions()]
        try:
            self._agent: Any = api.nixl_agent(f"agent-{os.getpid()}", config)
            self.callback(
                self._agent.deregister_memory, self._agent.register_memory(regions, self._memory)
            )
        except Exception as error:
            raise TransportError(f"NIXL cannot start: {error}") from error

    def opened(self) -> AgentOpened:
        return AgentOpened(self._agent.get_agent_metadata(), self._addresses(), self._index)

    def join(self, peer: AgentOpened) -> None:
        try:
            name = self._agent.add_remote_agent(peer.metadata)
            name = name.decode() if isinstance(name, bytes) else str(name)
            self.callback(self._agent.remove_remote_agent, name)
            self._agent.make_connection(name)
            self._mine = self._prepared("NIXL_INIT_AGENT", self._addresses(), self._index)
            self._theirs = self._prepared(name, peer.addresses, peer.device_index)
        except Exception as error:
            raise TransportError(f"NIXL cannot connect: {error}") from error

    def read(self, remote: IdBursts, local: IdBursts) -> float:
        pairs = [(self._indices(a), self._indices(b)) for a, b in zip(local, remote, strict=True)]
        deadline_s = time.monotonic() + TIMEOUT_S
        began_s = time.perf_counter()
        handles = []
        for mine, theirs in pairs:
            handles.append(
                self._agent.make_prepped_xfer("READ", self._mine, mine, self._theirs, theirs)
            )
            self._agent.transfer(handles[-1])
        for handle in handles:
            while (state := self._agent.check_xfer_state(handle)) == "PROC":
                _await(deadline_s, "NIXL")
            if state != "DONE":
                raise TransportError("a NIXL transfer failed", state=state)
        ended_s = time.perf_counter()
        for handle in handles:
            self._agent.release_xfer_handle(handle)
        return ended_s - began_s

    def _prepared(self, agent: str, addresses: Sequence[int], device_index: int) -> Any:
        """Return NIXL's list of `(address, bytes, device)` of every block of an agent."""
        blocks = self._blocks(addresses)
        devices = np.full(len(blocks), device_index, dtype=np.uint64)
        table = np.column_stack([blocks, devices])
        prepared = self._agent.prep_xfer_dlist(agent, table, self._memory)
        self.callback(self._agent.release_dlist_handle, prepared)
        return prepared


TCP_DESCRIPTORS = 1000
"""Most descriptors that Mooncake's TCP transport gets at once; it refuses 5,000, and ends the connection."""


class MooncakeAgent(PeerAgent):
    """Mooncake's READ over TCP, with Mooncake's own handshake, one batch after the other."""

    def __init__(self, pools: Sequence[RankPools]) -> None:
        super().__init__(pools)
        self._engine: Any = _imported("mooncake.engine", "Mooncake").TransferEngine()
        addresses, sizes = zip(*self._regions(), strict=True)
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise TransportError("Mooncake cannot start")
        if self._engine.batch_register_memory([*addresses], [*sizes]):
            raise TransportError("Mooncake cannot register memory")
        self.callback(self._engine.batch_unregister_memory, [*addresses])

    def opened(self) -> AgentOpened:
        name = f"127.0.0.1:{self._engine.get_rpc_port()}".encode()
        return AgentOpened(name, self._addresses(), self._index)

    def join(self, peer: AgentOpened) -> None:
        self._peer = peer.metadata.decode()
        self._mine, self._theirs = self._blocks(self._addresses()), self._blocks(peer.addresses)

    def read(self, remote: IdBursts, local: IdBursts) -> float:
        batches = []
        for theirs, mine in zip(remote, local, strict=True):
            here, there = self._mine[self._indices(mine)], self._theirs[self._indices(theirs)]
            for first in range(0, len(here), TCP_DESCRIPTORS):
                part = slice(first, first + TCP_DESCRIPTORS)
                columns = (here[part, 0], there[part, 0], here[part, 1])
                batches.append([column.tolist() for column in columns])
        deadline_s = time.monotonic() + TIMEOUT_S
        began_s = time.perf_counter()
        for batch in batches:
            number = self._engine.batch_transfer_async_read(self._peer, *batch)
            while state := self._engine.get_batch_transfer_status([number]) if number else -1:
                if state < 0:
                    raise TransportError("a Mooncake transfer failed", state=state)
                _await(deadline_s, "Mooncake")
        return time.perf_counter() - began_s


class PeerSetting(NamedTuple):
    """One setting of a library: its environment variables, and its agent."""

    name: str
    library: str
    agent: Callable[[Sequence[RankPools]], PeerAgent]
    environment: Mapping[str, str] = MappingProxyType({})


PEERS = (
    PeerSetting("nixl", "nixl", NixlAgent),
    PeerSetting("nixl, scatter-gather", "nixl", NixlAgent, {"NIXL_UCX_SGL_ENABLE": "1"}),
    PeerSetting("nixl, 4 threads", "nixl", partial(NixlAgent, num_threads=4)),
    PeerSetting("mooncake, TCP", "mooncake", MooncakeAgent, {"MC_LOG_LEVEL": "ERROR"}),
)
"""The settings, each library's default first. NIXL has scatter-gather lists off by default; threads share long lists.
"""


def peer_variables(peer: int | None, tls: str) -> dict[str, str]:
    """Return the environment variables of `PEERS[peer]`, with `tls` as UCX_TLS unless it is empty; ours has none."""
    if peer is None:
        return {}
    return {**PEERS[peer].environment, **({"UCX_TLS": tls} if tls else {})}
