"""The producer's session: leases, reads and confirmations of one worker, as a pure state machine.

A lease ends when every consumer rank that the topology names has confirmed, when its time is up, or when either side
aborts. Its blocks are released only once no send reads them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

from kvconnector.agenda import NEVER, Agenda
from kvconnector.config import LeaseConfig
from kvconnector.errors import (
    KVConnectorError,
    LocalError,
    OfferReclaimedError,
    TransferAbortedError,
)
from kvconnector.ids import Rank
from kvconnector.session import events as ev
from kvconnector.session.completion import Phase
from kvconnector.session.containment import (
    failure_of,
    guarded,
    handled,
)
from kvconnector.session.lease import EndedLeases, Lease, LeaseState, Send
from kvconnector.session.link import FromPeer, Link, kind_of
from kvconnector.session.machine import Table, staying
from kvconnector.session.orders import (
    GrowRequest,
    HoldRequest,
    LeaseOrder,
    ProducerOrder,
    ReclaimRequest,
    WithdrawRequest,
)
from kvconnector.session.peers import EarlyEvent, EarlyEvents, Peer, Peers, name_of
from kvconnector.session.port import Ports
from kvconnector.session.read_check import check_read
from kvconnector.session.trace import LeaseTrace
from kvconnector.topology import EngineGeometry, TpKVTopology
from kvconnector.wire import messages as m
from kvconnector.wire.messages import Refusal

MAX_READS_OF_PEER = 1024
"""The most packed reads of one consumer worker at a time. Each has a staging slot there, of which there are 16, and is
work in every pass of the loop here.
"""
MAX_REMEMBERED_LEASES = 4096
MAX_REMEMBERED_PROMPTS = 1 << 17
"""Prompts whose leases ended before they were complete are remembered, as the engine computes them and offers their
blocks."""


_S = LeaseState
_ENDED = frozenset({_S.RELEASED, _S.EXPIRED, _S.ABORTED})

LEASE_TABLE: Table[LeaseState] = Table(
    "lease",
    _S.FILLING,
    {
        _S.FILLING: {
            GrowRequest: frozenset({_S.FILLING, _S.DRAINING, _S.ABORTED}),
            HoldRequest: frozenset({_S.HELD, _S.READING, _S.DRAINING, _S.ABORTED}),
            m.Done: frozenset({_S.FILLING, _S.RELEASED, _S.DRAINING}),
            m.Abort: frozenset({_S.ABORTED, _S.DRAINING}),
            WithdrawRequest: frozenset({_S.ABORTED, _S.DRAINING}),
            **staying(_S.FILLING, m.Follow, m.Read, m.Heartbeat, ev.SendOver, ReclaimRequest),
        },
        _S.HELD: {
            m.Read: frozenset({_S.HELD, _S.READING}),
            m.Done: frozenset({_S.HELD, _S.RELEASED}),
            m.Abort: frozenset({_S.ABORTED}),
            WithdrawRequest: frozenset({_S.ABORTED}),
            ev.Tick: frozenset({_S.EXPIRED}),
            ReclaimRequest: frozenset({_S.HELD, _S.EXPIRED}),
            **staying(_S.HELD, m.Follow, m.Heartbeat),
        },
        _S.READING: {
            m.Done: frozenset({_S.READING, _S.DRAINING}),
            ev.SendOver: frozenset({_S.READING, _S.HELD}),
            m.Abort: frozenset({_S.DRAINING}),
            WithdrawRequest: frozenset({_S.DRAINING}),
            ev.Tick: frozenset({_S.DRAINING}),
            **staying(_S.READING, m.Follow, m.Read, m.Heartbeat, ReclaimRequest),
        },
        _S.DRAINING: {
            ev.SendOver: _ENDED | {_S.DRAINING},
            **staying(
                _S.DRAINING,
                GrowRequest,
                HoldRequest,
                m.Follow,
                m.Read,
                m.Heartbeat,
                m.Done,
                m.Abort,
                WithdrawRequest,
                ReclaimRequest,
            ),
        },
        _S.RELEASED: {},
        _S.EXPIRED: {},
        _S.ABORTED: {},
    },
)


class ProducerSession:
    """All leases and peers of one producer worker. All events come in through `handle`; `peers.py` has the table of
    peers.

    `reply` is the answer to the `Hello` of each compatible consumer. If it has an export, leases are published on the
    board for consumers of this host. A consumer may be silent for `timeout_s`, and has named each request that it waits
    for after `named_within_s`. The next `Tick` must come by `next_deadline()`, which may be earlier than anything is
    due.
    """

    def __init__(
        self,
        geometry: EngineGeometry,
        rank: Rank,
        reply: m.HelloReply,
        lease: LeaseConfig,
        timeout_s: float,
        *,
        named_within_s: float = 0.0,
        ports: Ports,
    ) -> None:
        self._links, self._data, self._engine = ports.links, ports.data, ports.engine
        self._topology = TpKVTopology(geometry, rank)
        self._reply = reply
        self._config = lease
        self._named_within_s = named_within_s
        self._leases: dict[str, Lease] = {}
        self._agenda: Agenda[Lease | Peer | EarlyEvents | EarlyEvent] = Agenda()
        self.next_deadline = self._agenda.next_deadline
        self._by_request: dict[str, Lease] = {}
        self._early = EarlyEvents(self._agenda)
        self._peers = Peers(
            self._topology, reply, timeout_s, self._agenda, ports, on_lost=self._early.drop
        )
        self.keep_alive = self._peers.keep_alive
        self._ended = EndedLeases(MAX_REMEMBERED_LEASES)
        self._ended_early = EndedLeases(MAX_REMEMBERED_PROMPTS)

    def handle(self, event: object, now: float) -> None:
        """Handle an event. No other method changes leases and peers. An unexpected exception ends one lease or one
        link: see `containment`.

        Raises:
            LocalError: the engine granted a request twice; nothing has changed.
            WorkerFault: the worker cannot go on.
        """
        handled(self._contain, self._handle, event, now)

    def _handle(self, event: object, now: float) -> None:
        handler = self._HANDLERS.get(kind_of(event))
        if handler is None:  # the event concerns a link
            self._peers.handle(event, now)
        else:
            handler(self, event, now)

    def change_reply(self, reply: m.HelloReply, links: Iterable[Link]) -> list[Link]:
        """Answer greetings with `reply` from now on. Returns the consumers among `links` that were sent an earlier
        answer. The two replies may differ only in their exports.
        """
        self._reply = self._peers.reply = reply
        return [link for link in links if self._peers.ready(link) is not None]

    def holds(self, request_id: str) -> bool:
        """Returns True if a lease on the request's blocks has not ended."""
        return request_id in self._by_request

    def _granted(self, event: LeaseOrder, now: float) -> None:
        lease = self._leases.get(event.transfer_id)
        if lease is not self._by_request.get(event.request_id) or (lease and lease.is_complete):
            raise LocalError(
                "a request was granted twice",
                request=event.request_id,
                engine=self._topology.engine.engine_id,
            )
        if lease is None:
            # it ended before it was complete, or its name is used again: then messages about
            # the first use could not be distinguished from those about the second
            if self._find_ended(event) is not None:
                if isinstance(event, HoldRequest):
                    self._report_early_end(event, now)
                return
            lease = Lease(LEASE_TABLE, event, now)
            self._leases[event.transfer_id] = self._by_request[event.request_id] = lease
        lease.accept(event, now)
        if isinstance(event, HoldRequest):
            lease.is_complete, lease.extra, lease.trace.complete_s = True, event.extra, now
        if lease.state is LeaseState.DRAINING:
            return
        if event.error is not None or not lease.grow(event):
            self._end(lease, _ABORTED, event.error or _moved_error())
        else:
            self._grow(lease, event, now)
        self._handle_early(self._early.take(event.transfer_id), now)

    def _handle_early(self, events: Iterable[EarlyEvent], now: float) -> None:
        for early in events:
            guarded(partial(self._contain, early, now), self._handle, early, now)

    def _grow(self, lease: Lease, event: LeaseOrder, now: float) -> None:
        """Let consumers read the lease's tokens, and report its progress to its followers."""
        target = LeaseState.FILLING
        if isinstance(event, HoldRequest):
            target = LeaseState.READING if lease.sends else LeaseState.HELD
            lease.expires_at = now + (event.lease_duration_s or self._config.duration_s)
            self._agenda.plan(lease, lease.expires_at)
        lease.move(target)
        if self._reply.export is not None:
            lease.keys = lease.make_keys()
            for key in lease.keys:
                self._data.publish(key, lease.watermark)
        self._notify_followers(lease)
        if lease.is_complete:
            self._data.expect_reads(lease.blocks)

    def _followed(self, event: FromPeer[m.Follow], now: float) -> None:
        """Report a prompt's progress to a consumer, now or once our engine has granted the lease."""
        follow = event.message
        peer = self._peers.ready(event.link)
        if peer is None:
            return
        lease = self._leases.get(follow.transfer_id)
        if lease is not None and lease.opens_with(follow.secret):
            lease.accept(event, now)
            lease.is_wanted = True
            if event.link not in lease.followers:
                lease.followers += peer.sole_follower
            self._links.send(event.link, lease.progress())
        elif (ended := self._find_ended(follow)) is not None:
            self._refuse(event, *ended)
        elif lease is not None:
            self._refuse(event, Refusal.UNKNOWN_TRANSFER, _UNKNOWN)
        else:
            self._keep_early(peer, event, now + self._config.early_follow_s)

    def _withdrawn(self, event: WithdrawRequest, now: float) -> None:
        lease = self._by_request.get(event.request_id)
        if lease is None:
            return  # it was released in the meantime
        lease.accept(event, now)
        self._end(lease, LeaseState.ABORTED, _withdrawn_error())

    def _report_early_end(self, event: HoldRequest, now: float) -> None:
        """Report a prompt whose lease ended before the prompt was complete. If its consumers needed no more of it,
        report it as read.
        """
        error, outcome = None, LeaseState.RELEASED
        if not self._ended_early.has_released(event.transfer_id, event.secret):
            error, outcome = _given_up_error(), _ABORTED
        self._engine.release(event.request_id, outcome.value, LeaseTrace(now, now), error)

    def _reclaimed(self, event: ReclaimRequest, now: float) -> None:
        """Take back a held request that no consumer has asked for, because the pool is full of such requests. A
        consumer asks for a new request only with its next heartbeat, and a consumer on this host may already be reading
        it. So the request stays until a heartbeat would have named it. A direct read that is still under way then
        checks the board afterwards, as at any other end of a lease.
        """
        lease = self._by_request.get(event.request_id)
        if lease is None:
            return  # it was released in the meantime
        lease.accept(event, now)
        if lease.state is LeaseState.HELD and not lease.is_wanted:
            lease.reclaim_at = lease.trace.complete_s + self._named_within_s
            self._end_if_reclaimed(lease, now)

    def _end_if_reclaimed(self, lease: Lease, now: float) -> None:
        """If no consumer has asked by `reclaim_at` for a lease that is taken back, end it. Before that time, plan its
        end.
        """
        if lease.is_wanted:
            lease.reclaim_at = NEVER
        if lease.reclaim_at <= now:
            self._end(lease, LeaseState.EXPIRED, _reclaimed_error())
        else:
            self._agenda.plan(lease, min(lease.reclaim_at, lease.expires_at))

    def _read_asked(self, event: FromPeer[m.Read], now: float) -> None:
        read = event.message
        peer = self._peers.ready(event.link)
        lease = self._leases.get(read.transfer_id)
        if peer is None or peer.route is None:
            self._refuse(event, Refusal.NOT_GREETED, "a read came before the greeting")
        elif read.incarnation != self._reply.incarnation:
            self._refuse(event, Refusal.STALE_INCARNATION, "this engine was restarted")
        elif lease is None or _is_early(read, lease):
            self._early_read(peer, event, now)
        elif not lease.opens_with(read.secret):
            self._refuse(event, Refusal.UNKNOWN_TRANSFER, _UNKNOWN)
        elif read.read_id not in peer.sends:  # otherwise a duplicate
            if len(peer.sends) >= MAX_READS_OF_PEER:
                self._refuse(event, Refusal.INTERNAL, "too many reads at a time")
                return
            lease.accept(event, now)
            if lease.state is LeaseState.DRAINING:
                self._refuse(event, *lease.refusal())
                return
            groups, max_chunk_bytes = self._topology.geometry.groups, self._reply.max_chunk_bytes
            try:
                source = check_read(read, peer.route, groups, lease, max_chunk_bytes)
            except KVConnectorError as error:
                self._refuse(event, Refusal.INVALID_READ, error.statement)
                return
            lease.expires_at = max(lease.expires_at, now + self._config.duration_s)
            lease.is_wanted = True
            send = Send(event.link, lease, read, source, lease.blocks, now)
            if lease.state is LeaseState.HELD:
                lease.move(LeaseState.READING)
            lease.sends[send] = None
            peer.sends[read.read_id] = send
            self._data.start_send(send)

    def _early_read(self, peer: Peer, event: FromPeer[m.Read], now: float) -> None:
        """Refuse a read, or keep it until its lease is granted: a router may be faster than our engine's step."""
        ended = self._find_ended(event.message)
        if ended is not None:
            self._refuse(event, *ended)
        else:  # with another secret it may be a new request under an old name, whose lease has not been granted yet
            self._keep_early(peer, event, now + self._config.early_read_s)

    def _keep_early(self, peer: Peer, event: EarlyEvent, until: float) -> None:
        """Keep a message until its lease is granted, and refuse the messages for which there is then no room."""
        for dropped in self._early.keep(peer, event, until):
            if isinstance(dropped.message, m.Read | m.Follow):
                self._refuse(dropped, Refusal.INTERNAL, _TOO_EARLY)

    def _read_cancelled(self, event: FromPeer[m.CancelRead], now: float) -> None:
        peer, read_id = self._peers.ready(event.link), event.message.read_id
        if peer is None:
            return
        if read_id in peer.sends:
            self._data.stop_send(peer.sends[read_id])
        elif (early := peer.early.get(read_id)) is not None:
            self._early.remove(early)
            self._end_read(event.link, read_id, 0, Refusal.ABORTED, "cancelled")
        # otherwise all chunks were sent already, and the consumer receives them

    def _send_over(self, event: ev.SendOver, now: float) -> None:
        send = event.send
        lease = send.lease
        self._peers.end_send(send)
        lease.accept(event, now)
        if event.sent_chunks is not None and self._peers.ready(send.link) is not None:
            refusal, text = lease.refusal()
            if event.error is not None:
                refusal, text = Refusal.INTERNAL, event.error.statement
            self._end_read(send.link, send.read.read_id, event.sent_chunks, refusal, text)
        del lease.sends[send]
        lease.trace.sent((Phase("send", send.began, now), *event.phases))
        if lease.sends or lease.state is LeaseState.FILLING:
            return
        if lease.outcome is not None:
            self._close(lease, lease.outcome)
        else:
            lease.move(LeaseState.HELD)

    def _end_read(
        self, link: Link, read_id: int, sent_chunks: int, refusal: Refusal, text: str
    ) -> None:
        """Notify a consumer worker that its read ends after the first `sent_chunks` chunks."""
        ended = m.ReadEnded(
            read_id=read_id, sent_chunks=sent_chunks, refusal=refusal, text=text[: m.MAX_TEXT]
        )
        self._links.send(link, ended)

    def _over_for_peer(self, event: FromPeer[m.Done | m.Abort], now: float) -> None:
        key = event.message
        peer = self._peers.ready(event.link)
        if peer is None:
            return  # it has not greeted us
        lease = self._leases.get(key.transfer_id)
        if lease is None:
            # our engine's next step may bring the lease; a duplicate changes nothing
            if self._find_ended(key) is None:
                self._keep_ending(peer, event, now)
            return
        if not lease.opens_with(key.secret):
            return
        lease.accept(event, now)
        if isinstance(key, m.Abort):
            self._end(
                lease, LeaseState.ABORTED, _given_up_error(str(peer.engine_id), str(peer.rank))
            )
            return
        lease.is_wanted = True
        ranks = lease.confirmed.setdefault(peer.engine_id, set())
        ranks.add(peer.rank)
        if ranks >= peer.readers:
            self._end(lease, LeaseState.RELEASED)

    def _keep_ending(self, peer: Peer, event: FromPeer[m.Done | m.Abort], now: float) -> None:
        """Keep the end of a transfer until its lease is granted. It replaces the peer's earlier message of interest,
        and may wait as long as that: the lease can be just as late.
        """
        key, keep_s = event.message, self._config.early_read_s
        follow = peer.early.get(m.Follow(transfer_id=key.transfer_id, secret=key.secret))
        if follow is not None:
            self._early.remove(follow)
            keep_s = max(keep_s, self._config.early_follow_s)
        self._keep_early(peer, event, now + keep_s)

    def _find_ended(self, key: m.TransferKey | m.Read | LeaseOrder) -> tuple[Refusal, str] | None:
        remembered = self._ended, self._ended_early
        found = [each.find(key.transfer_id, key.secret) for each in remembered]
        return found[0] or found[1]

    def _probed(self, event: FromPeer[m.Probe], now: float) -> None:
        if self._peers.ready(event.link) is not None:
            self._data.probe(event.link, event.message)

    def _heartbeat(self, event: FromPeer[m.Heartbeat], now: float) -> None:
        """Renew the leases that a heartbeat names, and report the progress of followed prompts."""
        heartbeat = event.message
        for key in (*heartbeat.transfers, *heartbeat.followed):
            lease = self._leases.get(key.transfer_id)
            if lease is not None and lease.opens_with(key.secret):
                guarded(partial(self._end_torn, lease, now), self._renew, lease, event, now)
        for follow in heartbeat.followed:
            followed = FromPeer(event.link, follow)
            guarded(partial(self._contain, followed, now), self._handle, followed, now)
        self._links.send(event.link, m.HeartbeatReply(number=heartbeat.number))

    def _renew(self, lease: Lease, event: FromPeer[m.Heartbeat], now: float) -> None:
        lease.accept(event, now)
        lease.is_wanted = True
        lease.expires_at = max(lease.expires_at, now + self._config.duration_s)

    def _tick(self, event: ev.Tick, now: float) -> None:
        """Give up silent peers, end expired leases, and refuse early reads and follows whose lease did not come."""
        for thing in self._agenda.due(now):
            if isinstance(thing, Peer):
                self._peers.tick(thing, event, now)
            elif isinstance(thing, EarlyEvents):
                self._handle_early(thing.go_on(), now)
            elif isinstance(thing, FromPeer):
                guarded(partial(self._contain, thing, now), self._early_due, thing)
            else:
                guarded(partial(self._end_torn, thing, now), self._lease_due, thing, event, now)

    def _early_due(self, event: EarlyEvent) -> None:
        """Refuse an early read or follow whose lease did not come."""
        is_asking = isinstance(event.message, m.Read | m.Follow)
        if not self._early.remove(event).is_lost and is_asking:
            self._refuse(event, Refusal.UNKNOWN_TRANSFER, _UNKNOWN)

    def _lease_due(self, lease: Lease, event: ev.Tick, now: float) -> None:
        """End a lease that was not renewed."""
        if lease.expires_at <= now:
            lease.accept(event, now)
            self._end(lease, LeaseState.EXPIRED)
        else:
            self._end_if_reclaimed(lease, now)

    def _refuse(self, event: FromPeer[m.Read | m.TransferKey], refusal: Refusal, text: str) -> None:
        """Refuse a read or a follow."""
        asked, text = event.message, text[: m.MAX_TEXT]
        if isinstance(asked, m.Read):
            refused: m.Message = m.ReadRefused(read_id=asked.read_id, refusal=refusal, text=text)
        else:
            refused = m.Progress(
                transfer_id=asked.transfer_id, secret=asked.secret, refusal=refusal, text=text
            )
        self._links.send(event.link, refused)

    def _notify_followers(self, lease: Lease) -> None:
        """Report a prompt's progress to its followers, except those that need no more of it. Forget lost followers."""
        progress, lost = lease.progress(), False
        for link in lease.followers:
            peer = self._peers.ready(link)
            if peer is None:
                lost = True
            elif not lease.confirmed.get(peer.engine_id, _NO_RANKS) >= peer.readers:
                self._links.send(link, progress)
        if lost:
            lease.followers = tuple([link for link in lease.followers if self._peers.ready(link)])

    def _end(
        self, lease: Lease, outcome: LeaseState, reason: KVConnectorError | None = None
    ) -> None:
        """End the lease, now or as soon as the sends that read its blocks have stopped."""
        for key in lease.keys:
            self._data.retract(key)
        lease.keys = ()
        self._agenda.forget(lease)
        is_filling = lease.state is LeaseState.FILLING
        if lease.outcome is None:
            lease.outcome, lease.reason = outcome, reason
        if is_filling:
            self._notify_followers(lease)
        if not lease.sends:
            self._close(lease, outcome)
            return
        lease.move(LeaseState.DRAINING)
        # even if all have confirmed: their sends lack at most a local completion, and a consumer that
        # confirms before it has everything must not keep the blocks
        for send in lease.sends:
            self._data.stop_send(send)

    def _close(self, lease: Lease, outcome: LeaseState) -> None:
        lease.move(outcome)
        if lease.is_complete:
            self._engine.release(lease.request_id, outcome.value, lease.trace, lease.reason)
            lease.is_reported = True
        self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        """Remove a lease that is over, and remember how it ended. Idempotent."""
        if self._leases.get(lease.transfer_id) is lease:
            del self._leases[lease.transfer_id]
            del self._by_request[lease.request_id]
            (self._ended if lease.is_complete else self._ended_early).add(lease)

    # -- containment --

    def _contain(self, event: object, now: float, error: Exception) -> None:
        """End what an event was about, whose handler has raised an unexpected exception."""
        if isinstance(event, ev.SendOver):
            self._contain_send_over(event, now, error)
        elif isinstance(event, FromPeer):
            self._contain_message(event, now, error)
        elif isinstance(event, ProducerOrder):
            self._contain_order(event, now, error)
        else:
            self._engine.note_contained(f"a {kind_of(event).__name__}", error)

    def _contain_order(self, order: ProducerOrder, now: float, error: Exception) -> None:
        lease = self._by_request.get(order.request_id)
        if lease is not None:
            lease.is_complete = lease.is_complete or isinstance(order, HoldRequest)
            self._end_torn(lease, now, error)
            return
        self._engine.note_contained(f"request {order.request_id}", error)
        if isinstance(order, HoldRequest):  # it was not granted, but the engine waits for its end
            outcome = LeaseState.ABORTED.value
            self._engine.release(order.request_id, outcome, None, failure_of(error))

    def _contain_message(self, event: FromPeer[Any], now: float, error: Exception) -> None:
        """End the lease that a peer's message names, or the peer's link if it names none."""
        message = event.message
        peer = self._peers.ready(event.link)
        if not isinstance(message, m.Read | m.TransferKey):
            send = None if peer is None else peer.sends.get(getattr(message, "read_id", -1))
            if send is None:
                self._peers.contain(event.link, now, error)
            else:  # it was to be cancelled
                self._end_torn(send.lease, now, error)
            return
        if peer is not None and (early := peer.early.get(name_of(event))) is not None:
            self._early.remove(early)
        if isinstance(message, m.Follow) or (
            isinstance(message, m.Read) and (peer is None or message.read_id not in peer.sends)
        ):
            self._refuse(event, Refusal.INTERNAL, failure_of(error).statement)
        lease = self._leases.get(message.transfer_id)
        if lease is not None and lease.opens_with(message.secret):
            self._end_torn(lease, now, error)
        else:
            self._engine.note_contained(f"transfer {message.transfer_id}", error)

    def _contain_send_over(self, event: ev.SendOver, now: float, error: Exception) -> None:
        send = event.send
        self._peers.end_send(send)
        send.lease.sends.pop(send, None)
        if event.sent_chunks is not None and self._peers.ready(send.link) is not None:
            text = failure_of(error).statement
            self._end_read(send.link, send.read.read_id, event.sent_chunks, Refusal.INTERNAL, text)
        self._end_torn(send.lease, now, error)

    def _end_torn(self, lease: Lease, now: float, error: Exception) -> None:
        """End a lease whose handler raised an exception. Each step may be repeated. See `containment`."""
        self._engine.note_contained(f"request {lease.request_id}", error)
        for key in lease.keys:
            self._data.retract(key)
        lease.keys = ()
        self._agenda.forget(lease)
        if lease.outcome is None:
            lease.outcome, lease.reason = LeaseState.ABORTED, failure_of(error)
        if not lease.is_complete:
            guarded(partial(self._lose_followers, lease, now), self._notify_followers, lease)
        for send in lease.sends:
            self._data.stop_send(send)
        if lease.sends:
            lease.force(LeaseState.DRAINING, now)
            return
        lease.force(lease.outcome, now)
        self._forget(lease)
        if lease.is_complete and not lease.is_reported:
            outcome = lease.outcome.value
            self._engine.release(lease.request_id, outcome, None, lease.reason)
            lease.is_reported = True

    def _lose_followers(self, lease: Lease, now: float, error: Exception) -> None:
        """Give up the followers of a prompt that cannot be told of its end: they would wait for it."""
        self._engine.note_contained(f"the followers of request {lease.request_id}", error)
        for link in lease.followers:
            if self._peers.ready(link) is not None:
                self._peers.give_up(link, now, error)

    _HANDLERS: ClassVar[dict[type, Callable[..., None]]] = {
        GrowRequest: _granted,
        HoldRequest: _granted,
        WithdrawRequest: _withdrawn,
        ReclaimRequest: _reclaimed,
        m.Follow: _followed,
        m.Read: _read_asked,
        m.CancelRead: _read_cancelled,
        ev.SendOver: _send_over,
        m.Done: _over_for_peer,
        m.Abort: _over_for_peer,
        m.Heartbeat: _heartbeat,
        m.Probe: _probed,
        ev.Tick: _tick,
    }


_ABORTED = LeaseState.ABORTED
_NO_RANKS = frozenset[Rank]()
_TOO_EARLY = "too many reads and followed prompts came before their leases"
_UNKNOWN = "no such transfer"
"""A transfer with this name but another secret gets the same text, so that the text reveals nothing."""


def _withdrawn_error() -> TransferAbortedError:
    return TransferAbortedError("this engine took the blocks back before they were read")


def _reclaimed_error() -> OfferReclaimedError:
    return OfferReclaimedError("this engine took the blocks back because its cache was full")


def _moved_error() -> TransferAbortedError:
    return TransferAbortedError("the prompt's blocks were replaced while consumers read them")


def _given_up_error(engine_id: str = "", rank: str = "") -> TransferAbortedError:
    where = {"engine": engine_id, "rank": rank} if engine_id else {}
    return TransferAbortedError("a consumer gave up the request before it had read it", **where)


def _is_early(read: m.Read, lease: Lease) -> bool:
    """Returns True if the read names blocks, as those of complete leases do, and the lease is not complete yet."""
    is_filling = lease.state is LeaseState.FILLING
    return is_filling and bool(read.blocks) and lease.opens_with(read.secret)
