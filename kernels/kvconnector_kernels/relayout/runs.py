"""The positions of a block list that a copy covers: all in a row, or evenly spaced runs of them."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnector_kernels.relayout.checks import RelayoutError

MAX_RUN_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TokenRuns:
    """Tokens in evenly spaced runs: of every `step_tokens` positions the first `run_tokens`. A copy begins
    `skip_tokens` into the first run, less than a run.

    Raises:
        RelayoutError: Not `0 <= skip_tokens < run_tokens <= step_tokens`.
    """

    run_tokens: int
    step_tokens: int
    skip_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.skip_tokens < self.run_tokens <= self.step_tokens:
            raise RelayoutError(f"runs need 0 <= skip < run <= step: {self}")

    def offset(self, token: int) -> int:
        """Return the position of a token of the copy, counted from the first run's start."""
        turn, place = divmod(self.skip_tokens + token, self.run_tokens)
        return turn * self.step_tokens + place


ADJACENT = TokenRuns(MAX_RUN_TOKENS, MAX_RUN_TOKENS)
"""One run that never ends."""
