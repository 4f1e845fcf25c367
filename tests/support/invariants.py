"""What holds between the collections of a session after every event."""

from __future__ import annotations

from kvconnector.session import ConsumerSession, ProducerSession
from kvconnector.session.engines import RemoteEngines
from kvconnector.session.lease import LeaseState
from kvconnector.session.load import LoadState
from kvconnector.session.peers import PeerState
from kvconnector.session.reads import NEVER
from kvconnector.session.remote_engine import EngineState


def check_invariants(session: ProducerSession | ConsumerSession) -> None:
    """Raise AssertionError where a session's records do not fit each other."""
    if isinstance(session, ProducerSession):
        _check_producer(session)
    else:
        _check_engines(session._engines)
        _check_consumer(session)


def _check_producer(session: ProducerSession) -> None:
    for transfer_id, lease in session._leases.items():
        is_draining = lease.state is LeaseState.DRAINING
        assert not lease.state.is_final, lease.state
        assert session._by_request[lease.request_id] == transfer_id
        is_filling = lease.state is LeaseState.FILLING
        is_sending = lease.state is LeaseState.READING or is_draining
        assert is_filling or bool(lease.sends) == is_sending
        assert (lease.outcome is not None) == is_draining
        assert not (lease.keys and is_draining)
        assert is_draining or lease.is_complete is not is_filling
        # the engine computes for as long as it wants, a consumer that is gone keeps nothing for longer than it may
        assert is_draining or (lease.expires_at < NEVER) is not is_filling
        assert is_draining or session._no_expiry_before <= lease.expires_at
    assert set(session._by_request.values()) == set(session._leases)
    sends = {key for lease in session._leases.values() for key in lease.sends}
    assert sends == set(session._by_send)
    for link, peer in session._peers._peers.items():
        assert peer.link == link
        assert peer.state in (PeerState.HELLO, PeerState.READY), peer.state
        assert peer.hello is not None


def _check_consumer(session: ConsumerSession) -> None:
    for load in session._loads.values():
        in_flight = load.state in (LoadState.READING, LoadState.DRAINING)
        assert bool(load.reads) == in_flight, (load.state, load.reads)
        assert all(read_id in session._reads for read_id in load.reads)
        is_awaited = load.state is LoadState.WANTED and load.is_followed
        assert is_awaited or (load.error is not None) == (load.state is LoadState.DRAINING)
        assert load.is_followed or load.state is not LoadState.FOLLOWING
        # whoever follows a producer waits no longer than until a deadline
        assert not is_awaited or (load.deadline < NEVER) is (load.error is None)
        assert load.error is None or load.asked is not None or load.has_begun
        # whatever the engine waits for ends by itself or by a deadline
        assert load.asked is None or load.error is not None or load.deadline < NEVER, load.state
    for read in session._reads:
        load_of_read = session._loads.get(read.request_id)
        is_writing = load_of_read is not None and read.read_id in load_of_read.reads
        assert is_writing or read.is_stopped, read
        assert read.is_stopped or session._engines.ready(read.engine) is not None, read
        # whatever still holds slots ends by itself or by a deadline
        waits_for_peer = read.is_stopped and read.is_asked and not read.is_peer_over
        assert not waits_for_peer or read.deadline < NEVER, read


def _check_engines(engines: RemoteEngines) -> None:
    open_links = {link for engine in engines._engines.values() for link in engine.links}
    assert open_links == set(engines._by_link)
    for engine in engines._engines.values():
        if engine.state is EngineState.READY:
            assert all(w.answered and w.warm for w in engine.workers.values())
            assert engine.plan is not None
