"""Marks in an engine's streams."""

import pytest

from kvconnector.runtime.cuda_context import CudaContext
from kvconnector.runtime.marks import StreamMarks


def marks_on(device):
    return StreamMarks(device, CudaContext(device))


@pytest.mark.gpu
@pytest.mark.parametrize("is_used_again", [False, True])
def test_a_mark_is_behind_what_the_stream_holds(is_used_again):
    import torch

    marks = marks_on("cuda:0")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 28)
        if is_used_again:
            marks.give_back(marks.make())
        mark = marks.make()
        assert not mark.query()
        stream.synchronize()
        assert mark.query()
        assert marks.make() is None


@pytest.mark.multi_gpu
@pytest.mark.parametrize("is_used_again", [False, True])
def test_a_mark_is_on_its_device_whatever_is_current(is_used_again):
    import torch

    marks = marks_on("cuda:1")
    with torch.cuda.device(1):
        if is_used_again:
            marks.give_back(marks.make())
        torch.cuda._sleep(1 << 28)
    with torch.cuda.device(0):
        mark = marks.make()
        assert torch.cuda.current_device() == 0
    assert not mark.query()
    torch.cuda.synchronize(1)
    assert mark.query()
