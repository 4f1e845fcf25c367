"""The peers of the comparison: how each is set, and two engines whose ranks read by it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import NamedTuple

from kvconnector.bench import messages as m
from kvconnector.bench.children import EngineProcesses
from kvconnector.bench.contract import BenchOptions, PeerName
from kvconnector.bench.deployments import Deployment, Transfer
from kvconnector.bench.engines import check_arrived, write_both
from kvconnector.bench.owner import Owner
from kvconnector.errors import ConfigError
from kvconnector.ids import Rank


class PeerSetting(NamedTuple):
    """How a peer is run: with these variables, and this many threads of its own where it takes a number."""

    name: str
    environment: dict[str, str]
    num_threads: int = 0


# A peer's first setting is its default. NIXL: scatter-gather lists are off by default; more threads share long
# descriptor lists. Mooncake: its TCP transport can keep its connections.
PEER_SETTINGS: Mapping[PeerName, tuple[PeerSetting, ...]] = MappingProxyType(
    {
        "nixl": (
            PeerSetting("nixl", {}),
            PeerSetting("nixl, scatter-gather", {"NIXL_UCX_SGL_ENABLE": "1"}),
            PeerSetting("nixl, 4 threads", {}, num_threads=4),
        ),
        "mooncake": (
            PeerSetting("mooncake", {}),
            PeerSetting("mooncake, pooled connections", {"MC_TCP_ENABLE_CONNECTION_POOL": "1"}),
        ),
    }
)


def peer_named(name: str) -> PeerName:
    """The peer of this name; empty for none.

    Raises:
        ConfigError: there is no such peer.
    """
    for known in PEER_SETTINGS:
        if name == known:
            return known
    if name:
        raise ConfigError("no such peer", peer=name, known=list(PEER_SETTINGS))
    return ""


def refuse_what_peers_cannot(deployment: Deployment) -> None:
    """Raises:
    ConfigError: the engines are cut differently, a request does not fill its blocks, or the peer does not run on this
        device.
    """
    options = deployment.options
    if not options.peer.name:
        return
    if deployment.prefill != deployment.decode:
        raise ConfigError(
            "the peer reads whole blocks: both engines need the same tp, pp, block and layout",
            prefill=str(deployment.prefill),
            decode=str(deployment.decode),
        )
    if options.peer.name == "mooncake" and options.device != "cpu":
        raise ConfigError(
            "mooncake is compared over TCP between host memory", device=options.device
        )
    unit = deployment.prefill.virtual_block_tokens
    if any(tokens % unit for tokens in deployment.tokens):
        raise ConfigError(
            "the peer reads whole blocks: requests must fill them",
            tokens=list(deployment.tokens),
            block_tokens=unit,
        )


class PeerPair(Owner):
    """The same two engines, with a peer's agent on each rank; ranks of equal number read from one another."""

    def __init__(self, deployment: Deployment, setting: PeerSetting) -> None:
        options = deployment.options
        self._name = setting.name
        environment = {**setting.environment, **_transports(options)}
        with ExitStack() as exits:
            self._prefill, self._decode = (
                exits.enter_context(
                    EngineProcesses(name, opens, environment=environment, site=options.peer.site)
                )
                for name, opens in zip(("prefill", "decode"), deployment.opens(), strict=True)
            )
            opened = [
                engine.ask_each(_opens(engine, options.peer.name, setting), m.AgentOpened)
                for engine in (self._prefill, self._decode)
            ]
            self._decode.ask_each([m.JoinAgent(each) for each in opened[0]], m.Ok)
            super().__init__(exits)

    def prepare(self, transfer: Transfer) -> None:
        """See `EnginePair`."""
        write_both(self._prefill, self._decode, transfer)

    def check(self, transfer: Transfer) -> None:
        """See `EnginePair`."""
        check_arrived(self._decode, transfer, f"the transfer by {self._name}")

    def run(self, transfer: Transfer) -> tuple[float, ...]:
        """Seconds with and without making the request, of the slowest rank."""
        reads = self._decode.ask_all(
            m.ReadBlocks(remote=transfer.prefill_blocks, local=transfer.decode_blocks), m.BlocksRead
        )
        return max(each.request_s for each in reads), max(each.transfer_s for each in reads)

    def pause(self) -> None:
        """A peer's progress threads use the processor even when idle: stop them while others are timed."""
        self._prefill.pause()
        self._decode.pause()

    def resume(self) -> None:
        """Undo `pause`."""
        self._prefill.resume()
        self._decode.resume()


def _opens(engine: EngineProcesses, peer: PeerName, setting: PeerSetting) -> list[m.OpenAgent]:
    return [
        m.OpenAgent(
            peer, f"{engine.engine_id}-{Rank(each.pp_rank, each.tp_rank)}", setting.num_threads
        )
        for each in engine.opens
    ]


def _transports(options: BenchOptions) -> dict[str, str]:
    """NIXL moves bytes by UCX, too."""
    tls = options.ways.tls
    return {"UCX_TLS": tls} if tls and options.peer.name == "nixl" else {}
