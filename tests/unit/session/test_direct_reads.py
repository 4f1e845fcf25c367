"""Reads that the data plane makes in the producer's pools by itself: no message, the same endings."""

from __future__ import annotations

from kvconnector.errors import LeaseExpiredError
from kvconnector.session import commands as cmd
from kvconnector.session import events as ev
from kvconnector.wire import messages as m
from tests.unit.session import harness as h


def _started(side, geometry=None):
    """A load at an engine whose workers export their pools: the commands that start its reads."""
    links = [command.link for command in h.resolve(side, geometry)]
    for link in links:
        reply = m.HelloReply(incarnation="one", export=h.EXPORT)
        side.tell(ev.HelloAnswered(link, reply), ev.WarmedUp(link))
    return links, h.of(side.tell(h.load_asked()), cmd.StartReceive)


def test_an_export_is_opened_with_what_its_worker_holds():
    side, theirs = h.consumer(), h.engine(tp_size=2)
    for index, link in enumerate(command.link for command in h.resolve(side, theirs)):
        reply = m.HelloReply(incarnation="one", export=h.EXPORT)
        (opened,) = h.of(side.tell(ev.HelloAnswered(link, reply)), cmd.OpenExport)
        assert (opened.link, opened.engine_id) == (link, "p")
        assert opened.export == h.EXPORT
        assert opened.theirs == theirs.ranks[index]


def test_a_lease_that_ended_meanwhile_fails_the_load():
    side = h.consumer()
    _, (started,) = _started(side)
    error = LeaseExpiredError("the lease ended during the read")
    failed = side.tell(ev.ReceiveFailed(started.read_id, error))
    assert h.of(failed, cmd.FinishLoad) == [cmd.FinishLoad("w", error)]
    assert h.messages(failed, m.Abort) == [m.Abort(transfer_id="t", secret=h.SECRET)]
    side.tell(ev.ReceiveDrained(started.read_id))
    assert side.num_reads == 0
