"""Moving bytes between workers: one contract (`base`), and UCX, which fulfils it."""

from __future__ import annotations

from kvconnector.transport.base import NO_FILENO, Buffer, Completion, MessageSizeError, Transport

__all__ = ["NO_FILENO", "Buffer", "Completion", "MessageSizeError", "Transport"]
