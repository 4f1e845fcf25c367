import numpy as np
import pytest

from kvconnector.bench.pools import RankPools, choose_blocks, sequence_values
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


@pytest.mark.parametrize("item_dtype", ["uint8", "bfloat16", "float32", "float64"])
def test_a_sequence_depends_on_layer_part_and_seed_but_not_on_its_length(item_dtype):
    model = ModelShape(name="x", num_layers=2, num_kv_heads=1, head_dim=9, dtype=item_dtype)
    long = sequence_values(model, SEED, 0, 0, 20)
    assert long.itemsize == model.item_size_bytes
    np.testing.assert_array_equal(sequence_values(model, SEED, 0, 0, 5), long[:5])
    for other in ((SEED, 1, 0), (SEED, 0, 1), (SEED + 1, 0, 0)):
        assert not np.array_equal(sequence_values(model, *other, 20), long)


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


def test_the_views_show_the_storage_as_block_head_token_dim():
    for layout in ("HND", "NHD"):
        pools = _pools(EngineShape(tp=2, block=4, layout=layout), Rank(0, 1))
        view = pools.cache_group().views[1][0]
        assert view.shape == (8, 2, 4, 6)
        storage = pools.storage[1, 0]
        storage[...] = 0
        at = (3, 1, 2) if layout == "HND" else (3, 2, 1)
        storage[at][5] = 1
        offset = np.dot((3, 1, 2, 5), view.strides_bytes)
        assert np.flatnonzero(storage.reshape(-1))[0] * 2 == offset
        assert view.address == storage.ctypes.data


def test_blocks_are_a_run_or_a_scattered_choice():
    rng = np.random.default_rng(0)
    run = choose_blocks(5, 9, scattered=False, rng=rng)
    assert run == list(range(run[0], run[0] + 5))
    assert 0 <= run[0] <= 4
    scattered = choose_blocks(50, 90, scattered=True, rng=rng)
    assert len(set(scattered)) == 50
    assert set(scattered) <= set(range(90))
    assert scattered != sorted(scattered)
