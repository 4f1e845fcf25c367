"""A pool's part of `KVArgs`."""

from types import SimpleNamespace


def listed(pool, page_size, draft=None, num_layers=4):
    """What SGLang's queues make of a pool, by its own functions."""
    from sglang.srt.disaggregation.utils import build_kv_layer_ids, setup_state_kv_args

    args = SimpleNamespace(page_size=page_size)
    columns = pool.get_contiguous_buf_infos()
    drafted = draft.get_contiguous_buf_infos() if draft else ([], [], [])
    args.num_draft_entries = len(drafted[0])
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (
        own + more for own, more in zip(columns, drafted, strict=True)
    )
    args.kv_layer_ids = build_kv_layer_ids(
        token_to_kv_pool=pool,
        draft_token_to_kv_pool=draft,
        num_draft_entries=args.num_draft_entries,
        num_hidden_layers=num_layers,
    )
    setup_state_kv_args(args, pool, draft, num_layers)
    return args
