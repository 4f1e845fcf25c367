"""What a `LoopbackNetwork` does to messages."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnector.errors import LocalError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackFaults:
    """What goes wrong with messages posted from now on. Draws come from the network's seed.

    `max_delay_calls`: a message arrives after a random number, at most this, of the receiver's `progress()` calls.
    `delay_s`: and not before this much of the network's clock has passed.
    `drop_probability`: chance that a message never arrives. An eager send still completes; a larger one does not.
    `corrupt_probability`: chance that a message arrives with its first byte changed; control messages never do.
    `reorder`: messages of different tags may overtake one another; those of one tag and endpoint never do.
    """

    max_delay_calls: int = 0
    delay_s: float = 0.0
    drop_probability: float = 0.0
    corrupt_probability: float = 0.0
    reorder: bool = False

    def __post_init__(self) -> None:
        if (
            self.max_delay_calls < 0
            or self.delay_s < 0
            or not (0 <= self.drop_probability <= 1 and 0 <= self.corrupt_probability <= 1)
        ):
            raise LocalError("faults are out of range", faults=self)
