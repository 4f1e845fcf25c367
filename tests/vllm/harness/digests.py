"""The comparison of a request's caches on two engines, byte by byte, for any ranks, blocks and layouts."""

import numpy as np
import torch


class CacheDigests:
    """The `worker_extension_cls` of every engine, whose methods the engine calls on all its ranks."""

    def cache_digests(self, block_ids, *tokens):
        """Digest the tokens `range(*tokens)` of a request whose blocks are `block_ids`, by group, on this rank. Returns
        `{(layer, KV head): {token: digest of its K and V}}` without null blocks and recurrent states.
        """
        from kvconnector.integrations.vllm.placement import Placement

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        place = Placement.here(self.vllm_config.parallel_config)
        shared = place.context_parallel
        tokens = tokens_of_rank(*tokens, shared.world_size, shared.rank, shared.interleave_tokens)
        config = self.model_runner.kv_cache_config
        layers = self.vllm_config.compilation_config.static_forward_context
        found = {}
        for group, ids in zip(config.kv_cache_groups, block_ids, strict=True):
            for name in group.layer_names:
                if not isinstance(layers[name].kv_cache, tuple):
                    values, numbers = _layer(layers[name], config.num_blocks, ids, tokens)
                    first = self._first_head(place.tp_rank, values.shape[1])
                    for head, of_head in enumerate(values.T.tolist(), first):
                        found[name, head] = dict(zip(numbers.tolist(), of_head, strict=True))
        return found

    def _first_head(self, rank, heads):
        """Return the first KV head of a rank. Heads are split, or copied if there are fewer heads than ranks."""
        model = self.vllm_config.model_config
        # a latent stands for all heads, and every rank has it
        total = 1 if model.use_mla else model.get_total_num_kv_heads()
        size = self.vllm_config.parallel_config.tensor_parallel_size
        return rank * heads if heads * size <= total else rank * total // size


def _layer(layer, num_blocks, block_ids, tokens):
    """Return digests `[tokens, heads]` of a layer, and the tokens' numbers."""
    cache = layer.kv_cache  # [blocks, heads, tokens of a block, content]; MLA's has no heads
    if cache.dim() == 3:
        cache = cache.unsqueeze(1)
    ratio = cache.shape[0] // num_blocks  # kernel blocks in one of vLLM's blocks
    block = cache.shape[2]
    numbers, places = tokens
    window = getattr(layer, "sliding_window", None) or np.inf
    ids = np.append(block_ids, 0)  # block 0 stands for one that is not kept
    owners = ids[np.minimum(places // (block * ratio), len(block_ids))]
    # of a window, the tokens that the next token sees
    is_kept = (owners > 0) & (numbers > numbers.max(initial=0) + 1 - window)
    numbers, places, owners = (each[is_kept] for each in (numbers, places, owners))
    kernel_ids, inverse = np.unique(
        owners * ratio + places % (block * ratio) // block, return_inverse=True
    )
    if layer.get_attn_backend().get_name() == "CPU_ATTN":
        content = by_token(cache[kernel_ids.tolist()]).view(torch.uint8)
    else:
        content = cache.view(torch.uint8)[kernel_ids.tolist()].cpu()
    return digest(content.numpy()[inverse, :, places % block]), numbers


def by_token(content):
    """Return blocks `[n, heads, tokens, 2 * dim]` of vLLM's CPU code, which stores K as `[dim][token]`, then V."""
    blocks, heads, tokens, width = content.shape
    k, v = content.view(blocks, heads, -1).chunk(2, dim=2)
    k = k.reshape(blocks, heads, width // 2, tokens).transpose(2, 3)
    v = v.reshape(blocks, heads, tokens, width // 2)
    return torch.cat((k, v), dim=3).contiguous()


def tokens_of_rank(first_token, end_token, dcp_size, dcp_rank, interleave):
    """Return the tokens that a context parallel rank keeps, and their positions in its own blocks."""
    numbers = np.arange(first_token, end_token)
    numbers = numbers[numbers // interleave % dcp_size == dcp_rank]
    return numbers, numbers // (interleave * dcp_size) * interleave + numbers % interleave


def digest(content):
    """Digest each row of bytes to 64 bits: a sum modulo 2^64 with random odd factors."""
    factors = np.random.default_rng(0).integers(0, 2**63, content.shape[-1], dtype=np.uint64)
    return (content.astype(np.uint64) + 1) @ (2 * factors + 1)


def merged(ranks):
    """Merge the digests of an engine's ranks. A token on which two ranks differ equals no digest."""
    found = {}
    for rank in ranks:
        for key, digests in rank.items():
            known = found.setdefault(key, {})
            for token, value in digests.items():
                known[token] = value if known.get(token, value) == value else -1
    return found


def difference(prefill, decode, drafts=""):
    """Name a difference between two engines' digests of the tokens that both keep; "" if there is none. The layer
    `drafts` must be on one engine only.
    """
    lone = {key for key in prefill.keys() ^ decode.keys() if drafts and key[0] == drafts}
    if drafts and not lone:
        return f"both engines have {drafts}, or neither"
    prefill, decode = (
        {key: found for key, found in each.items() if key not in lone} for each in (prefill, decode)
    )
    if prefill.keys() != decode.keys():
        return f"layers and heads {sorted(prefill.keys() ^ decode.keys())} are on one engine only"
    for key, expected in prefill.items():
        common = expected.keys() & decode[key].keys()
        if not common:
            return f"no token of {key} is on both engines"
        bad = sorted(token for token in common if expected[token] != decode[key][token])
        if bad:
            return f"{len(bad)} of {len(common)} tokens of {key} differ, from {bad[0]} to {bad[-1]}"
    return ""
