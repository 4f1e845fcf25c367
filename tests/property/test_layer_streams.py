"""The reads of a prompt that is computed layer by layer, compared with the tokens that its producer has written."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.ids import EngineAddress
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.planning import plan_routes
from kvconnector.planning.naive import naive_plan, plan_items
from kvconnector.session import load as load_module
from kvconnector.session.consumer import LOAD_TABLE
from kvconnector.session.engines import ENGINE_TABLE
from kvconnector.session.load import Load, RemoteEngine
from kvconnector.session.orders import WantRequest
from kvconnector.wire import messages as m
from tests.support.strategies import transfers


class Rank:
    """A producer rank that computes a prompt step by step, layer after layer. Layer n has `written[n]` tokens. A
    consumer gets some of its `reports`, late and more than once.
    """

    def __init__(self, rank, steps, groups_stay):
        self.layers = sorted({layer for group in rank.groups for layer in group.layers})
        self.written = dict.fromkeys(self.layers, 0)
        self._steps, self._groups_stay = [0, *steps], groups_stay
        self._step, self._num_done = 1, 0
        self.reports = []
        self.report()

    @property
    def is_over(self):
        return self._step == len(self._steps)

    def compute(self):
        """Compute the next layer, or end the step."""
        if self._num_done == len(self.layers):
            self._step, self._num_done = self._step + 1, 0
        else:
            self.written[self.layers[self._num_done]] = self._steps[self._step]
            self._num_done += 1
        self.report()

    def report(self):
        ahead_layers = self.layers[self._num_done - 1] + 1 if self._num_done else 0
        ahead = 0 if self.is_over else self._steps[self._step]
        stays = [stay and self._steps[-1] > 0 for stay in self._groups_stay]
        self.reports.append(
            m.Progress(
                transfer_id="t",
                blocks=tuple(GroupBlocks(first_block=0, wire_ids=bytes(4 * s)) for s in stays),
                is_complete=self.is_over,
                watermark=Watermark(self._steps[self._step - 1], ahead, ahead_layers),
            )
        )


@given(transfers(), st.data(), st.randoms(use_true_random=False))
def test_streamed_items_are_read_once_after_they_are_written(transfer, data, rng):
    routes = plan_routes(transfer.topology, transfer.producer)
    if not routes:
        return  # the rank has no layer of a group that both engines have, so it reads nothing
    row_tokens = [group.row_tokens for group in transfer.consumer.groups]
    # not all tokens need be in whole rows
    stop = data.draw(st.integers(0, 130)) + max(
        tokens.stop * m for tokens, m in zip(transfer.token_ranges, row_tokens, strict=True)
    )
    cuts = data.draw(st.sets(st.integers(1, max(1, stop - 1)), max_size=3))
    steps = sorted({*cuts, max(1, stop)})
    num_groups = transfer.producer.num_groups
    groups_stay = data.draw(st.tuples(*[st.booleans() for _ in range(num_groups)]))
    ranks = {
        route.peer: Rank(transfer.producer.rank_geometry(route.peer), steps, groups_stay)
        for route in routes
    }
    wanted = WantRequest("w", "t", "5" * 32, EngineAddress("p", ""), is_followed=True)
    load = Load(LOAD_TABLE, wanted, RemoteEngine(ENGINE_TABLE, wanted.engine), 0.0)
    load.engine.row_tokens = tuple(each.row_tokens for each in transfer.producer.ranks[0].groups)
    load.unread_tokens = transfer.token_ranges
    links = {source: number for number, source in enumerate(ranks, 1)}
    read = Counter()

    def deliver(source, report):
        load.record_progress(links[source], report)
        for one in load.take_ready(routes, list(links.values()), chunk_bytes=transfer.chunk_bytes):
            for item in plan_items([one], transfer.consumer):
                num_rows = ranks[one.source].written[item.layer] // row_tokens[item.group]
                assert item.token < num_rows
                assert groups_stay[item.group] or ranks[one.source].is_over
                read[item] += 1
        if len(load.progress) == len(links):  # steps that all ranks have finished are read at once
            stop = min(report.watermark.num_tokens for report in load.progress.values())
            for left, tokens, stays, m in zip(
                load.unread_tokens, transfer.token_ranges, groups_stay, row_tokens, strict=False
            ):
                assert not stays or left.start >= min(stop // m, tokens.stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "MIN_PIECE_BYTES", rng.choice([1, 1, 64, 1 << 20]))
        while unfinished := [source for source, rank in ranks.items() if not rank.is_over]:
            ranks[rng.choice(unfinished)].compute()
            source = rng.choice(list(ranks))
            if rng.random() < 0.6:
                deliver(source, rng.choice(ranks[source].reports[-3:]))
        for source, rank in ranks.items():
            deliver(source, rank.reports[-1])
    assert load.is_read
    wanted = naive_plan(transfer.topology, transfer.producer, transfer.token_ranges)
    assert read == Counter(wanted)


MARKS = st.builds(Watermark, st.integers(0, 9), st.integers(0, 9), st.integers(0, 3))


@given(MARKS, MARKS)
def test_watermarks_continue_only_over_reported_layers(before, after):
    """Checked cell by cell: reported layers must stay, and no reported layer is computed again."""

    def cells(mark):
        whole = {(t, layer) for t in range(mark.num_tokens) for layer in range(4)}
        return whole | {(t, n) for t in range(mark.ahead_tokens) for n in range(mark.ahead_layers)}

    step = range(before.num_tokens, before.ahead_tokens) if before.ahead_layers else ()
    is_again = any(token >= after.num_tokens for token in step) and (
        (after.num_tokens, after.ahead_tokens) != (before.num_tokens, before.ahead_tokens)
    )
    assert after.continues(before) == (cells(after) >= cells(before) and not is_again)


@given(MARKS, st.integers(0, 10))
def test_layer_stop_counts_the_layers_with_the_tokens(mark, stop):
    def has(layer):
        return stop <= mark.num_tokens or (layer < mark.ahead_layers and stop <= mark.ahead_tokens)

    there = next((n for n in range(4) if not has(n)), 99)
    assert min(mark.layer_stop(stop), 99) == there
