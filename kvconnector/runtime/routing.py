"""Which session event a wire message is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from kvconnector.errors import RemoteProtocolError
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.wire import error_of
from kvconnector.wire import messages as m


def event_of(link: LinkId, message: m.Message) -> object | None:
    """The event that a message on `link` is; None for a goodbye, which the driver sees to.

    Raises:
        RemoteProtocolError: a message that this side does not take on such a link.
    """
    if isinstance(message, m.Bye):
        return None
    make = (_FROM_CONSUMER if link < 0 else _FROM_PRODUCER).get(type(message))
    if make is None:
        raise RemoteProtocolError(
            f"a {type(message).__name__} is not expected on this connection", link=link
        )
    return make(link, message)


def _cut_short(link: LinkId, message: m.ReadRefused | m.ReadEnded) -> ev.ReadCutShort:
    sent_chunks = message.sent_chunks if isinstance(message, m.ReadEnded) else 0
    error = error_of(message.refusal, message.text)
    return ev.ReadCutShort(link, message.read_id, sent_chunks, error)


_Make: TypeAlias = Callable[[LinkId, Any], object]
_FROM_CONSUMER: dict[type, _Make] = {
    m.Hello: ev.Greeted,
    m.Follow: ev.Followed,
    m.Read: ev.ReadAsked,
    m.CancelRead: lambda link, message: ev.ReadCancelled(link, message.read_id),
    m.Done: ev.Confirmed,
    m.Abort: ev.GivenUp,
    m.Heartbeat: ev.HeartbeatArrived,
    m.Probe: ev.Probed,
}
_FROM_PRODUCER: dict[type, _Make] = {
    m.Directory: ev.DirectoryArrived,
    m.DirectoryRefused: ev.DirectoryDenied,
    m.HelloReply: ev.HelloAnswered,
    m.Progress: ev.Progressed,
    m.ReadRefused: _cut_short,
    m.ReadEnded: _cut_short,
    m.HeartbeatReply: lambda link, message: ev.HeartbeatAnswered(link, message.number),
}
