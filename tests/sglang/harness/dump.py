"""Hooks that dump an engine's cache content for a prompt, and the comparison of both engines' dumps.

The prefill engine writes digests of its bytes when a prompt is complete, the decode engine when the transfer is, one
file per room and rank. SGLang's pages do not matter here: its table of a request names a row for each token.
"""

import functools
import os
import sys
from pathlib import Path

import msgspec
import torch

from tests.vllm.harness.digests import difference, digest, merged

INDEX_PAGE, INDEX_WIDTHS = 64, (128, 4)
NO_ROW = 0
"""The row of a window's pool that stands for tokens which it does not keep."""
STATE_PARTS = ((512, 64, 64), (16,))
"""Parts of a recurrent state: its convolution `[x | B | C]`, each cut by ranks, and its heads."""


def dump_into(folder):
    """Hook the engine that will run in this process."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin

    _before(
        SchedulerDisaggregationPrefillMixin, "send_kv_chunk", functools.partial(_on_send, folder)
    )
    _before(DecodeTransferQueue, "_commit_transfer_to_req", functools.partial(_on_commit, folder))
    _before(DecodePreallocQueue, "_send_kv_metadata", _log_hit)


def _before(owner, name, hook):
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(self, *arguments, **options):
        hook(self, *arguments, **options)
        return original(self, *arguments, **options)

    setattr(owner, name, call)


def _log_hit(*_, decode_prefix_len=0, **__):
    sys.stdout.write(f"cached prefix: {decode_prefix_len or 0}\n")
    sys.stdout.flush()


def _on_send(folder, scheduler, req, last_chunk=False, end_idx=None):
    if last_chunk:
        _dump(folder, scheduler, req, "prefill")


def _on_commit(folder, queue, decode_req):
    _dump(folder, queue.scheduler, decode_req.req, "decode")


def _dump(folder, scheduler, req, side):
    from sglang.srt.runtime_context import get_parallel

    if req.bootstrap_room is None:
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the step that computes the prompt's end may still run
    parallel = get_parallel()
    found = Digests(scheduler, req, parallel.attn_tp_rank, parallel.attn_tp_size).of_request()
    rank = f"{parallel.pp_rank}.{parallel.attn_cp_rank}.{parallel.attn_tp_rank}"
    place = Path(folder) / f"{req.bootstrap_room}.{side}.{rank}.dump"
    part = place.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(msgspec.msgpack.encode([(*key, tokens) for key, tokens in found.items()]))
    part.rename(place)


class Digests:
    """`{(name, head): {token: digest}}` of one rank for a request: K and V of each layer, or its latent, and states.
    `joins_parts`: a token's K and V have one digest, as in the harness of vLLM.
    """

    joins_parts = False

    def __init__(self, scheduler, req, rank, size):
        self._scheduler, self._req, self._rank, self._size = scheduler, req, rank, size
        self._found = {}

    def of_request(self):
        scheduler, count = self._scheduler, len(self._req.origin_input_ids)
        rows = scheduler.req_to_token_pool.req_to_token[self._req.kv.req_pool_idx, :count].long()
        pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
        if mapping := getattr(pool, "layers_mapping", None):
            places = pool.full_to_swa_index_mapping[rows].long()
            for layer, (index, is_window) in mapping.items():
                if is_window:  # what the prompt's next token sees
                    first = max(0, count - scheduler.sliding_window_size)
                    self._layer(pool.swa_kv_pool, layer, index, places, first)
                else:
                    self._layer(pool.full_kv_pool, layer, index, rows)
            return self._found
        full = getattr(pool, "full_kv_pool", pool)
        names = getattr(pool, "full_attention_layer_id_mapping", None)
        for layer, index in (names or self._stage(full)).items():
            self._layer(full, layer, index, rows)
        if names is not None:
            self._states()
        self._keys(pool, rows)
        return self._found

    def _stage(self, pool):
        """Return the rank's layers: of some that it lacks, a pool has a tensor without rows."""
        rows = [len(each) for each in getattr(pool, "kv_buffer", ())] or [1] * pool.layer_num
        return {
            (pool.start_layer or 0) + index: index for index in range(pool.layer_num) if rows[index]
        }

    def _keys(self, pool, rows):
        """Digest the keys of a sparse indexer: pages of 64 tokens have 128 bytes of each, then 4 bytes of each."""
        for index, tensor in enumerate(getattr(pool, "index_k_with_scale_buffer", ())):
            if not len(tensor):
                continue
            pages, places = rows // INDEX_PAGE, rows % INDEX_PAGE
            planes = tensor.split([INDEX_PAGE * width for width in INDEX_WIDTHS], dim=1)
            own = [plane.unflatten(1, (INDEX_PAGE, -1))[pages, places] for plane in planes]
            digests = digest(_bytes(torch.cat(own, dim=1)).reshape(len(rows), 1, -1))
            found = dict(enumerate(digests[:, 0].tolist()))
            self._found[f"{(pool.start_layer or 0) + index}.keys", 0] = found

    def _layer(self, pool, layer, index, places, first_token=0):
        if hasattr(pool, "kv_buffer"):
            tensors, total = {"latent": pool.kv_buffer[index]}, 1
        else:
            tensors = {"K": pool.k_buffer[index], "V": pool.v_buffer[index]}
            total = self._scheduler.model_config.get_total_num_kv_heads()
        tokens = first_token + (places[first_token:] != NO_ROW).nonzero().flatten()
        rows = {name: tensor[places[tokens]] for name, tensor in tensors.items()}
        if self.joins_parts:
            rows = {"all": torch.cat([*rows.values()], dim=-1)}
        for name, values in rows.items():
            heads = values.shape[1]
            digests = digest(_bytes(values).reshape(len(tokens), heads, -1))
            first = self._rank * heads
            if heads * self._size > total:
                first = self._rank * total // self._size
            for head, of_head in enumerate(digests.T.tolist(), first):
                found = zip(tokens.tolist(), of_head, strict=True)
                self._found[f"{layer}.{name}", head] = dict(found)

    def _states(self):
        """Digest recurrent states by channel and by head."""
        cache = self._scheduler.req_to_token_pool.mamba_pool.mamba_cache
        slot = int(self._req.kv.mamba_pool_idx)
        for number, tensor in enumerate((*cache.conv, cache.temporal)):
            cut = tensor[:, slot].transpose(0, 1)
            values = iter(digest(_bytes(cut).reshape(len(cut), -1)).tolist())
            for part, total in enumerate(STATE_PARTS[number]):
                share = total // self._size
                for head in range(self._rank * share, (self._rank + 1) * share):
                    self._found[f"state {number}.{part}", head] = {0: next(values)}


def _bytes(tensor):
    return tensor.cpu().contiguous().view(torch.uint8).numpy()


def compare(folder, room):
    """Compare what the two engines had for the request in `room`.

    Args:
        folder: Where the engines have dumped.
        room: The request's `bootstrap_room`.

    Returns:
        A description of the differences; empty if there are none.
    """
    prefill, decode = (merged_dumps(folder, room, side) for side in ("prefill", "decode"))
    return difference(prefill, decode) if prefill else "the prefill engine dumped nothing"


def merged_dumps(folder, room, side):
    """Return an engine's digests for a room."""
    kind = list[tuple[str, int, dict[int, int]]]
    files = Path(folder).glob(f"{room}.{side}.*.dump")
    ranks = [msgspec.msgpack.decode(path.read_bytes(), type=kind) for path in files]
    return merged({(name, head): tokens for name, head, tokens in rank} for rank in ranks)
