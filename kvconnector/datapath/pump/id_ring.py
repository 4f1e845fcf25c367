"""Block ids on their way to a GPU: one piece of memory, lent and taken back about in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Loan:
    start: int
    stop: int
    is_over: bool = False


class Ring:
    """Which of `capacity` places are lent. Pure: the memory is the caller's."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._loans: deque[_Loan] = deque()

    def take(self, count: int) -> int | None:
        """The first of `count` places in a row, at least one, or None while too many are lent."""
        start, limit = 0, self._capacity
        if self._loans:
            oldest, latest = self._loans[0], self._loans[-1]
            start = latest.stop
            if latest.start < oldest.start:
                limit = oldest.start
            elif start + count > limit:
                start, limit = 0, oldest.start
        if start + count > limit:
            return None
        self._loans.append(_Loan(start, start + count))
        return start

    def give_back(self, start: int) -> None:
        """Take back what `take` lent; it is free once all that was lent before it is."""
        for loan in self._loans:
            if loan.start == start and not loan.is_over:
                loan.is_over = True
                break
        while self._loans and self._loans[0].is_over:
            self._loans.popleft()
