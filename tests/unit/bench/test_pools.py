import pytest

from kvconnector.bench.pools import RankPools
from kvconnector.bench.shapes import EngineShape, ModelShape, rank_geometry
from kvconnector.errors import ConfigError
from kvconnector.ids import Rank

MODEL = ModelShape(name="x", num_layers=3, num_kv_heads=4, head_dim=6)
SEED = 7


def _pools(shape, rank=None, model=MODEL, num_blocks=8):
    geometry = rank_geometry(model, shape, rank or Rank(0, 0)).groups[0]
    return RankPools(geometry, shape.layout, num_blocks=num_blocks, device="cpu")


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_one_wrong_byte_anywhere_is_a_mismatch(layout):
    pools = _pools(EngineShape(block=4, layout=layout))
    pools.write(SEED, [5, 0], 8)
    assert pools.mismatch(SEED, [5, 0], 8) == ""
    for layer, part, block, what in ((0, 0, 5, "tokens differ"), (2, 1, 4, "another request")):
        pools.storage[layer, part].reshape(8, -1)[block, 13] ^= 1
        assert what in pools.mismatch(SEED, [5, 0], 8)
        assert f"layer {layer}" in pools.mismatch(SEED, [5, 0], 8)
        pools.storage[layer, part].reshape(8, -1)[block, 13] ^= 1
    assert pools.mismatch(SEED, [5, 0], 8) == ""
    assert pools.mismatch(SEED, [0, 5], 8)
    pools.write(SEED, [5, 0], 7)  # as whole blocks: zeros after the last token
    assert "after the last token" in pools.mismatch(SEED, [5, 0], 7)
    pools.poison()
    assert pools.mismatch(SEED, [5, 0], 8)


def test_a_cache_that_no_memory_holds_is_refused():
    with pytest.raises(ConfigError, match="no memory"):
        _pools(EngineShape(block=4), num_blocks=1 << 60)
