"""A transport inside one process, deterministic, with faults on demand.

A `LoopbackNetwork` joins any number of `LoopbackTransport`s of one thread, which polls them. Small messages are eager
(copied when sent, complete at once); larger ones complete when their receive has taken them, as with a real library, so
code that relies on one or the other fails here first. Memory is host memory.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from kvconnector.errors import (
    LocalError,
    OperationCancelledError,
    PeerLostError,
    RemoteProtocolError,
    TransportError,
)
from kvconnector.transport.tagged_messages import (
    CONTROL_TAG_BIT,
    MAX_CONTROL_PER_CALL,
    MAX_UNSENT_CONTROL_BYTES,
    Buffer,
    Completion,
    ControlFailed,
    ControlMessage,
    ControlRefused,
    MessageSizeError,
    buffer_of_bytes,
)

_ADDRESS_PREFIX = b"loopback:"
NO_FILENO = -1  # for a transport that cannot wake a sleeper and must be polled


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackFaults:
    """Faults of messages posted from now on, drawn from the network's seed.

    `max_delay_calls`: a message arrives after a random number of the receiver's `progress()` calls, at most this many.
    So messages overtake one another, except those of one tag and endpoint. `drop_probability`: chance that a message
    never arrives. An eager send still completes; a larger one does not. `corrupt_probability`: chance that a message
    arrives with its first byte changed; control messages and empty ones never do.
    """

    max_delay_calls: int = 0
    drop_probability: float = 0.0
    corrupt_probability: float = 0.0


@dataclass(slots=True)
class _Message:
    """One message in flight. `ticket` is the sender's while the send is outstanding, else None."""

    source: LoopbackTransport
    flow: int
    tag: int
    buffer: Buffer
    ticket: int | None
    due_call: int

    @property
    def is_control(self):
        return bool(self.tag & CONTROL_TAG_BIT)


class LoopbackNetwork:
    """The wire between loopback transports: routes messages and injects faults."""

    def __init__(self, *, seed=0, eager_limit_bytes=64):
        self._random = random.Random(seed)
        self._eager_limit_bytes = eager_limit_bytes
        self.faults = LoopbackFaults()
        self._members = {}
        self._silent = set()
        self._num_created = 0

    def transport(self):
        return LoopbackTransport(self)

    def lose(self, address, *, silently=False):
        """Cut a transport off, as if its process had died.

        Later sends to it complete with `PeerLostError`; with `silently`, as when a host loses power, they stay
        outstanding.
        """
        member = self._members.pop(address)
        if silently:
            self._silent.add(address)
        else:
            self._fail_inbound(member)
        member._inbound.clear()
        for other in self._members.values():
            other._inbound = deque(m for m in other._inbound if m.source is not member)

    def _fail_inbound(self, lost):
        for message in lost._inbound:
            error = PeerLostError("the peer is gone", address=lost.address)
            if message.is_control:
                message.source._failed_control.append(ControlFailed(message.flow, error))
            else:
                message.source._finish_send(message, error)


class LoopbackTransport:
    """One worker on a `LoopbackNetwork`. Made by `LoopbackNetwork.transport()`."""

    def __init__(self, network):
        self._network = network
        self._endpoints = {}
        self._num_endpoints = 0
        self._num_tickets = 0
        self._num_calls = 0
        self._inbound = deque()
        self._sends = {}
        self._recvs = {}
        self._finished = []
        self._control = deque()
        self._failed_control = []
        self._closed = False
        self._address = _ADDRESS_PREFIX + str(network._num_created).encode()
        network._num_created += 1
        network._members[self._address] = self

    @property
    def address(self):
        return self._address

    def connect(self, address):
        self._check_open()
        if not address.startswith(_ADDRESS_PREFIX):
            raise RemoteProtocolError("this is no loopback address", address=address)
        known = address in self._network._members or address in self._network._silent
        if not known:
            raise TransportError("no transport has this address on the network", address=address)
        self._num_endpoints += 1
        self._endpoints[self._num_endpoints] = address
        return self._num_endpoints

    def disconnect(self, endpoint):
        if self._endpoints.pop(endpoint, None) is None:
            return
        for message in [m for m in self._sends.values() if m.flow == endpoint]:
            self._withdraw(message)
            error = OperationCancelledError("the endpoint was disconnected", endpoint=endpoint)
            self._finish_send(message, error)

    def falls_back_to_tcp(self, endpoint):
        return False

    def send(self, endpoint, tag, buffer):
        address = self._address_of(endpoint)
        ticket = self._new_ticket()
        self._post(endpoint, address, tag, buffer, ticket)
        return ticket

    def _post(self, endpoint, address, tag, buffer, ticket):
        network = self._network
        eager = ticket is None or buffer.nbytes <= network._eager_limit_bytes
        faults = network.faults
        receiver = network._members.get(address)
        if eager:
            buffer = buffer_of_bytes(ctypes.string_at(buffer.address, buffer.nbytes))
        delay = network._random.randint(0, faults.max_delay_calls)
        due_call = (receiver._num_calls if receiver else 0) + delay
        message = _Message(self, endpoint, tag, buffer, ticket, due_call)
        if ticket is not None:
            self._sends[ticket] = message
        if receiver is None and address not in network._silent:
            self._finish_send(message, PeerLostError("the peer is gone", address=address))
            return
        dropped = network._random.random() < faults.drop_probability
        if receiver is not None and not dropped and network._members.get(self._address) is self:
            receiver._inbound.append(message)
        if eager:
            self._finish_send(message, None)

    def send_control(self, endpoint, tag, payload):
        address = self._address_of(endpoint)
        receiver = self._network._members.get(address)
        if receiver is None and address not in self._network._silent:
            raise PeerLostError("the peer is gone", address=address)
        inbound = receiver._inbound if receiver else ()
        mine = (m for m in inbound if m.is_control and m.source is self and m.flow == endpoint)
        if sum(m.buffer.nbytes for m in mine) + len(payload) > MAX_UNSENT_CONTROL_BYTES:
            raise PeerLostError("the peer no longer accepts control messages")
        self._post(endpoint, address, tag, buffer_of_bytes(payload), ticket=None)

    def receive_control(self, limits, *, progress=False):
        if self._closed:
            return []
        if progress:
            self._deliver()
        events, self._failed_control = self._failed_control, []
        for _ in range(min(len(self._control), MAX_CONTROL_PER_CALL)):
            message = self._control.popleft()
            nbytes = len(message.payload)
            accepted = nbytes <= limits.get(message.tag, -1)
            events.append(message if accepted else ControlRefused(message.tag, nbytes))
        return events

    def has_control(self):
        return bool(self._control)

    def discard_unexpected(self, awaited, mask):
        here = [m for m in self._inbound if not m.is_control and m.due_call < self._num_calls]
        unknown = list(takewhile(lambda message: message.tag & mask not in awaited, here))
        for message in unknown:
            self._inbound.remove(message)
            message.source._finish_send(message, None)
        return len(unknown)

    def recv(self, tag, buffer):
        self._check_open()
        ticket = self._new_ticket()
        self._recvs[ticket] = (tag, buffer)
        return ticket

    def cancel(self, ticket):
        self._check_open()
        if not 0 < ticket <= self._num_tickets:
            raise LocalError("no operation has this ticket", ticket=ticket)
        error = OperationCancelledError("the operation was cancelled", ticket=ticket)
        message = self._sends.get(ticket)
        if message is not None:
            self._withdraw(message)
            self._finish_send(message, error)
        if self._recvs.pop(ticket, None) is not None:
            self._finish(ticket, error)

    def progress(self):
        if not self._closed:
            self._deliver()
        finished, self._finished = self._finished, []
        return finished

    def fileno(self):
        return NO_FILENO

    def close(self):
        if self._closed:
            return
        for ticket in [*self._sends, *self._recvs]:
            self.cancel(ticket)
        self._closed, network = True, self._network
        if network._members.get(self._address) is self:
            del network._members[self._address]
            network._fail_inbound(self)
        self._endpoints.clear()

    def _address_of(self, endpoint):
        self._check_open()
        if endpoint not in self._endpoints:
            raise LocalError("no such endpoint", endpoint=endpoint)
        return self._endpoints[endpoint]

    def _check_open(self):
        if self._closed:
            raise LocalError("the transport is closed", address=self._address)

    def _new_ticket(self):
        self._num_tickets += 1
        return self._num_tickets

    def _deliver(self):
        """Match due messages with posted receives, in order."""
        self._num_calls += 1
        held = set()
        kept = deque()
        for message in self._inbound:
            flow = (message.source.address, message.flow, message.tag)
            due = message.due_call < self._num_calls
            if not due or flow in held:
                held.add(flow)
            elif self._match(message):
                continue
            kept.append(message)
        self._inbound = kept

    def _match(self, message):
        tag, sent = message.tag, message.buffer
        if message.is_control:
            payload = ctypes.string_at(sent.address, sent.nbytes)
            self._control.append(ControlMessage(tag, payload))
            return True
        ticket = next((t for t, (posted, _) in self._recvs.items() if posted == tag), None)
        if ticket is None:
            return False
        _, buffer = self._recvs.pop(ticket)
        error = None
        if buffer.nbytes != sent.nbytes:
            error = MessageSizeError("the message does not fit its receive", tag=tag)
        else:
            ctypes.memmove(buffer.address, sent.address, sent.nbytes)
        network, chance = self._network, self._network.faults.corrupt_probability
        if chance and network._random.random() < chance and buffer.nbytes:
            ctypes.c_uint8.from_address(buffer.address).value ^= 0x40
        self._finish(ticket, error)
        message.source._finish_send(message, None)
        return True

    def _withdraw(self, message):
        """Withdraw a message that has not been received yet."""
        for member in self._network._members.values():
            member._inbound = deque(m for m in member._inbound if m is not message)

    def _finish_send(self, message, error):
        """Complete the send of a message once."""
        ticket, message.ticket = message.ticket, None
        if ticket is not None and self._sends.pop(ticket, None) is not None:
            self._finish(ticket, error)

    def _finish(self, ticket, error):
        self._finished.append(Completion(ticket, error))
