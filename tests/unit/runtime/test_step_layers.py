"""`StepLayers`: the pieces in which a step is reported, by the bytes that it writes."""

from types import SimpleNamespace

import pytest

from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.layout.watermark import MIN_PIECE_BYTES
from kvconnector.runtime.step_layers import StepLayers
from kvconnector.session.orders import GrowRequest
from tests.support.fakes import FakeEngine, FakeGroup, FakeModel, FakePart

LAYERS = 8
ROW_BYTES = 1024
STEP_ROWS = 2 * MIN_PIECE_BYTES // (LAYERS * ROW_BYTES)
"""Rows of a step that is just large enough for two pieces."""


def pieces(watermark, *, row_tokens=1, dcp_size=1, ids=(1,)):
    """Return the layers whose writing reports a piece, of a step of one request."""
    part = FakePart("latent", 1, ROW_BYTES, 1)
    model = FakeModel(LAYERS, (FakeGroup(tuple(range(LAYERS)), (part,), row_tokens),))
    engine = FakeEngine("e", model, tp_size=dcp_size, dcp_size=dcp_size).geometry()
    groups = [SimpleNamespace(geometry=each) for each in engine.ranks[0].groups]
    order = GrowRequest("r", "t", "5" * 32, (GroupBlocks.of(ids),), watermark)
    step = StepLayers([order], SimpleNamespace(groups=groups))
    return [layer for layer in range(LAYERS) if step.written(layer)]


@pytest.mark.parametrize("row_tokens", [1, 4, 128])
def test_rows_of_a_step_count_as_the_tokens_that_they_stand_for(row_tokens):
    """A row counts in the step that brings the last of its tokens."""
    for first, rest in ((0, 0), (1, row_tokens - 1), (3, 0)):
        start = first * row_tokens + rest
        stop = (first + STEP_ROWS) * row_tokens
        of_step = {"row_tokens": row_tokens}
        assert pieces(Watermark(start, stop), **of_step) == [3, 7]
        assert pieces(Watermark(start, stop - 1), **of_step) == []  # a row less


def test_a_rank_writes_its_share_of_the_tokens():
    half = Watermark(0, STEP_ROWS)
    whole = Watermark(0, 2 * STEP_ROWS)
    assert (pieces(half, dcp_size=2), pieces(whole, dcp_size=2)) == ([], [3, 7])


def test_groups_without_blocks_write_nothing():
    assert pieces(Watermark(0, 8 * STEP_ROWS), ids=()) == []


def test_a_large_step_is_reported_by_every_layer():
    assert pieces(Watermark(0, 100 * STEP_ROWS)) == [*range(LAYERS)]
