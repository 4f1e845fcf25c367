"""Which session event a wire message is."""

from __future__ import annotations

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
    event = _from_consumer(link, message) if link < 0 else _from_producer(link, message)
    if event is None and not isinstance(message, m.Bye):
        raise RemoteProtocolError(
            f"a {type(message).__name__} is not expected on this connection", link=link
        )
    return event


def _from_consumer(link: LinkId, message: m.Message) -> object | None:
    match message:
        case m.Hello():
            return ev.Greeted(link, message)
        case m.Read():
            return ev.ReadAsked(link, message)
        case m.CancelRead():
            return ev.ReadCancelled(link, message.read_id)
        case m.Done():
            return ev.Confirmed(link, message)
        case m.Abort():
            return ev.GivenUp(link, message)
        case m.Heartbeat():
            return ev.HeartbeatArrived(link, message)
    return None


def _from_producer(link: LinkId, message: m.Message) -> object | None:
    match message:
        case m.Directory():
            return ev.DirectoryArrived(link, message)
        case m.DirectoryRefused():
            return ev.DirectoryDenied(link, message)
        case m.HelloReply():
            return ev.HelloAnswered(link, message)
        case m.ReadRefused():
            return ev.ReadCutShort(
                link, message.read_id, 0, error_of(message.refusal, message.text)
            )
        case m.ReadEnded():
            error = error_of(message.refusal, message.text)
            return ev.ReadCutShort(link, message.read_id, message.sent_chunks, error)
        case m.HeartbeatReply():
            return ev.HeartbeatAnswered(link, message.number)
    return None
