import numpy as np
import pytest

from kvconnector.bench.pools import RankPools
from kvconnector.bench.shapes import EngineShape, ModelShape, rank_geometry
from kvconnector.errors import ConfigError
from kvconnector.ids import Rank
from kvconnector_kernels.relayout import Conversion, PagedSide, PartTable, relayout

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


@pytest.mark.parametrize(
    "elements",
    [
        ("dtype=bfloat16", "dtype=float8_e4m3fn"),
        ("dtype=float8_e5m2,scale=3", "dtype=float16"),
        ("dtype=float16", "dtype=float8_e5m2,scale=0.3,rounding=cast"),
        ("dtype=float8_e5m2", "dtype=float8_e5m2,scale=1e-4,rounding=cast"),
        ("dtype=float8_e4m3fn,scale=0.3", "dtype=float8_e4m3fn,scale=0.41"),
    ],
)
def test_a_sequence_is_also_known_with_other_elements(elements):
    shapes = [EngineShape.parse(f"block=4,{each}") for each in elements]
    parts = [rank_geometry(MODEL, each, Rank(0, 0)).groups[0] for each in shapes]
    theirs, ours = (
        RankPools(each, "NHD", num_blocks=8, device="cpu", written=parts[0]) for each in parts
    )
    theirs.write(SEED, [5, 0], 8)
    scales = np.broadcast_to(np.float32([each.scale for each in shapes]), (1, 4, 2)).copy()
    types = [each.dtype for each in shapes]
    conversion = Conversion(*types, scales, "cpu", rounding=shapes[1].rounding)
    ids = np.array([5, 0], np.int32)
    for key in theirs.storage:
        sides = [PagedSide(table_of(pools, *key), ids) for pools in (theirs, ours)]
        relayout(*sides, conversion=conversion, num_parts=1, num_heads=4, num_tokens=8)
    assert ours.mismatch(SEED, [5, 0], 8) == ""
    ours.storage[1, 1].reshape(8, -1)[5, 3] ^= 1
    assert "layer 1" in ours.mismatch(SEED, [5, 0], 8)


def table_of(pools, layer, part):
    view = pools.cache_group().views[layer][part]
    names = ("num_blocks", "num_heads", "block_size", "head_dim")
    sizes = dict(zip(names, view.shape, strict=True))
    rows = np.array([[view.address, *view.strides_bytes]], np.int64)
    return PartTable(rows, **sizes, item_size_bytes=view.item_size_bytes, device="cpu")
