"""Moving bytes between workers: one contract (`base`), and UCX, which fulfils it."""

from __future__ import annotations

from kvconnector.transport.base import Buffer, Completion, MessageSizeError, Transport

__all__ = ["Buffer", "Completion", "MessageSizeError", "Transport"]
