"""SGLang's transfer backend for `--disaggregation-transfer-backend kvconnector`, found by its entry point."""

from __future__ import annotations

from kvconnector.integrations.sglang.plugin import register

__all__ = ["register"]
