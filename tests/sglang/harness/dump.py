"""What both engines have in their caches for a prompt, byte by byte: hooks that run in the engines, and the comparison.

The prefill engine writes its rows when a prompt is complete, the decode engine when the transfer is: one file for each
room and rank, `{layer}.{K or V}` with rows `[token, head, byte]`, recurrent states as `{number}.state`. SGLang's pages
do not matter here: its table of a request names a row for each token.
"""

import functools
import os
from pathlib import Path

import numpy as np
import torch

NO_ROW = 0
"""Of a window's pool: where tokens are that it does not keep."""
STATE_PARTS = {"0.state": (512, 64, 64), "1.state": (16,)}
"""Of the model with "states": its convolution is `[x | B | C]`, each cut by ranks, and then there are its heads."""


def dump_into(folder):
    """Hook the engine that this process becomes."""
    from sglang.srt.disaggregation.decode import DecodeTransferQueue
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin

    _before(
        SchedulerDisaggregationPrefillMixin, "send_kv_chunk", functools.partial(_on_send, folder)
    )
    _before(DecodeTransferQueue, "_commit_transfer_to_req", functools.partial(_on_commit, folder))


def _before(owner, name, hook):
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(self, *arguments, **options):
        hook(self, *arguments, **options)
        return original(self, *arguments, **options)

    setattr(owner, name, call)


def _on_send(folder, scheduler, req, last_chunk=False, end_idx=None):
    if last_chunk:
        _dump(folder, scheduler, req, "prefill")


def _on_commit(folder, queue, decode_req):
    _dump(folder, queue.scheduler, decode_req.req, "decode")


def _dump(folder, scheduler, req, side):
    from sglang.srt.runtime_context import get_parallel

    if req.bootstrap_room is None:
        return
    parallel = get_parallel()
    found = {"tp": np.array([parallel.tp_rank, parallel.tp_size])}
    for name, rows in rows_of(scheduler, req):
        found[name] = rows.contiguous().view(torch.uint8).numpy()
    place = Path(folder) / f"{req.bootstrap_room}.{side}.{parallel.pp_rank}.{parallel.tp_rank}.npz"
    part = place.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(file, **found)
    part.rename(place)


def rows_of(scheduler, req):
    """`(name, tensor [token, head, dim])` of each layer's K and V, or latent, and of states `[1, ...]`."""
    table = scheduler.req_to_token_pool.req_to_token
    rows = table[req.kv.req_pool_idx, : len(req.origin_input_ids)].long()
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    mapping = getattr(pool, "layers_mapping", None)
    if mapping is not None:
        places = pool.full_to_swa_index_mapping[rows].long()
        for layer, (index, is_window) in mapping.items():
            part = pool.swa_kv_pool if is_window else pool.full_kv_pool
            if is_window:
                yield f"{layer}.kept", (places != NO_ROW).view(-1, 1, 1)
            yield from _layer(part, layer, index, places if is_window else rows)
        return
    full = getattr(pool, "full_kv_pool", pool)
    names = getattr(pool, "full_attention_layer_id_mapping", None)
    first = pool.start_layer or 0
    for index in range(full.layer_num):
        layer = next(name for name, at in names.items() if at == index) if names else first + index
        yield from _layer(full, layer, index, rows)
    if names is not None:
        yield from _states(scheduler, req)


def _layer(pool, layer, index, rows):
    if hasattr(pool, "kv_buffer"):
        yield f"{layer}.latent", pool.kv_buffer[index][rows]
    else:
        yield f"{layer}.K", pool.k_buffer[index][rows]
        yield f"{layer}.V", pool.v_buffer[index][rows]


def _states(scheduler, req):
    cache = scheduler.req_to_token_pool.mamba_pool.mamba_cache
    slot = int(req.kv.mamba_pool_idx)
    for number, tensor in enumerate((*cache.conv, cache.temporal)):
        yield f"{number}.state", tensor[:, slot].unsqueeze(0)


def compare(folder, room, kv_heads, window=None):
    """Compare what the two engines had for the request in `room`.

    Args:
        folder: where the engines dumped.
        room: the request's `bootstrap_room`.
        kv_heads: KV heads of the model.
        window: tokens that a sliding window sees; of its pool no others count.

    Returns:
        What differs, in words; empty if nothing does.
    """
    prefill, decode = (_merged(folder, room, side, kv_heads) for side in ("prefill", "decode"))
    if not prefill or prefill.keys() != decode.keys():
        return f"layers and heads {sorted(prefill.keys() ^ decode.keys())} are on one engine only"
    for key, expected in prefill.items():
        found = decode[key]
        if key[0].endswith(".kept"):
            continue
        is_kept = np.ones(len(expected), bool)
        kept = f"{key[0].partition('.')[0]}.kept", 0
        if kept in prefill:
            is_kept = prefill[kept].reshape(-1).astype(bool) & decode[kept].reshape(-1).astype(bool)
            is_kept[: max(0, len(is_kept) - (window or 0))] = False
            if not is_kept.any():
                return f"no token of {key} is on both engines"
        if found.shape != expected.shape:
            return f"{key} has shape {found.shape} for {expected.shape}"
        bad = (found != expected).reshape(len(expected), -1).any(axis=1) & is_kept
        if bad.any():
            places = np.flatnonzero(bad)
            return f"{bad.sum()} of {is_kept.sum()} tokens of {key} differ, from {places[0]} to {places[-1]}"
    return ""


def _merged(folder, room, side, kv_heads):
    """`{(name, head): rows}` of all ranks of an engine; latents as head 0, states by channel or head."""
    found = {}
    for path in sorted(Path(folder).glob(f"{room}.{side}.*.npz")):
        with np.load(path) as content:
            rank, size = content["tp"]
            for name in content.files:
                if name == "tp":
                    continue
                rows = content[name]
                kind = name.rpartition(".")[2]
                if kind == "state":
                    found |= _cut_state(name, rows, int(rank), int(size))
                    continue
                heads = rows.shape[1]
                first = rank * heads if heads * size <= kv_heads else rank * kv_heads // size
                for head in range(heads):
                    place = 0 if kind in ("latent", "kept") else int(first) + head
                    known = found.setdefault((name, place), rows[:, head])
                    if not np.array_equal(known, rows[:, head]):
                        found[name, f"{place} of rank {rank}"] = rows[:, head]
    return found


def _cut_state(name, rows, rank, size):
    """`{(part, channel or head): rows}` of one rank's states `[1, layer, channel or head, ...]`."""
    found, first = {}, 0
    for number, total in enumerate(STATE_PARTS[name]):
        share = total // size
        for index in range(share):
            place = rank * share + index
            found[f"{name} {number}", place] = rows[:, :, first + index]
        first += share
    return found
