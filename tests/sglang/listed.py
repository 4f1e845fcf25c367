"""A hybrid model's pool, and a pool's entries in `KVArgs`."""

from types import SimpleNamespace

import torch


def listed(pool, page_size, draft=None, num_layers=4):
    """Return the entries that SGLang's queues make for a pool, by SGLang's own functions."""
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


def hybrid_pool(
    page_size, device, *, size, heads, dim, groups, attention_layers, tp_size=1, **more
):
    """Return a pool of attention layers and, in layers 0 and 2, of Mamba 2 states whose convolutions have `groups`."""
    from sglang.srt.configs.mamba_utils import (
        Mamba2CacheParams,
        Mamba2StateDType,
        Mamba2StateShape,
    )
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

    state = Mamba2StateShape.create(
        tp_world_size=tp_size,
        intermediate_size=16,
        n_groups=2,
        num_heads=4,
        head_dim=4,
        state_size=4,
        conv_kernel=4,
        conv_shard_groups=groups,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    pool = MambaPool(
        size=4,
        spec_state_size=4,
        cache_params=Mamba2CacheParams(shape=state, dtype=dtype, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        device=device,
        **more,
    )
    kv = (size, torch.float32, page_size, heads, dim, list(attention_layers), device)
    return HybridLinearKVPool(*kv, mamba_pool=pool)
