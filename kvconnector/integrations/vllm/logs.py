"""kvconnector's log lines in vLLM's log."""

from __future__ import annotations

import logging


def share_vllm_handlers() -> None:
    """Write what kvconnector logs where vLLM writes, at its level, unless the operator has configured it already."""
    ours, theirs = logging.getLogger("kvconnector"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
