"""What an unexpected exception in a session ends: one request or one link, and never the worker.

Theory ------ *What is contained.* Any exception that leaves a handler, whether it comes from a bug or from a port that
refuses, with two exceptions. A `WorkerFault` ends the worker: the data path's or the transport's own state is torn. A
refusal of an order or a message (`is_refusal`) is raised before the handler has changed anything, so the driver logs it
and nothing ends.

*What contains it.* The innermost loop or table that knows whose event it was: a session for its requests, `Peers` and
`RemoteEngines` for their links, and loops over many records for each of them. So the remaining records of the same loop
are still handled. The exception is noted once, where it is contained.

*What a half-applied transition may have done.* Anything between the handler's first and last line. So what contains
does not use the transition tables, and does not ask what has been done: each of its steps may be repeated, and a
record's end state is forced. Two facts must be right in every moment, and handlers keep them so: a read or a send is
listed in its records before it is handed to the data path, in the statement before, since only the data path's event
takes it out again; and a request is reported, in the next statement marked as reported, and only then forgotten.

*In which order.* First the event itself counts, if it says that the data path has let go of blocks or slots: nothing
will say so again. Then nothing new may begin: a lease is retracted from the board, a record leaves the agenda and the
heartbeats. Then the peer is told what it waits for (a read's end, a refusal, a prompt's end), or it would give up the
whole link after its own timeout. Then reads and sends are stopped, and stay until the data path reports their ends: so
slots are freed and blocks are given back only once nothing touches them, as in any other failure. The request's end is
reported to the engine last, once, with the reason.

*What stays behind.* Nothing at this side. A peer that was not told, because even that failed, loses its link.
A producer's lease that no heartbeat names any more expires.

*If that fails, too*, the worker ends as it does with a `WorkerFault`: its engine lives, and every request ends.
"""

from __future__ import annotations

from collections.abc import Callable

from kvconnector.errors import (
    InternalError,
    KVConnectorError,
    LocalError,
    LocalProtocolError,
    UnknownRequestError,
)
from kvconnector.session.link import FromPeer
from kvconnector.session.orders import Order

_REFUSALS = frozenset({LocalError, UnknownRequestError, LocalProtocolError})


class WorkerFault(Exception):
    """The data path or the transport failed in a call of a session, or a failure could not be contained: nothing of
    this worker can go on. Raised from the original. No session catches it.
    """


def is_refusal(event: object, error: Exception) -> bool:
    """Returns True if an order of the engine or a message of a peer was refused, and nothing has changed."""
    return type(error) in _REFUSALS and isinstance(event, Order | FromPeer)


def failure_of(error: Exception) -> KVConnectorError:
    """Return the reason for which a request or a link ends: the exception itself, if it is one of ours."""
    if isinstance(error, KVConnectorError) and not isinstance(error, LocalProtocolError):
        return error
    failure = InternalError(f"an unexpected {type(error).__name__} ended this here: {error}")
    failure.__cause__ = error
    return failure


def guarded(
    contain: Callable[[Exception], None], handler: Callable[..., None], *arguments: object
) -> None:
    """Call a handler. `contain` takes what it raises unexpectedly.

    Raises:
        WorkerFault: see `settle`.
    """
    try:
        handler(*arguments)
    except WorkerFault:
        raise
    except Exception as error:
        settle(contain, error)


def handled(
    contain: Callable[[object, float, Exception], None],
    handler: Callable[[object, float], None],
    event: object,
    now: float,
) -> None:
    """Let a session handle an event. `contain` takes the event, and what the handler raises unexpectedly.

    Raises:
        KVConnectorError: the event was refused; nothing has changed.
        WorkerFault: see `settle`.
    """
    try:
        handler(event, now)
    except WorkerFault:
        raise
    except Exception as error:
        if is_refusal(event, error):
            raise
        settle(contain, event, now, error)


def settle(contain: Callable[..., None], *arguments: object) -> None:
    """Call what contains an exception.

    Raises: WorkerFault: containing it failed too.
    """
    try:
        contain(*arguments)
    except WorkerFault:
        raise
    except Exception as error:
        raise WorkerFault(f"an exception could not be contained: {error!r}") from error
