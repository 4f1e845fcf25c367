"""Plain PyTorch in place of sparse attention's kernels, so that engines with an indexer's keys run on any CPU.

Keys are computed, gathered and stored as SGLang does, but nothing is selected by them: every token attends to all
before it, in all engines alike.
"""

import json
from pathlib import Path

import torch
from torch import distributed

FP8_MAX = 448.0
PAGE, KEY_BYTES, SCALE_BYTES = 64, 128, 4


def has_indexer(model):
    """Return True if the model in this folder has sparse attention."""
    return "index_topk" in json.loads(Path(model, "config.json").read_text())


def stand_in_for_sparse():
    """Put them into SGLang's modules, before an engine on a CPU starts."""
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.cp.interleave import InterleaveCPStrategy
    from sglang.srt.mem_cache import index_key_cache
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # asked for by every sparse model
    # it would keep float32 in bfloat16
    model_hook._dsa_kv_cache_dtype_default = lambda *_: {}
    # latents are gathered where torch's attention stores them: see kernels.py
    forward_mla.prepare_kv_for_attention = lambda *given, **_: given[2:4]
    forward_mla.is_interleave_extend = lambda _: False
    Indexer.forward = store_keys
    InterleaveCPStrategy.run_attention = attend_in_turns
    # where its kernels are depends on the release
    kernels = vars(index_key_cache)
    kernels = kernels.get("dsa_index_k_cache") or kernels["index_buf_accessor"]
    kernels.SetKAndS.execute = put_keys
    # what an owner lends to the other ranks
    PyNcclCommunicator.broadcast = lambda comm, tensor, src: distributed.broadcast(
        tensor, group_src=src, group=comm.group
    )


def attend_in_turns(strategy, queries, batch, device, attend):
    """Return what this rank's queries find: of all tokens of a step, one after the other, every n-th one is its own.

    Args:
        strategy: The rank, and how many there are.
        queries: `[token, head, dim]`, with padding at the end.
        batch: The step.
        device: Not used.
        attend: Takes queries, the bounds of each prompt's, and for each prompt the length up to its last query.
    """
    counts = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
    places = [
        (number, int(prefix) + at + 1)
        for number, (prefix, count) in enumerate(counts)
        for at in range(int(count))
    ]
    found = [
        attend(
            queries[row : row + 1],
            torch.tensor([0] * (number + 1) + [1]),
            [length] * (number + 1),
            None,
        )
        for row, (number, length) in enumerate(places[strategy.cp_rank :: strategy.cp_size])
    ]
    padding = found[0].new_zeros(len(queries) - len(found), *found[0].shape[1:])
    return torch.cat([*found, padding])


def store_keys(indexer, x, *, forward_batch, layer_id, **_):
    """Store each token's key in fp8, with its scale. Returns None: nothing is selected."""
    from sglang.srt.layers.cp.base import get_cp_strategy
    from sglang.srt.layers.cp.utils import is_cp_active
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    keys = indexer.k_norm(indexer.wk(x)[0])
    if is_cp_active(forward_batch):
        gather = get_cp_strategy().gather_kv_cache
        keys = gather(keys.unsqueeze(1).contiguous(), forward_batch).squeeze(1)
    scales = keys.abs().amax(-1, keepdim=True).float().clamp(min=1e-4) / FP8_MAX
    get_token_to_kv_pool().set_index_k_scale_buffer(
        layer_id, forward_batch.out_cache_loc, (keys / scales).to(torch.float8_e4m3fn), scales
    )


def put_keys(pool, buf, loc, index_k, index_k_scale):
    """Store keys, fp8 `[token, 128]`, and scales, float32 `[token, 1]`: a page has all keys, then all scales."""
    pages, places = loc.long() // PAGE, loc.long() % PAGE
    keys = buf[:, : PAGE * KEY_BYTES].unflatten(1, (PAGE, KEY_BYTES))
    keys[pages, places] = index_k.view(torch.uint8)
    scales = buf[:, PAGE * KEY_BYTES :].unflatten(1, (PAGE, SCALE_BYTES))
    scales[pages, places] = index_k_scale.contiguous().view(torch.uint8)
