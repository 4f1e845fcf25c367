"""The times of a transfer's parts, in seconds of its session's clock."""

from __future__ import annotations

import msgspec

from kvconnector.session.completion import Phase, RequestTrace


class LoadTrace(msgspec.Struct, eq=False, gc=False):
    """The times of a load, each None until it is reached. `paths` are those of its reads, `parts` the phases of its
    packed reads by name.
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
    paths: frozenset[str] = frozenset()
    parts: dict[str, Phase] = {}

    def finished(self, nbytes: int, seconds: float, path: str, phases: tuple[Phase, ...]) -> None:
        """Record that a read finished, as `ReceiveFinished` says. Phases of one name are merged over all reads."""
        self.nbytes += nbytes
        self.seconds = max(self.seconds, seconds)
        self.paths |= {path}
        _merge(self.parts, phases)

    def ended(self, request_id: str, outcome: str, now: float, ahead_s: float) -> RequestTrace:
        """Return the report on the load, which ends `now`. Its phases are in seconds of a clock that is `ahead_s` ahead
        of the session's. A followed prompt's blocks waited only for its last part.
        """
        times = (self.wanted_s, self.asked_s, self.first_read_s)
        reached = [at + ahead_s for at in times if at is not None]
        waits = map(Phase, ("want", "greeting", "read"), reached, [*reached[1:], now + ahead_s])
        parts = [Phase(p.name, p.start_s + ahead_s, p.end_s + ahead_s) for p in self.parts.values()]
        since_s = self.last_read_s if self.is_followed else self.asked_s
        return RequestTrace(
            request_id=request_id,
            kind="load",
            peer=self.peer,
            nbytes=self.nbytes,
            path="+".join(sorted(self.paths)),
            outcome=outcome,
            phases=(*waits, *parts),
            waited_s=0.0 if since_s is None else now - since_s,
            seconds=self.seconds,
        )


class LeaseTrace(msgspec.Struct, eq=False, gc=False):
    """The times of a lease, which fills while its prompt is computed and then waits for its consumers. `parts` are the
    phases of its packed reads by name: a prompt that is streamed has thousands of these.
    """

    granted_s: float
    complete_s: float
    parts: dict[str, Phase] = {}

    def sent(self, phases: tuple[Phase, ...]) -> None:
        """Record that a packed read is over. Phases of one name are merged over all reads."""
        _merge(self.parts, phases)

    def phases(self, now: float, ahead_s: float) -> tuple[Phase, ...]:
        """Return the phases up to `now`, in seconds of a clock that is `ahead_s` ahead of the session's."""
        parts = [
            ("hold", self.complete_s, now),
            *[(p.name, p.start_s, p.end_s) for p in self.parts.values()],
        ]
        if self.complete_s > self.granted_s:
            parts.insert(0, ("fill", self.granted_s, self.complete_s))
        return tuple([Phase(name, start + ahead_s, end + ahead_s) for name, start, end in parts])


def _merge(parts: dict[str, Phase], phases: tuple[Phase, ...]) -> None:
    """Extend each of the parts to the phase of its name."""
    for new in phases:
        old = parts.setdefault(new.name, new)
        if old is not new:
            times = min(old.start_s, new.start_s), max(old.end_s, new.end_s)
            parts[new.name] = Phase(new.name, *times)
