"""What a peer's agent does for one rank, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from kvconnector.bench.contract import PeerName
from kvconnector.bench.messages import AgentOpened, BlocksRead, OpenAgent
from kvconnector.bench.mooncake import MooncakeAgent
from kvconnector.bench.nixl import NixlAgent
from kvconnector.bench.pools import RankPools


class PeerAgent(Protocol):
    """One rank's agent over its pools."""

    def opened(self) -> AgentOpened:
        """What the other side needs."""

    def join(self, peer: AgentOpened) -> None:
        """Connect, and prepare what can be prepared before the first read.

        Raises:
            TransportError: the peer refused.
        """

    def read(self, *, remote: Sequence[int], local: Sequence[int], timeout_s: float) -> BlocksRead:
        """Read blocks of all parts, and wait for them.

        Raises:
            TransportError: the transfer failed. TransferTimeoutError: it did not end in time.
        """

    def close(self) -> None:
        """Release what the peer holds."""


_AGENTS: Mapping[PeerName, Callable[[OpenAgent, RankPools], PeerAgent]] = MappingProxyType(
    {"nixl": NixlAgent, "mooncake": MooncakeAgent}
)


def open_agent(request: OpenAgent, pools: RankPools) -> PeerAgent:
    """Start a peer's agent and register the pools with it.

    Raises:
        ConfigError: the peer cannot be imported.
        TransportError: it refused to start or to register the pools.
    """
    return _AGENTS[request.peer](request, pools)
