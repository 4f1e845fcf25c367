"""What `kvconnector doctor` reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from kvconnector.errors import KVConnectorError

Verdict = Literal["ok", "note", "warn", "FAIL"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the report. `figures` are its numbers, for programs."""

    subject: str
    verdict: Verdict
    text: str
    figures: dict[str, float] = {}


def attempt(subject: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """A check whose failure is a finding."""
    try:
        yield from check()
    except KVConnectorError as error:
        yield Finding(subject, "FAIL", f"{type(error).__name__}: {error}")
    except ImportError as error:
        yield Finding(subject, "FAIL", f"a module is missing: {error}")
