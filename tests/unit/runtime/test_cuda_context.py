"""Whoever drives transfers works on the cache's device, and leaves the engine on its own."""

import pytest

from kvconnector.runtime.cuda_context import CudaContext


@pytest.mark.multi_gpu
def test_a_thread_with_inline_progress_is_on_the_caches_device_and_then_on_its_own_again():
    import torch

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    context = CudaContext("cuda:1")
    assert not context.is_current
    previous = context.enter()
    assert context.is_current
    assert torch.cuda.current_device() == 1
    assert torch.zeros(1, device="cuda").device.index == 1
    context.leave(previous)
    assert not context.is_current
    assert torch.cuda.current_device() == 0
    assert torch.zeros(1, device="cuda").device.index == 0


@pytest.mark.gpu
def test_a_context_that_is_current_already_stays_so():
    import torch

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    context = CudaContext("cuda:0")
    previous = context.enter()
    assert context.is_current
    context.leave(previous)
    assert context.is_current
