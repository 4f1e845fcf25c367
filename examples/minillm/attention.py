"""Attention of one rank: grouped queries over all tokens, a window, a chunk or an encoder's output; MLA. Float32.

See `shared_attention` for ranks that share a sequence's tokens.

Legend: T tokens of a step, M tokens that its encoder encodes, E hidden size, H heads, D head dim, C latent cache dim,
L tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.batch import Batch
from minillm.cache_groups import cache_name
from minillm.config import LayerKind
from minillm.paged_cache import PagedCache
from minillm.parallel import ProcessGroups
from minillm.shared_attention import shared_attention
from minillm.weights import RankWeights


class Rotary:
    """Rotary position embedding in the rotate-half convention over `dim` elements."""

    def __init__(self, dim: int, max_len: int, theta: float, device: str) -> None:
        frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float64), frequencies)
        self.cos = angles.cos().float().to(device)
        self.sin = angles.sin().float().to(device)

    def __call__(self, x_THD: Tensor, positions_T: Tensor) -> Tensor:
        """Return `x_THD` rotated by its positions, as a new tensor."""
        cos, sin = self.cos[positions_T].unsqueeze(1), self.sin[positions_T].unsqueeze(1)
        low, high = x_THD.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


@dataclass(frozen=True, slots=True)
class StepContext:
    """Context of a step for its layers. `encoded_ME` is the encoder's input after the layers that have run."""

    batch: Batch
    cache: PagedCache
    rotary: Rotary
    groups: ProcessGroups
    encoded_ME: Tensor


def attend(
    q_THD: Tensor,
    k_LHD: Tensor,
    v_LHD: Tensor,
    mask_TL: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Grouped attention of one sequence's queries, `[T, H, D]`. True in the mask: the query sees the token."""
    out_HTD = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1).unsqueeze(0),
        k_LHD.transpose(0, 1).unsqueeze(0),
        v_LHD.transpose(0, 1).unsqueeze(0),
        attn_mask=mask_TL,
        scale=scale,
        enable_gqa=True,
    )
    return out_HTD[0].transpose(0, 1)


def paged_attention(
    q_THD: Tensor, cache: PagedCache, name: str, batch: Batch, scale: float
) -> Tensor:
    """Causal attention of every row over its own sequence's cached tokens, read through the block table.

    Tokens that all sequences have in common are read once. The first cached part is K and the last is V (MLA: one part
    is both). Returns `[T, H, D]` with V's D.
    """
    outputs = []
    tables = [cache.block_ids(name, sequence.block_ids) for sequence in batch.sequences]
    common = batch.common_tokens[cache.group_of[name]]
    common_HLD = cache.read(name, tables[0], range(common))
    for sequence, block_ids in zip(batch.sequences, tables, strict=True):
        stop = sequence.start + sequence.count
        parts_HLD = cache.read(name, block_ids, range(common, stop))
        if common:
            both = zip(common_HLD, parts_HLD, strict=True)
            parts_HLD = tuple(torch.cat(each, dim=1) for each in both)
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


FirstSeen = Callable[[Tensor], Tensor]
"""Maps positions to the first token that a query at each position sees."""


def first_of_window(window: int) -> FirstSeen:
    """A query sees the last `window` tokens, its own included."""
    return lambda positions: (positions - window + 1).clamp(min=0)


def first_of_chunk(chunk: int) -> FirstSeen:
    """A query sees the tokens of its own chunk."""
    return lambda positions: positions // chunk * chunk


def local_attention(
    qkv_THD: tuple[Tensor, Tensor, Tensor],
    cache: PagedCache,
    name: str,
    batch: Batch,
    first_seen: FirstSeen,
) -> Tensor:
    """Causal attention of every row to the tokens from the first that it sees.

    Tokens of earlier steps are read through the block table, those of this step are taken from `qkv_THD`.
    Returns `[T, H, D]`.
    """
    outputs = []
    for sequence in batch.sequences:
        own = slice(sequence.first, sequence.first + sequence.count)
        q_THD, k_THD, v_THD = (values_THD[own] for values_THD in qkv_THD)
        rows = torch.arange(sequence.start, sequence.start + sequence.count, device=q_THD.device)
        oldest = int(first_seen(rows[:1]))
        block_ids = cache.block_ids(name, sequence.block_ids)
        past_HLD = cache.read(name, block_ids, range(oldest, sequence.start))
        k_past, v_past = (part_HLD.transpose(0, 1) for part_HLD in past_HLD)
        keys = torch.arange(oldest, sequence.start + sequence.count, device=q_THD.device)
        mask_TL = (keys <= rows.unsqueeze(1)) & (keys >= first_seen(rows).unsqueeze(1))
        outputs.append(
            attend(q_THD, torch.cat((k_past, k_THD)), torch.cat((v_past, v_THD)), mask_TL)
        )
    return torch.cat(outputs)


def full_attention(
    q_THD: Tensor,
    name: str,
    context: StepContext,
    scale: float,
) -> Tensor:
    """`paged_attention` over all tokens of the sequences, whether or not this rank caches all of them."""
    cache, batch = context.cache, context.batch
    if cache.context_parallel.world_size == 1:
        return paged_attention(q_THD, cache, name, batch, scale)
    return shared_attention(q_THD, cache, name, batch, scale=scale, groups=context.groups)


class HeadProjections:
    """The weights of grouped-query attention for a rank's heads."""

    def __init__(self, weights: RankWeights, name: str) -> None:
        config, share = weights.config, weights.share
        self.dim, hidden = config.head_dim, config.hidden_size
        self.counts = (len(share.q_heads), len(share.kv_heads), len(share.kv_heads))
        q_width, kv_width = (count * self.dim for count in (config.num_heads, config.num_kv_heads))
        self.qkv = torch.cat(
            [
                weights.rows(f"{name}.{each}_proj.weight", (width, hidden), heads, self.dim)
                for each, width, heads in (
                    ("q", q_width, share.q_heads),
                    ("k", kv_width, share.kv_heads),
                    ("v", kv_width, share.kv_heads),
                )
            ]
        )
        shape = (hidden, q_width)
        self.o = weights.columns(f"{name}.o_proj.weight", shape, share.q_heads, self.dim)

    def __call__(self, x_TE: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, `[T, H, D]` each."""
        return self._project(x_TE, 0, 3)

    def queries(self, x_TE: Tensor) -> Tensor:
        """`[T, H, D]`."""
        return self._project(x_TE, 0, 1)[0]

    def keys_and_values(self, x_ME: Tensor) -> tuple[Tensor, ...]:
        """`[M, H, D]` each."""
        return self._project(x_ME, 1, 3)

    def _project(self, x_TE: Tensor, first: int, stop: int) -> tuple[Tensor, ...]:
        heads = range(sum(self.counts[:first]), sum(self.counts[:stop]))
        weight = self.qkv[heads.start * self.dim : heads.stop * self.dim]
        projected_THD = F.linear(x_TE, weight).unflatten(1, (len(heads), self.dim))
        return tuple(projected_THD.split(self.counts[first:stop], dim=1))

    def out(self, out_THD: Tensor) -> Tensor:
        """Return this rank's partial sum, `[T, E]`."""
        return F.linear(out_THD.flatten(1), self.o)


class GroupedAttention:
    """Causal attention of a decoder's tokens to its own; the caller all-reduces the result."""

    def __init__(self, weights: RankWeights, layer: int) -> None:
        mixer, kinds = weights.config.mixer, weights.config.layer_kinds
        self.name = cache_name(layer, "full")
        self.heads = HeadProjections(weights, self.name)
        local: dict[LayerKind, FirstSeen] = {
            "window": first_of_window(mixer.sliding_window),
            "chunk": first_of_chunk(mixer.attention_chunk),
        }
        self.first_seen = local.get(kinds[layer])

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """Cache this step's K and V and attend. Returns this rank's partial sum, `[T, E]`."""
        batch, cache = context.batch, context.cache
        q_THD, k_THD, v_THD = self.heads(x_TE)
        q_THD = context.rotary(q_THD, batch.positions_T)
        k_THD = context.rotary(k_THD, batch.positions_T)
        cache.write(self.name, (k_THD, v_THD), batch.slots[cache.group_of[self.name]])
        if self.first_seen is None:
            out_THD = full_attention(q_THD, self.name, context, self.heads.dim**-0.5)
        else:
            values = (q_THD, k_THD, v_THD)
            out_THD = local_attention(values, cache, self.name, batch, self.first_seen)
        return self.heads.out(out_THD)


class EncoderAttention:
    """Attention among all tokens of an encoder's input, which one step encodes: nothing is cached."""

    def __init__(self, weights: RankWeights, layer: int) -> None:
        self.heads = HeadProjections(weights, cache_name(layer, "full"))

    def __call__(self, x_ME: Tensor, context: StepContext) -> Tensor:
        """This rank's partial sum, `[M, E]`."""
        q_MHD, k_MHD, v_MHD = self.heads(x_ME)
        q_MHD = context.rotary(q_MHD, context.batch.encoder_positions_M)
        k_MHD = context.rotary(k_MHD, context.batch.encoder_positions_M)
        outputs = [
            attend(q_MHD[rows], k_MHD[rows], v_MHD[rows]) for rows in context.batch.encoder_rows
        ]
        return self.heads.out(torch.cat(outputs))


class CrossAttention:
    """Attention of a decoder's tokens to the encoder's output, whose K and V are cached when it is encoded."""

    def __init__(self, weights: RankWeights, layer: int) -> None:
        self.name = cache_name(layer, "cross")
        self.eps = weights.config.norm_eps
        self.norm = weights.whole(f"{self.name}.encoder_norm.weight", weights.config.hidden_size)
        self.heads = HeadProjections(weights, self.name)

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """Cache K and V of newly encoded tokens, and attend. Returns this rank's partial sum, `[T, E]`."""
        cache = context.cache
        encoded_ME = context.encoded_ME
        if len(encoded_ME):
            normed_ME = F.rms_norm(encoded_ME, encoded_ME.shape[1:], self.norm, self.eps)
            slots = context.batch.slots[cache.group_of[self.name]]
            cache.write(self.name, self.heads.keys_and_values(normed_ME), slots)
        q_THD = self.heads.queries(x_TE)
        outputs = []
        for sequence in context.batch.sequences:
            block_ids = cache.block_ids(self.name, sequence.block_ids)
            k_HLD, v_HLD = cache.read(self.name, block_ids, range(sequence.num_encoder_tokens))
            own = q_THD[sequence.first : sequence.first + sequence.count]
            outputs.append(attend(own, k_HLD.transpose(0, 1), v_HLD.transpose(0, 1)))
        return self.heads.out(torch.cat(outputs))


class LatentAttention:
    """MLA-like attention in absorbed form: queries are taken into the latent space that the cache holds.

    The cache stores, once for all heads and on every tensor rank, `[latent (C - rope), rotary key (rope)]`.
    """

    def __init__(self, weights: RankWeights, layer: int) -> None:
        config, share = weights.config, weights.share
        self.name, self.config, self.share = cache_name(layer, "full"), config, share
        name = f"{self.name}."
        hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        rank, rope = config.mixer.latent_rank, config.mixer.rope_dim
        q_shape, kv_b_shape = (heads * (dim + rope), hidden), (heads * 2 * dim, rank)
        self.q = weights.rows(name + "q_proj.weight", q_shape, share.q_heads, dim + rope)
        self.kv_a = weights.whole(name + "kv_a_proj_with_mqa.weight", rank + rope, hidden)
        self.kv_a_norm = weights.whole(name + "kv_a_layernorm.weight", rank)
        kv_b = weights.rows(name + "kv_b_proj.weight", kv_b_shape, share.q_heads, 2 * dim)
        self.k_up_HDC, self.v_up_HDC = kv_b.unflatten(0, (-1, 2 * dim)).split(dim, dim=1)
        o_shape = (hidden, heads * dim)
        self.o = weights.columns(name + "o_proj.weight", o_shape, share.q_heads, dim)

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """Cache this step's latent and attend. Returns this rank's partial sum, `[T, E]`."""
        batch, cache = context.batch, context.cache
        cached_THC = self.latents(F.linear(x_TE, self.kv_a), batch.positions_T, context.rotary)
        cache.write(self.name, (cached_THC,), batch.slots[cache.group_of[self.name]])
        q_THC = self.queries(x_TE, batch.positions_T, context.rotary)
        return self.out(full_attention(q_THC, self.name, context, self.scale))

    @property
    def scale(self) -> float:
        """The factor of attention scores."""
        return float((self.config.head_dim + self.config.mixer.rope_dim) ** -0.5)

    def latents(self, projected_TC: Tensor, positions_T: Tensor, rotary: Rotary) -> Tensor:
        """Return what the cache holds at these positions, `[T, 1, C]`."""
        config = self.config
        latent_TC, rope_key_TC = projected_TC.split(
            (config.mixer.latent_rank, config.mixer.rope_dim), dim=1
        )
        latent_TC = F.rms_norm(latent_TC, latent_TC.shape[1:], self.kv_a_norm, config.norm_eps)
        rope_key_THC = rotary(rope_key_TC.unsqueeze(1), positions_T)
        return torch.cat((latent_TC.unsqueeze(1), rope_key_THC), dim=-1)

    def queries(self, x_TE: Tensor, positions_T: Tensor, rotary: Rotary) -> Tensor:
        """Return this rank's queries in the latents' space, `[T, H, C]`."""
        config = self.config
        width = config.head_dim + config.mixer.rope_dim
        q_THD = F.linear(x_TE, self.q).unflatten(1, (len(self.share.q_heads), width))
        plain_THD, rope_THD = q_THD.split((config.head_dim, config.mixer.rope_dim), dim=-1)
        absorbed_THC = torch.einsum("thd,hdc->thc", plain_THD, self.k_up_HDC)
        return torch.cat((absorbed_THC, rotary(rope_THD, positions_T)), dim=-1)

    def out(self, out_THC: Tensor) -> Tensor:
        """Return this rank's partial sum of the attended latents, `[T, E]`."""
        rank = self.config.mixer.latent_rank
        out_THD = torch.einsum("thc,hdc->thd", out_THC[..., :rank], self.v_up_HDC)
        return F.linear(out_THD.flatten(1), self.o)
