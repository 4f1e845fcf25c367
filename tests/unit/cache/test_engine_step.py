from types import SimpleNamespace

from kvconnector.cache.engine_step import yield_req_data

STEP = SimpleNamespace(
    scheduled_new_reqs=[SimpleNamespace(req_id="new", block_ids=([1], [2]))],
    scheduled_cached_reqs=SimpleNamespace(
        req_ids=["grown", "as it was", "resumed"],
        new_block_ids=[([3], []), None, ([4, 5], [6])],
        resumed_req_ids={"resumed"},
    ),
)


def test_yielded_req_data_follows_the_vllm_release():
    changes = [
        ("new", ([1], [2])),
        ("grown", ([3], [])),
        ("as it was", None),
        ("resumed", ([4, 5], [6])),
    ]
    is_resumed, is_table_whole = (False, False, False, True), (True, False, False, True)
    for release, thirds in (
        ((0, 32), is_resumed),
        ((0, 33), is_table_whole),
        ((1, 0), is_table_whole),
    ):
        expected = [(*change, third) for change, third in zip(changes, thirds, strict=True)]
        assert list(yield_req_data(STEP, release=release)) == expected
