"""Mooncake's transfer engine as a peer: synchronous batch reads over its TCP transport, by addresses."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvconnector.bench.messages import AgentOpened, BlocksRead, OpenAgent
from kvconnector.bench.pools import RankPools
from kvconnector.errors import ConfigError, TransportError

HOST = "127.0.0.1"
METADATA = "P2PHANDSHAKE"
"""Engines ask each other; there is no metadata server."""

PROTOCOL = "tcp"


class MooncakeAgent:
    """One rank's engine over its pools, which are in host memory. See `PeerAgent`."""

    def __init__(self, _request: OpenAgent, pools: RankPools) -> None:
        try:
            module = importlib.import_module("mooncake.engine")
        except ImportError as error:
            raise ConfigError(
                f"the peer cannot be imported: {error}; install mooncake-transfer-engine-non-cuda (it needs libibverbs)"
                " or name its directory with --peer-site"
            ) from error
        self._pools = pools
        self._engine: Any = module.TransferEngine()
        if status := self._engine.initialize(HOST, METADATA, PROTOCOL, ""):
            raise TransportError("Mooncake cannot start", status=status)
        nbytes = pools.num_blocks * pools.block_bytes
        for address in pools.addresses():
            if status := self._engine.register_memory(address, nbytes):
                raise TransportError("Mooncake cannot register a pool", status=status)
        self._peer = ""
        self._bases: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    def opened(self) -> AgentOpened:
        """See `PeerAgent`."""
        name = f"{HOST}:{self._engine.get_rpc_port()}"
        return AgentOpened(name.encode(), tuple(self._pools.addresses()), 0)

    def join(self, peer: AgentOpened) -> None:
        """See `PeerAgent`. Mooncake connects with the first read."""
        self._peer = peer.metadata.decode()
        self._bases = (
            np.array(self._pools.addresses(), dtype=np.int64),
            np.array(peer.addresses, dtype=np.int64),
        )

    def read(self, *, remote: Sequence[int], local: Sequence[int], timeout_s: float) -> BlocksRead:
        """See `PeerAgent`. The call cannot be interrupted: Mooncake's own limit is `MC_TRANSFER_TIMEOUT`."""
        if self._bases is None:
            raise TransportError("the engines are not connected")
        began_s = time.perf_counter()
        mine, theirs, lengths = self._runs(self._bases, local, remote)
        posted_s = time.perf_counter()
        status = self._engine.batch_transfer_sync_read(self._peer, mine, theirs, lengths)
        ended_s = time.perf_counter()
        if status:
            raise TransportError("a Mooncake transfer failed", status=status, limit_s=timeout_s)
        return BlocksRead(request_s=ended_s - began_s, transfer_s=ended_s - posted_s)

    def close(self) -> None:
        """See `PeerAgent`."""
        for address in self._pools.addresses():
            self._engine.unregister_memory(address)

    def _runs(
        self,
        bases: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
        local: Sequence[int],
        remote: Sequence[int],
    ) -> tuple[list[int], list[int], list[int]]:
        """Addresses on both sides and bytes, of every run of blocks that both sides hold in one piece, part by part."""
        mine, theirs = np.asarray(local, dtype=np.int64), np.asarray(remote, dtype=np.int64)
        breaks = np.flatnonzero((np.diff(mine) != 1) | (np.diff(theirs) != 1)) + 1
        starts = np.concatenate(([0], breaks))
        counts = np.diff(np.append(starts, len(mine)))
        block_bytes = self._pools.block_bytes
        sides = [
            (base[:, None] + ids[starts] * block_bytes).reshape(-1).tolist()
            for base, ids in zip(bases, (mine, theirs), strict=True)
        ]
        return sides[0], sides[1], np.tile(counts * block_bytes, len(bases[0])).tolist()
