"""What a transfer between two engines is held against: the same bytes by memcpy, by a raw socket, between GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from kvconnector.bench import limits
from kvconnector.bench.contract import Gpus, Part
from kvconnector.bench.deployments import Deployment, Transfer
from kvconnector.bench.owner import Owner
from kvconnector.bench.shapes import engine_geometry
from kvconnector.planning import plan_transfer
from kvconnector.topology import TpKVTopology

INGRESS = "plain copies into one GPU"


class TransferLimit(Owner):
    """One limit for one request size, taking its turn among the contenders. It has nothing to prepare or to check."""

    def __init__(
        self, name: str, part: Part, move: Callable[[], float], exits: ExitStack | None = None
    ) -> None:
        super().__init__(exits if exits is not None else ExitStack())
        self.name = name
        self.part = part
        self._move = move

    def prepare(self, _transfer: Transfer) -> None:
        """See `Timed`."""

    def run(self, _transfer: Transfer) -> tuple[float, ...]:
        """See `Timed`."""
        return (self._move(),)

    def check(self, _transfer: Transfer) -> None:
        """See `Timed`."""

    def pause(self) -> None:
        """See `Timed`."""

    def resume(self) -> None:
        """See `Timed`."""


def limits_of(deployment: Deployment, transfer: Transfer) -> list[TransferLimit]:
    """The limits that apply to these devices and transports."""
    nbytes = deployment.payload_bytes(transfer)
    options = deployment.options
    if options.device != "cpu":
        return _gpu_limits(deployment, transfer)
    copy: Part = "limit" if options.ways.share_memory else "variant"
    with ExitStack() as exits:
        stream = exits.enter_context(limits.SocketStream(nbytes, timeout_s=options.timeout_s))
        return [
            TransferLimit("memcpy, one thread", copy, limits.HostCopy(nbytes).move),
            TransferLimit("raw TCP socket", "limit", stream.move, exits),
        ]


def _gpu_limits(deployment: Deployment, transfer: Transfer) -> list[TransferLimit]:
    """Plain copies of each producer's share to each consumer at once; and of all bytes into one consumer's GPU."""
    copies = copies_of(deployment, transfer)
    plain = limits.DeviceCopies(copies)
    found = [TransferLimit(plain.name, "limit", plain.move)]
    if one_pair(deployment) is not None:
        target = deployment.devices()[1][0]
        sources = sorted({source for source, _ in copies} - {target}) or [target]
        share = -(-deployment.payload_bytes(transfer) // len(sources))
        into_one = limits.DeviceCopies(Counter({(source, target): share for source in sources}))
        found.append(TransferLimit(INGRESS, "variant", into_one.move))
    return found


def copies_of(deployment: Deployment, transfer: Transfer) -> Counter[tuple[str, str]]:
    """Bytes that a transfer moves from device to device."""
    options = deployment.options
    producer = engine_geometry(options.model, deployment.prefill, "prefill")
    consumer = engine_geometry(options.model, deployment.decode, "decode")
    sources, targets = deployment.devices()
    device_of = dict(zip(deployment.prefill.ranks, sources, strict=True))
    copies: Counter[tuple[str, str]] = Counter()
    for rank, target in zip(deployment.decode.ranks, targets, strict=True):
        topology = TpKVTopology(consumer, rank)
        planned = plan_transfer(
            topology, producer, [range(transfer.num_tokens)], chunk_bytes=1 << 30
        )
        for read in planned.reads:
            copies[device_of[read.source], target] += read.total_bytes
    return copies


def one_pair(deployment: Deployment) -> Deployment | None:
    """The same request from one rank's GPU to one other's; None on the CPU, and where there is only one pair."""
    prefill, decode = (shape.on_one_rank for shape in (deployment.prefill, deployment.decode))
    is_one = (prefill, decode) == (deployment.prefill, deployment.decode)
    if is_one or deployment.options.device == "cpu":
        return None
    gpus = [int(devices[0].partition(":")[2]) for devices in deployment.devices()]
    options = msgspec.structs.replace(deployment.options, gpus=Gpus((gpus[0],), (gpus[1],)))
    return Deployment(options, prefill, decode, deployment.tokens)
