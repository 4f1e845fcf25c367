"""Attention of one rank: grouped queries over all tokens or over a window of them, and MLA-like latents. Float32.

See `shared_attention` for ranks that share a sequence's tokens.

Legend: T tokens of a step, E hidden size, H heads, D head dim, C latent cache dim, L tokens of one sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.batch import Batch
from minillm.config import ModelConfig
from minillm.paged_cache import PagedCache
from minillm.parallel import Communicator
from minillm.partition import RankShare
from minillm.shared_attention import shared_attention
from minillm.weights import WeightSource


class Rotary:
    """Rotary position embedding in the rotate-half convention over `dim` elements."""

    def __init__(self, dim: int, max_len: int, theta: float, device: str) -> None:
        frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float64), frequencies)
        self.cos = angles.cos().float().to(device)
        self.sin = angles.sin().float().to(device)

    def __call__(self, x_THD: Tensor, positions_T: Tensor) -> Tensor:
        """`x_THD` rotated by its positions; a new tensor."""
        cos, sin = self.cos[positions_T].unsqueeze(1), self.sin[positions_T].unsqueeze(1)
        low, high = x_THD.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def paged_attention(
    q_THD: Tensor, cache: PagedCache, layer: int, batch: Batch, scale: float
) -> Tensor:
    """Causal attention of every row over its own sequence's cached tokens, read through the block table.

    The first cached part is K and the last is V (MLA: one part is both). Returns `[T, H, D]` with V's D.
    """
    outputs = []
    for sequence in batch.sequences:
        stop = sequence.start + sequence.count
        block_ids = sequence.block_ids[cache.group_of[layer]]
        parts_HLD = cache.read(layer, block_ids, stop)
        q_HTD = q_THD[sequence.first : sequence.first + sequence.count].transpose(0, 1)
        mask = None
        if sequence.count > 1 and sequence.start > 0:
            rows = torch.arange(sequence.start, stop, device=q_THD.device)
            mask = torch.arange(stop, device=q_THD.device) <= rows.unsqueeze(1)
        out_HTD = F.scaled_dot_product_attention(
            q_HTD.unsqueeze(0),
            parts_HLD[0].unsqueeze(0),
            parts_HLD[-1].unsqueeze(0),
            attn_mask=mask,
            is_causal=sequence.count > 1 and sequence.start == 0,
            scale=scale,
            enable_gqa=True,
        )
        outputs.append(out_HTD[0].transpose(0, 1))
    return torch.cat(outputs)


def window_attention(
    qkv_THD: tuple[Tensor, Tensor, Tensor],
    cache: PagedCache,
    layer: int,
    batch: Batch,
    window: int,
) -> Tensor:
    """Causal attention of every row over the last `window` tokens, its own included.

    Tokens of earlier steps are read through the block table, those of this step are taken from `qkv_THD`.
    Returns `[T, H, D]`.
    """
    outputs = []
    for sequence in batch.sequences:
        own = slice(sequence.first, sequence.first + sequence.count)
        q_THD, k_THD, v_THD = (values_THD[own] for values_THD in qkv_THD)
        oldest = max(0, sequence.start - window + 1)
        block_ids = sequence.block_ids[cache.group_of[layer]]
        k_past, v_past = cache.read_range(layer, block_ids, range(oldest, sequence.start))
        keys = torch.arange(oldest, sequence.start + sequence.count, device=q_THD.device)
        age_TL = keys[sequence.start - oldest :].unsqueeze(1) - keys
        out_HTD = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1).unsqueeze(0),
            torch.cat((k_past, k_THD)).transpose(0, 1).unsqueeze(0),
            torch.cat((v_past, v_THD)).transpose(0, 1).unsqueeze(0),
            attn_mask=(age_TL >= 0) & (age_TL < window),
            enable_gqa=True,
        )
        outputs.append(out_HTD[0].transpose(0, 1))
    return torch.cat(outputs)


def full_attention(
    q_THD: Tensor,
    cache: PagedCache,
    layer: int,
    batch: Batch,
    *,
    scale: float,
    groups: Communicator,
) -> Tensor:
    """`paged_attention` over all tokens of the sequences, whether or not this rank caches all of them."""
    if cache.context_parallel.world_size == 1:
        return paged_attention(q_THD, cache, layer, batch, scale)
    return shared_attention(q_THD, cache, layer, batch, scale=scale, groups=groups)


def rows_of(weight: Tensor, heads: range, width: int) -> Tensor:
    """The rows of `heads`, `width` each."""
    return weight[heads.start * width : heads.stop * width]


class GroupedAttention:
    """Grouped-query attention over this rank's heads; the caller all-reduces the result."""

    def __init__(
        self, config: ModelConfig, share: RankShare, layer: int, source: WeightSource, device: str
    ) -> None:
        self.layer, self.share, self.dim = layer, share, config.head_dim
        is_window = config.layer_kinds[layer] == "window"
        self.window = config.mixer.sliding_window if is_window else None
        name = f"model.layers.{layer}.self_attn."
        q_shape = (config.num_heads * config.head_dim, config.hidden_size)
        kv_shape = (config.num_kv_heads * config.head_dim, config.hidden_size)
        o_shape = (config.hidden_size, config.num_heads * config.head_dim)
        q = rows_of(source(name + "q_proj.weight", q_shape), share.q_heads, self.dim)
        k = rows_of(source(name + "k_proj.weight", kv_shape), share.kv_heads, self.dim)
        v = rows_of(source(name + "v_proj.weight", kv_shape), share.kv_heads, self.dim)
        self.qkv = torch.cat((q, k, v)).to(device)
        o = rows_of(source(name + "o_proj.weight", o_shape).T, share.q_heads, self.dim)
        self.o = o.T.contiguous().to(device)

    def __call__(
        self, x_TE: Tensor, batch: Batch, cache: PagedCache, rotary: Rotary, groups: Communicator
    ) -> Tensor:
        """Cache this step's K and V and attend. Returns this rank's partial sum, `[T, E]`."""
        counts = (len(self.share.q_heads), len(self.share.kv_heads), len(self.share.kv_heads))
        qkv_THD = F.linear(x_TE, self.qkv).unflatten(1, (sum(counts), self.dim))
        q_THD, k_THD, v_THD = qkv_THD.split(counts, dim=1)
        q_THD, k_THD = rotary(q_THD, batch.positions_T), rotary(k_THD, batch.positions_T)
        slots = batch.slots[cache.group_of[self.layer]]
        cache.write(self.layer, (k_THD, v_THD), slots)
        if self.window is None:
            out_THD = full_attention(
                q_THD, cache, self.layer, batch, scale=self.dim**-0.5, groups=groups
            )
        else:
            values = (q_THD, k_THD, v_THD)
            out_THD = window_attention(values, cache, self.layer, batch, self.window)
        return F.linear(out_THD.flatten(1), self.o)


class LatentAttention:
    """MLA-like attention in absorbed form: queries are taken into the latent space that the cache holds.

    The cache stores, once for all heads and on every tensor rank, `[latent (C - rope), rotary key (rope)]`.
    """

    def __init__(
        self, config: ModelConfig, share: RankShare, layer: int, source: WeightSource, device: str
    ) -> None:
        self.layer, self.config, self.share = layer, config, share
        name = f"model.layers.{layer}.self_attn."
        hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        rank, rope = config.mixer.latent_rank, config.mixer.rope_dim
        q = source(name + "q_proj.weight", (heads * (dim + rope), hidden))
        self.q = rows_of(q, share.q_heads, dim + rope).contiguous().to(device)
        self.kv_a = source(name + "kv_a_proj_with_mqa.weight", (rank + rope, hidden)).to(device)
        self.kv_a_norm = source(name + "kv_a_layernorm.weight", (rank,)).to(device)
        kv_b = source(name + "kv_b_proj.weight", (heads * 2 * dim, rank))
        kv_b_HDC = rows_of(kv_b, share.q_heads, 2 * dim).unflatten(0, (-1, 2 * dim)).to(device)
        self.k_up_HDC, self.v_up_HDC = kv_b_HDC.split(dim, dim=1)
        o = rows_of(source(name + "o_proj.weight", (hidden, heads * dim)).T, share.q_heads, dim)
        self.o = o.T.contiguous().to(device)

    def __call__(
        self, x_TE: Tensor, batch: Batch, cache: PagedCache, rotary: Rotary, groups: Communicator
    ) -> Tensor:
        """Cache this step's latent and attend. Returns this rank's partial sum, `[T, E]`."""
        config = self.config
        latent_TC, rope_key_TC = F.linear(x_TE, self.kv_a).split(
            (config.mixer.latent_rank, config.mixer.rope_dim), dim=1
        )
        latent_TC = F.rms_norm(latent_TC, latent_TC.shape[1:], self.kv_a_norm, config.norm_eps)
        rope_key_THC = rotary(rope_key_TC.unsqueeze(1), batch.positions_T)
        cached_THC = torch.cat((latent_TC.unsqueeze(1), rope_key_THC), dim=-1)
        cache.write(self.layer, (cached_THC,), batch.slots[cache.group_of[self.layer]])
        width = config.head_dim + config.mixer.rope_dim
        q_THD = F.linear(x_TE, self.q).unflatten(1, (len(self.share.q_heads), width))
        plain_THD, rope_THD = q_THD.split((config.head_dim, config.mixer.rope_dim), dim=-1)
        absorbed_THC = torch.einsum("thd,hdc->thc", plain_THD, self.k_up_HDC)
        q_THC = torch.cat((absorbed_THC, rotary(rope_THD, batch.positions_T)), dim=-1)
        out_THC = full_attention(q_THC, cache, self.layer, batch, scale=width**-0.5, groups=groups)
        out_THD = torch.einsum(
            "thc,hdc->thd", out_THC[..., : config.mixer.latent_rank], self.v_up_HDC
        )
        return F.linear(out_THD.flatten(1), self.o)
