"""A thread that drives transfers works on the cache's device, and restores the engine's; marks in its streams."""

import pytest

from kvconnector.runtime.cuda_context import CudaContext


@pytest.mark.multi_gpu
def test_a_thread_with_inline_progress_is_on_the_caches_device_and_then_on_its_own_again():
    import torch

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    context = CudaContext("cuda:1")
    assert not context.is_current

    def drive():
        assert (context.is_current, torch.cuda.current_device()) == (True, 1)
        assert torch.zeros(1, device="cuda").device.index == 1

    context.run(drive)
    assert not context.is_current
    assert torch.cuda.current_device() == 0
    assert torch.zeros(1, device="cuda").device.index == 0


@pytest.mark.gpu
def test_a_context_that_is_already_current_stays_current():
    import torch

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    context, found = CudaContext("cuda:0"), []
    context.run(lambda: found.append(context.is_current))
    assert found == [True]
    assert context.is_current


@pytest.mark.gpu
@pytest.mark.parametrize("is_used_again", [False, True])
def test_a_mark_comes_after_the_streams_queued_work(is_used_again):
    import torch

    from tests.support.gpu_flags import ends, held_back

    marks = CudaContext("cuda:0")
    stream = torch.cuda.Stream()
    with held_back(stream) as release, torch.cuda.stream(stream):
        if is_used_again:
            marks.give_back(marks.make_mark())
        mark = marks.make_mark()
        assert not mark.query()
        release()
        assert ends(stream)
        assert mark.query()
        assert marks.make_mark() is None


@pytest.mark.multi_gpu
@pytest.mark.parametrize("is_used_again", [False, True])
def test_a_mark_is_on_its_own_device_even_if_another_is_current(is_used_again):
    import torch

    from tests.support.gpu_flags import ends, held_back

    marks = CudaContext("cuda:1")
    stream = torch.cuda.current_stream(1)
    with held_back(stream) as release:
        if is_used_again:
            with torch.cuda.device(1):
                marks.give_back(marks.make_mark())
        with torch.cuda.device(0):
            mark = marks.make_mark()
            assert torch.cuda.current_device() == 0
        assert not mark.query()
        release()
        assert ends(stream)
        assert mark.query()
