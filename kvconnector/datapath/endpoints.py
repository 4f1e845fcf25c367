"""The consumers that a worker sends to: an endpoint to each, opened with a warm-up message."""

from __future__ import annotations

from kvconnector.datapath.base import DataEvent, Untold
from kvconnector.errors import KVConnectorError
from kvconnector.session import events as ev
from kvconnector.session.commands import LinkId
from kvconnector.transport import Buffer, Completion, Transport


class Endpoints:
    """The endpoints of one worker by link. What becomes of them goes to `events`."""

    def __init__(self, transport: Transport, events: Untold[DataEvent]) -> None:
        self._transport = transport
        self._events = events
        self._by_link: dict[LinkId, int] = {}
        self._warm_ups: dict[int, LinkId] = {}

    def __contains__(self, link: LinkId) -> bool:
        return link in self._by_link

    def get(self, link: LinkId) -> int | None:
        """The transport's endpoint, while it is open."""
        return self._by_link.get(link)

    def links(self) -> list[LinkId]:
        """Whom there is an endpoint to."""
        return list(self._by_link)

    def open(self, link: LinkId, address: bytes, warm_up_tag: int, warm_up: Buffer) -> None:
        """See `DataPath.open_endpoint`. The bytes of `warm_up` mean nothing."""
        try:
            endpoint = self._transport.connect(address)
            self._by_link[link] = endpoint
            self._warm_ups[self._transport.send(endpoint, warm_up_tag, warm_up)] = link
        except KVConnectorError as error:
            self._events.append(ev.EndpointFailed(link, error))
            return
        self._events.append(ev.EndpointOpened(link))

    def close(self, link: LinkId) -> None:
        """Forget a consumer. No effect if there is no endpoint to it."""
        endpoint = self._by_link.pop(link, None)
        if endpoint is not None:
            self._transport.disconnect(endpoint)

    def fail(self, link: LinkId, error: KVConnectorError) -> None:
        """The consumer cannot be reached, unless we closed the endpoint ourselves."""
        if link in self._by_link:
            self._events.append(ev.EndpointFailed(link, error))

    def complete(self, completion: Completion) -> bool:
        """Take a completion of the transport; False if it is no warm-up's."""
        link = self._warm_ups.pop(completion.ticket, None)
        if link is None:
            return False
        if completion.error is not None:
            self.fail(link, completion.error)
        return True

    @property
    def is_warming_up(self) -> bool:
        """Whether a warm-up message is on its way."""
        return bool(self._warm_ups)
