"""Without a GPU the Triton kernel runs in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def two_copy_threads(monkeypatch):
    """Let even tiny copies be shared with a helper thread."""
    from kvconnector_kernels.relayout import cpu

    monkeypatch.setattr(cpu, "_MIN_SHARE_BYTES", 1)
    monkeypatch.setattr(cpu, "_default_num_threads", 2)
