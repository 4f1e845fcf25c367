import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import BlockIdError, GeometryError
from kvconnector.layout import KVView, check_block_ids, part_table


def contiguous(address=0, shape=(3, 2, 4, 5), item_size=2):
    strides = np.empty(shape, dtype=f"V{item_size}").strides
    return KVView(address, shape, strides, item_size)


@pytest.mark.parametrize(
    "shape,strides,item_size",
    [
        ((0, 1, 1, 1), (2, 2, 2, 2), 2),
        ((1, 1, 1, 1), (2, 2, 2, 2), 0),
        ((1, 1, 1, 1), (-2, 2, 2, 2), 2),
        ((1, 1, 1), (2, 2, 2), 2),
    ],
)
def test_impossible_views_are_refused(shape, strides, item_size):
    with pytest.raises(GeometryError):
        KVView(64, shape, strides, item_size)
    with pytest.raises(GeometryError, match="address"):
        contiguous(address=-1)


@given(
    shape=st.tuples(*[st.integers(1, 4)] * 4),
    strides=st.tuples(*[st.integers(0, 40)] * 4),
    item_size=st.sampled_from([1, 2, 4]),
)
def test_accepted_views_have_no_overlapping_elements(shape, strides, item_size):
    try:
        KVView(0, shape, strides, item_size)
    except GeometryError:
        return
    starts = sum(
        step * stride
        for step, stride in zip(
            np.ogrid[tuple(slice(count) for count in shape)], strides, strict=True
        )
    )
    taken = (np.ravel(starts)[:, None] + np.arange(item_size)).ravel()
    assert len(np.unique(taken)) == len(taken)


def test_part_tables_need_equal_shapes():
    assert len(part_table([contiguous(), contiguous(shape=(9, 2, 4, 5))])) == 2
    for other in ((3, 1, 4, 5), (3, 2, 3, 5), (3, 2, 4, 6)):
        with pytest.raises(GeometryError, match="agree"):
            part_table([contiguous(), contiguous(shape=other)])
    with pytest.raises(GeometryError, match="agree"):
        part_table([contiguous(), contiguous(item_size=4)])
    with pytest.raises(GeometryError, match="at least one"):
        part_table([])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_block_ids_inside_the_pool_become_int32(dtype):
    ids = check_block_ids(np.array([9, 0, 3], dtype=dtype)[::-1], 10, what="ids")
    assert ids.dtype == np.int32
    assert ids.flags.c_contiguous
    assert ids.tolist() == [3, 0, 9]
    assert check_block_ids([], 10, what="ids").tolist() == []


# lists are checked as they are, not as numpy would convert them
WRONG_ARRAYS = [[-1], [10], [1 << 40], [[1]], [1.5], ["1"], [True]]
WRONG_LISTS = [[1, True], [[1], [2, 3]], [None], [0.0, 1]]


@pytest.mark.parametrize("ids", [*map(np.array, WRONG_ARRAYS), *WRONG_LISTS])
def test_wrong_block_ids_are_refused(ids):
    with pytest.raises(BlockIdError, match="my ids"):
        check_block_ids(ids, 10, what="my ids")
