"""A context manager of parts that end with it."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

OwnerType = TypeVar("OwnerType", bound="Owner")


class Owner:
    """Owns what its subclass entered into an `ExitStack`: `with ExitStack() as exits: ...; super().__init__(exits)`.

    What was entered before a part failed to start ends by the stack; `close`, or leaving the owner's own `with`, ends
    all of it.
    """

    def __init__(self, exits: ExitStack) -> None:
        self._exits = exits.pop_all()

    def close(self) -> None:
        """End every part, the last started first. Idempotent."""
        self._exits.close()

    def __enter__(self: OwnerType) -> OwnerType:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
