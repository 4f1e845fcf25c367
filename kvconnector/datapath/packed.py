"""The packed path: pack with one kernel, stream large tagged messages, unpack with one kernel. It always works."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from kvconnector.datapath.base import (
    DataEvent,
    Program,
    ReadOrigin,
    SendsOnly,
    TransferRecord,
    Unvisited,
)
from kvconnector.datapath.copier import Copier
from kvconnector.datapath.receiver import Receiver
from kvconnector.datapath.sender import Sender
from kvconnector.datapath.staging import SlotPool
from kvconnector.session.commands import LinkId
from kvconnector.transport import Transport

MAX_SLOTS = 16


def slots_within(budget_bytes: int, slot_bytes: int, directions: int) -> int:
    """Slots of each direction that the budget pays for, the scratch slot included; at least one, at most `MAX_SLOTS`:
    more do not move bytes faster, and fewer stay in cache.
    """
    return max(1, min(MAX_SLOTS, budget_bytes // slot_bytes // directions - 1))


class PackedDataPath(SendsOnly, Unvisited):
    """`DataPath` over any transport. `send_slots` or `recv_slots` is None where the worker has only the other role.

    `quarantine_s`: how long a slot rests after a send from it was cancelled; see `Sender`.
    """

    name: ClassVar[str] = "packed"

    def __init__(
        self,
        transport: Transport,
        copier: Copier,
        *,
        send_slots: SlotPool | None,
        recv_slots: SlotPool | None,
        window: int,
        quarantine_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._copier = copier
        self._slots = [slots for slots in (send_slots, recv_slots) if slots is not None]
        self._sender = (
            Sender(transport, send_slots, copier, quarantine_s=quarantine_s, clock=clock)
            if send_slots
            else None
        )
        self._receiver = (
            Receiver(transport, recv_slots, copier, window=window, clock=clock)
            if recv_slots
            else None
        )
        self._halves = tuple(half for half in (self._sender, self._receiver) if half is not None)
        self._closed = False

    @property
    def sender(self) -> Sender:
        """The producer's half. Only a worker with that role is asked for it."""
        assert self._sender is not None
        return self._sender

    @property
    def receiver(self) -> Receiver:
        """The consumer's half. Only a worker with that role is asked for it."""
        assert self._receiver is not None
        return self._receiver

    def open_endpoint(
        self, link: LinkId, transport_address: bytes, warm_up_tag: int, warm_up_bytes: int
    ) -> None:
        """See `DataPath`."""
        self.sender.open_endpoint(link, transport_address, warm_up_tag, warm_up_bytes)

    def close_endpoint(self, link: LinkId) -> None:
        """See `DataPath`."""
        self.sender.close_endpoint(link)

    def endpoint(self, link: LinkId) -> int | None:
        """See `DataPath`."""
        return self.sender.endpoint(link)

    def expect_warm_up(self, link: LinkId) -> tuple[int, int]:
        """See `DataPath`."""
        return self.receiver.expect_warm_up(link)

    def forget_warm_up(self, link: LinkId) -> None:
        """See `DataPath`."""
        self.receiver.forget_warm_up(link)

    def submit_send(
        self, link: LinkId, read_id: int, program: Program, *, first_tag: int, window: int
    ) -> None:
        """See `DataPath`."""
        self.sender.submit(link, read_id, program, first_tag=first_tag, window=window)

    def stop_send(self, link: LinkId, read_id: int) -> None:
        """See `DataPath`."""
        self.sender.stop(link, read_id)

    def submit_receive(
        self, read_id: int, program: Program, origin: ReadOrigin | None = None
    ) -> None:
        """See `DataPath`. The origin sends."""
        self.receiver.submit(read_id, program)

    def stop_receive(self, read_id: int) -> None:
        """See `DataPath`."""
        self.receiver.stop(read_id)

    def drain_receive(self, read_id: int, sent_chunks: int | None) -> None:
        """See `DataPath`."""
        self.receiver.drain(read_id, sent_chunks)

    def order_after(self, event: object) -> None:
        """See `DataPath`."""
        self._copier.order_after(event)

    def step(self) -> list[DataEvent]:
        """See `DataPath`."""
        while True:
            events = [event for half in self._halves for event in half.step()]
            # after the halves: the transport wants to be driven once more after whatever was posted
            completions = self._transport.progress()
            for completion in completions:
                _ = any(half.complete(completion) for half in self._halves)
            if events or not completions:
                return events  # whoever gets events calls again

    @property
    def num_busy_slots(self) -> int:
        """Slots of both directions that a read holds."""
        return sum(slots.num_busy for slots in self._slots)

    def take_records(self) -> list[TransferRecord]:
        """See `DataPath`."""
        return self._receiver.take_records() if self._receiver else []

    @property
    def is_pumping(self) -> bool:
        """See `DataPath`. All is moved by `step`."""
        return False

    def pump(self, timeout_s: float, fds: tuple[int, ...]) -> None:
        """See `DataPath`."""

    def is_waiting_for_device(self) -> bool:
        """See `DataPath`."""
        return any(half.is_waiting_for_device() for half in self._halves)

    def fileno(self) -> int:
        """See `DataPath`."""
        return self._transport.fileno()

    def close(self) -> None:
        """See `DataPath`."""
        if not self._closed:
            self._closed = True
            self._transport.close()
