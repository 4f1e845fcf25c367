"""Block allocation: no block has two owners, none is lost."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnector.errors import LocalError, UnknownRequestError
from minillm.blocks import AllocStatus, BlockManager

NUM_BLOCKS = 12
BLOCK_SIZE = 4


class BlockManagerMachine(RuleBasedStateMachine):
    """Against a dict of how many tokens each request has."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(
            block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, watermark=0.1, scatter_seed=3
        )
        self.tokens: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}

    def used(self) -> int:
        return sum(-(-tokens // BLOCK_SIZE) for tokens in self.tokens.values())

    @rule(tokens=st.integers(1, 60))
    def admit(self, tokens: int) -> None:
        needed = -(-tokens // BLOCK_SIZE)
        status = self.manager.can_allocate(tokens)
        reserve = 1 if self.tokens else 0
        if needed > NUM_BLOCKS:
            assert status is AllocStatus.NEVER
        elif needed + reserve > NUM_BLOCKS - self.used():
            assert status is AllocStatus.LATER
        else:
            assert status is AllocStatus.OK
            name = f"r{len(self.tables)}"
            self.manager.allocate(name, tokens)
            self.tokens[name] = tokens
            self.tables[name] = self.manager.get_block_table(name)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.integers(0, 9))
    def grow(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        total = self.tokens[name] + more
        needed = -(-total // BLOCK_SIZE) - len(self.tables[name])
        fits = needed <= NUM_BLOCKS - self.used()
        assert self.manager.append_slots(name, total) is fits
        table = self.manager.get_block_table(name)
        assert table[: len(self.tables[name])] == self.tables[name]
        if fits:
            self.tokens[name] = total
        else:
            assert table == self.tables[name]
        self.tables[name] = table

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self.manager.free(name)
        self.manager.free(name)
        del self.tokens[name]
        with pytest.raises(UnknownRequestError):
            self.manager.get_block_table(name)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        held = [block for name in self.tokens for block in self.manager.get_block_table(name)]
        assert len(held) == len(set(held)) == self.used()
        assert all(0 <= block < NUM_BLOCKS for block in held)
        assert self.manager.get_num_free_gpu_blocks() == NUM_BLOCKS - len(held)


TestBlockManager = BlockManagerMachine.TestCase


def test_misuse_is_refused_without_a_change() -> None:
    manager = BlockManager(block_size=4, num_blocks=3, watermark=0.0, scatter_seed=None)
    manager.allocate("a", 5)
    with pytest.raises(LocalError, match="already has blocks"):
        manager.allocate("a", 1)
    with pytest.raises(LocalError, match="too few"):
        manager.allocate("b", 8)
    assert manager.get_num_free_gpu_blocks() == 1


def test_a_scattered_pool_hands_out_scattered_blocks() -> None:
    manager = BlockManager(block_size=1, num_blocks=64, watermark=0.0, scatter_seed=0)
    manager.allocate("a", 16)
    table = manager.get_block_table("a")
    assert table != sorted(table)
