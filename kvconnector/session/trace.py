"""When the parts of a transfer happened, as its session saw them, in seconds of the session's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvconnector.session.completion import LoadInFlight, Phase

if TYPE_CHECKING:
    from kvconnector.session import events as ev


class LoadTrace(msgspec.Struct, eq=False, gc=False):
    """A load. A time is None until it is reached. `arriving` are the bytes of each read, and which share of them is
    here; `paths` how bytes came, and over which links; `parts` the phases that its packed reads had.
    """

    peer: str
    is_followed: bool
    wanted_s: float
    asked_s: float | None = None
    first_read_s: float | None = None
    last_read_s: float | None = None
    nbytes: int = 0
    total_bytes: int = 0
    is_packed: bool = False
    seconds: float = 0.0
    arriving: dict[int, tuple[int, float]] = {}
    paths: frozenset[tuple[str, int]] = frozenset()
    parts: dict[str, Phase] = {}

    def began(self, read_id: int, nbytes: int, now: float) -> None:
        """A read of `nbytes` begins."""
        self.first_read_s = self.first_read_s or now
        self.last_read_s = now
        self.total_bytes += nbytes
        self.arriving[read_id] = nbytes, 0.0

    def advanced(self, event: ev.ReceiveAdvanced) -> None:
        """A share of a read is here."""
        self.arriving[event.read_id] = self.arriving[event.read_id][0], event.share

    def finished(self, event: ev.ReceiveFinished, link: int) -> None:
        """A read brought its bytes. The same phase of all reads is one."""
        self.nbytes += self.arriving.pop(event.read_id)[0]
        self.seconds = max(self.seconds, event.seconds)
        self.paths |= {(event.path, link)}
        for new in event.phases:
            old = self.parts.setdefault(new.name, new)
            if old is not new:
                times = min(old.start_s, new.start_s), max(old.end_s, new.end_s)
                self.parts[new.name] = Phase(new.name, *times)

    def phases(self, now: float) -> tuple[Phase, ...]:
        """All that it went through by now."""
        times = [self.wanted_s, self.asked_s, self.first_read_s]
        reached = [at for at in times if at is not None]
        waits = map(Phase, ("want", "greeting", "read"), reached, [*reached[1:], now])
        return (*waits, *self.parts.values())

    def waited_s(self, now: float) -> float:
        """Seconds that blocks waited for it. Those of a prompt that is followed wait for its last part."""
        since = self.last_read_s if self.is_followed else self.asked_s
        return 0.0 if since is None else now - since

    def in_flight(self, request_id: str, rank: str, now: float) -> tuple[LoadInFlight, ...]:
        """Its bytes so far, if it is read. Any thread may ask."""
        if self.first_read_s is None:
            return ()
        load = LoadInFlight(
            request_id=request_id,
            rank=rank,
            peer=self.peer,
            path="packed" if self.is_packed else "direct",
            nbytes=self.nbytes + int(sum(n * share for n, share in [*self.arriving.values()])),
            total_bytes=self.total_bytes,
            seconds=now - self.first_read_s,
        )
        return (load,)


class HoldTrace(msgspec.Struct, eq=False, gc=False):
    """A lease: it fills while its prompt is computed, and then waits for its consumers."""

    granted_s: float
    complete_s: float
    sends: tuple[Phase, ...] = ()

    def phases(self, now: float) -> tuple[Phase, ...]:
        """All that it went through by now."""
        is_filled = self.complete_s > self.granted_s
        fill = [Phase("fill", self.granted_s, self.complete_s)] if is_filled else []
        return (*fill, Phase("hold", self.complete_s, now), *self.sends)
