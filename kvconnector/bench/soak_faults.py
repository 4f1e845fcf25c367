"""The faults that a `soak` causes, in turn, and the timeouts by which engines notice them."""

from __future__ import annotations

from typing import NamedTuple

PEER_TIMEOUT_S = 5.0
SETTINGS = {
    "lease": {"duration_s": 5.0},
    "peer": {"timeout_s": PEER_TIMEOUT_S, "heartbeat_interval_s": 1.0, "transfer_timeout_s": 10.0},
}


class Fault(NamedTuple):
    """One fault of an engine. It stops for `pause_s`; a silent one stops for so long that its peer gives it up."""

    kind: str
    engine: str
    is_restart: bool = False
    pause_s: float = 0.0

    @property
    def loses_peer(self) -> bool:
        """Returns True if requests that are loaded meanwhile may fail."""
        return self.is_restart or self.pause_s > PEER_TIMEOUT_S

    def __str__(self) -> str:
        return f"{self.engine}_{self.kind}"


FAULTS = (
    Fault("killed", "decode", is_restart=True),
    Fault("paused", "prefill", pause_s=1.0),
    Fault("restarted", "prefill", is_restart=True),
    Fault("silent", "decode", pause_s=1.6 * PEER_TIMEOUT_S),
    Fault("killed", "prefill", is_restart=True),
    Fault("paused", "decode", pause_s=1.0),
    Fault("restarted", "decode", is_restart=True),
    Fault("silent", "prefill", pause_s=1.6 * PEER_TIMEOUT_S),
)
