"""`EncoderConnector`: an encoder's outputs, moved from engines that encode to engines that prefill.

    {"ec_connector": "EncoderConnector", "ec_connector_module_path": "kvconnector.integrations.vllm.encoder",
     "ec_role": "ec_producer", "ec_connector_extra_config": {"ec_cpu_bytes": 1073741824}}

vLLM's scheduler asks for everything, in its own thread: `ensure_cache_available` begins to fetch an output and has the
request wait until it is there, `request_finished` offers outputs to others. Its process also runs the worker that moves
them, whose thread runs even while the engine is idle. vLLM's workers only copy between the shared pool and their own
encoder caches, within a step. Nothing here blocks except these copies.

Moving an output is the worker's part. The rest is what vLLM leaves to a connector: memory that its processes share,
with reports through it (`pool.py`); which outputs are kept, and until when; requests that wait for an output or
for room; the encoder here, where an output cannot be had; offers in answers, and declined ones.

A router passes `ec_transfer_params` on as it does for vLLM's own connectors. Each entry has the address of an offer,
which one engine may read once, within its lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvconnector.integrations.vllm.encoder.connector import EncoderConnector

__all__ = ["EncoderConnector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvconnector.integrations.vllm.encoder.connector import EncoderConnector

    return EncoderConnector
