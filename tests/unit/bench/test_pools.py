import numpy as np
import pytest

from kvconnector.bench.pools import RankPools, sequence_values
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.ids import Rank

MODEL = ModelShape(name="x", num_layers=3, num_kv_heads=4, head_dim=6)
SEED = 7


def _pools(shape, rank=None, model=MODEL, num_blocks=8):
    return RankPools(model, shape, rank or Rank(0, 0), num_blocks=num_blocks, device="cpu")


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 11])
def test_a_written_sequence_is_found_again_up_to_the_zeros_behind_it(layout, num_tokens):
    pools = _pools(EngineShape(block=4, layout=layout))
    block_ids = [5, 0, 3][: -(-num_tokens // 4)]
    pools.write(SEED, block_ids, num_tokens)
    # the room behind the last token is zero, not poison, where it was written as whole blocks
    expected = "" if num_tokens % 4 == 0 else "behind the last token"
    assert expected in pools.mismatch(SEED, block_ids, num_tokens)
    assert bool(pools.mismatch(SEED, block_ids, num_tokens)) == bool(expected)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_ranks_that_share_a_sequence_hold_it_in_turns(layout, interleave):
    shape = EngineShape(tp=4, dcp=2, interleave=interleave, block=4, layout=layout)
    num_tokens, block_ids = 16, [5, 0]
    whole = sequence_values(MODEL, SEED, layer=1, part=0, num_tokens=num_tokens)
    found = np.zeros_like(whole)
    for tp_rank in range(4):
        pools = _pools(shape, Rank(0, tp_rank))
        pools.write(SEED, block_ids, num_tokens)
        assert pools.mismatch(SEED, block_ids, num_tokens) == ""
        blocks = pools.storage[1, 0][block_ids]
        held = (blocks.swapaxes(1, 2) if layout == "HND" else blocks).reshape(8, 2, 6)
        tokens = [t for t in range(num_tokens) if t // interleave % 2 == tp_rank % 2]
        heads = slice(0, 2) if tp_rank < 2 else slice(2, 4)
        found[tokens, heads] = held
    np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_one_wrong_byte_anywhere_is_a_mismatch(layout):
    pools = _pools(EngineShape(block=4, layout=layout))
    pools.write(SEED, [5, 0], 8)
    assert pools.mismatch(SEED, [5, 0], 8) == ""
    for layer, part, block, what in ((0, 0, 5, "tokens differ"), (2, 1, 4, "another request")):
        pools.storage[layer, part][block].reshape(-1)[13] ^= 1
        assert what in pools.mismatch(SEED, [5, 0], 8)
        assert f"layer {layer}" in pools.mismatch(SEED, [5, 0], 8)
        pools.storage[layer, part][block].reshape(-1)[13] ^= 1
    assert pools.mismatch(SEED, [5, 0], 8) == ""
    assert pools.mismatch(SEED, [0, 5], 8)
    pools.poison()
    assert pools.mismatch(SEED, [5, 0], 8)
