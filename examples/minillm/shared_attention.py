"""Attention where the ranks of a context parallel group share a sequence's tokens. Float32.

Every rank attends with the queries of all ranks to the tokens that it caches, and keeps the logarithm of the sum of its
weights. With these the partial results of a query add up to the result of one rank with all tokens.

Legend: T tokens of a step, H query heads, K cached heads, Q query heads of a cached head, D head dim, L cached tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.batch import Batch, SequenceSlice
from minillm.paged_cache import PagedCache
from minillm.parallel import ProcessGroups


def shared_attention(
    q_THD: Tensor,
    cache: PagedCache,
    name: str,
    batch: Batch,
    *,
    scale: float,
    groups: ProcessGroups,
) -> Tensor:
    """`paged_attention` of this rank's queries over the tokens of all ranks of its group. Returns `[T, H, D]`."""
    num_heads = q_THD.shape[1]
    all_q_THD = torch.cat(groups.gather_shares(q_THD), dim=1)
    partials = [
        _attend(all_q_THD[s.first : s.first + s.count], cache, name, s, scale)
        for s in batch.sequences
    ]
    own = slice(cache.context_parallel.rank * num_heads, None)
    shares = groups.gather_shares(torch.cat(partials))
    return merge_partials([share[:, own][:, :num_heads] for share in shares])


def merge_partials(shares: list[Tensor]) -> Tensor:
    """Merge partial results over disjoint tokens, as `_attend` returns them, into one over all these tokens."""
    stacked = torch.stack(shares)
    out, log_weights = stacked[..., :-1], stacked[..., -1:]
    return (out * log_weights.softmax(dim=0)).sum(dim=0)


def _attend(
    q_THD: Tensor, cache: PagedCache, name: str, sequence: SequenceSlice, scale: float
) -> Tensor:
    """Return one sequence's rows over the tokens that this rank caches: `[T, H, D + 1]`, the last one the log-sum-exp.

    It is minus infinity, and the rest zero, where a row sees none of them.
    """
    stop = sequence.start + sequence.count
    keys = cache.tokens_below(stop)
    parts_KLD = cache.read(name, cache.block_ids(name, sequence.block_ids), range(len(keys)))
    k_KLD, v_KLD = parts_KLD[0], parts_KLD[-1]
    q_KQTD = q_THD.transpose(0, 1).unflatten(0, (len(k_KLD), -1))
    rows = torch.arange(sequence.start, stop, device=q_THD.device)
    scores = torch.einsum("kqtd,kld->kqtl", q_KQTD, k_KLD) * scale
    scores = scores.masked_fill(keys > rows.unsqueeze(1), -torch.inf)
    log_sum = scores.logsumexp(dim=-1, keepdim=True)
    weights = (scores - log_sum).exp().nan_to_num(0.0)
    out_KQTD = torch.einsum("kqtl,kld->kqtd", weights, v_KLD)
    return torch.cat((out_KQTD, log_sum), dim=-1).flatten(0, 1).transpose(0, 1)
