"""One rank's share of the model: Llama-like (GQA, SwiGLU, RoPE) or with an MLA-like latent cache. Float32.

Legend: T tokens of a step, E hidden size, H heads, D head dim, C latent cache dim, L tokens of one sequence,
V vocabulary, S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.config import ModelConfig
from minillm.messages import SampledToken, SequenceInput
from minillm.paged_cache import PagedCache
from minillm.parallel import Communicator
from minillm.partition import RankShare
from minillm.weights import WeightSource


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's rows `[first, first + count)` of a batch; its first row is at position `start`."""

    first: int
    count: int
    start: int
    block_ids: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """A step as tensors. `slots` are (block id, offset) per token; `sample_rows` those to sample after."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots: tuple[Tensor, Tensor]
    sequences: tuple[SequenceSlice, ...]
    sample_rows: Tensor

    @classmethod
    def build(cls, inputs: Sequence[SequenceInput], *, block_size: int, device: str) -> Batch:
        """Concatenate the sequences of a step."""
        sequences, positions, block_of, sample_rows = [], [], [], []
        first = 0
        for item in inputs:
            count = len(item.token_ids)
            blocks = torch.tensor(item.block_ids, dtype=torch.int64)
            position = torch.arange(item.start, item.start + count)
            sequences.append(SequenceSlice(first, count, item.start, blocks.to(device)))
            positions.append(position)
            block_of.append(blocks[position // block_size])
            first += count
            if item.sample:
                sample_rows.append(first - 1)
        positions_T = torch.cat(positions)
        return cls(
            token_ids_T=torch.tensor([t for item in inputs for t in item.token_ids], device=device),
            positions_T=positions_T.to(device),
            slots=(torch.cat(block_of).to(device), (positions_T % block_size).to(device)),
            sequences=tuple(sequences),
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        )


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
        used_blocks = sequence.block_ids[: -(-stop // cache.block_size)]
        parts_HLD = cache.read(layer, used_blocks, stop)
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


def _rows(weight: Tensor, heads: range, width: int) -> Tensor:
    return weight[heads.start * width : heads.stop * width]


class GroupedAttention:
    """Grouped-query attention over this rank's heads; the caller all-reduces the result."""

    def __init__(
        self, config: ModelConfig, share: RankShare, layer: int, source: WeightSource, device: str
    ) -> None:
        self.layer, self.share, self.dim = layer, share, config.head_dim
        name = f"model.layers.{layer}.self_attn."
        q_shape = (config.num_heads * config.head_dim, config.hidden_size)
        kv_shape = (config.num_kv_heads * config.head_dim, config.hidden_size)
        o_shape = (config.hidden_size, config.num_heads * config.head_dim)
        q = _rows(source(name + "q_proj.weight", q_shape), share.q_heads, self.dim)
        k = _rows(source(name + "k_proj.weight", kv_shape), share.kv_heads, self.dim)
        v = _rows(source(name + "v_proj.weight", kv_shape), share.kv_heads, self.dim)
        self.qkv = torch.cat((q, k, v)).to(device)
        o = _rows(source(name + "o_proj.weight", o_shape).T, share.q_heads, self.dim)
        self.o = o.T.contiguous().to(device)

    def __call__(self, x_TE: Tensor, batch: Batch, cache: PagedCache, rotary: Rotary) -> Tensor:
        """Cache this step's K and V and attend. Returns this rank's partial sum, `[T, E]`."""
        counts = (len(self.share.q_heads), len(self.share.kv_heads), len(self.share.kv_heads))
        qkv_THD = F.linear(x_TE, self.qkv).unflatten(1, (sum(counts), self.dim))
        q_THD, k_THD, v_THD = qkv_THD.split(counts, dim=1)
        q_THD, k_THD = rotary(q_THD, batch.positions_T), rotary(k_THD, batch.positions_T)
        cache.write(self.layer, (k_THD, v_THD), batch.slots)
        out_THD = paged_attention(q_THD, cache, self.layer, batch, self.dim**-0.5)
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
        rank, rope = config.latent_rank, config.rope_dim
        q = source(name + "q_proj.weight", (heads * (dim + rope), hidden))
        self.q = _rows(q, share.q_heads, dim + rope).contiguous().to(device)
        self.kv_a = source(name + "kv_a_proj_with_mqa.weight", (rank + rope, hidden)).to(device)
        self.kv_a_norm = source(name + "kv_a_layernorm.weight", (rank,)).to(device)
        kv_b = source(name + "kv_b_proj.weight", (heads * 2 * dim, rank))
        kv_b_HDC = _rows(kv_b, share.q_heads, 2 * dim).unflatten(0, (-1, 2 * dim)).to(device)
        self.k_up_HDC, self.v_up_HDC = kv_b_HDC.split(dim, dim=1)
        o = _rows(source(name + "o_proj.weight", (hidden, heads * dim)).T, share.q_heads, dim)
        self.o = o.T.contiguous().to(device)

    def __call__(self, x_TE: Tensor, batch: Batch, cache: PagedCache, rotary: Rotary) -> Tensor:
        """Cache this step's latent and attend. Returns this rank's partial sum, `[T, E]`."""
        config = self.config
        latent_TC, rope_key_TC = F.linear(x_TE, self.kv_a).split(
            (config.latent_rank, config.rope_dim), dim=1
        )
        latent_TC = F.rms_norm(latent_TC, latent_TC.shape[1:], self.kv_a_norm, config.norm_eps)
        rope_key_THC = rotary(rope_key_TC.unsqueeze(1), batch.positions_T)
        cached_THC = torch.cat((latent_TC.unsqueeze(1), rope_key_THC), dim=-1)
        cache.write(self.layer, (cached_THC,), batch.slots)
        width = config.head_dim + config.rope_dim
        q_THD = F.linear(x_TE, self.q).unflatten(1, (len(self.share.q_heads), width))
        plain_THD, rope_THD = q_THD.split((config.head_dim, config.rope_dim), dim=-1)
        absorbed_THC = torch.einsum("thd,hdc->thc", plain_THD, self.k_up_HDC)
        q_THC = torch.cat((absorbed_THC, rotary(rope_THD, batch.positions_T)), dim=-1)
        out_THC = paged_attention(q_THC, cache, self.layer, batch, width**-0.5)
        out_THD = torch.einsum("thc,hdc->thd", out_THC[..., : config.latent_rank], self.v_up_HDC)
        return F.linear(out_THD.flatten(1), self.o)


class Mlp:
    """SwiGLU over this rank's rows; the caller all-reduces the result."""

    def __init__(
        self, config: ModelConfig, share: RankShare, layer: int, source: WeightSource, device: str
    ) -> None:
        name = f"model.layers.{layer}.mlp."
        wide = (config.intermediate_size, config.hidden_size)
        gate = _rows(source(name + "gate_proj.weight", wide), share.mlp_rows, 1)
        up = _rows(source(name + "up_proj.weight", wide), share.mlp_rows, 1)
        self.gate_up = torch.cat((gate, up)).to(device)
        down = source(name + "down_proj.weight", (config.hidden_size, config.intermediate_size))
        self.down = _rows(down.T, share.mlp_rows, 1).T.contiguous().to(device)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """This rank's partial sum, `[T, E]`."""
        gate, up = F.linear(x_TE, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class Layer:
    """Pre-norm attention and MLP with residuals."""

    def __init__(
        self, config: ModelConfig, share: RankShare, layer: int, source: WeightSource, device: str
    ) -> None:
        name, width = f"model.layers.{layer}.", (config.hidden_size,)
        self.eps = config.norm_eps
        self.input_norm = source(name + "input_layernorm.weight", width).to(device)
        self.post_norm = source(name + "post_attention_layernorm.weight", width).to(device)
        attention = LatentAttention if share.is_mla else GroupedAttention
        self.attention = attention(config, share, layer, source, device)
        self.mlp = Mlp(config, share, layer, source, device)

    def __call__(
        self, x_TE: Tensor, batch: Batch, cache: PagedCache, rotary: Rotary, groups: Communicator
    ) -> Tensor:
        """The layer's output `[T, E]`, equal on all tensor ranks."""
        normed = F.rms_norm(x_TE, x_TE.shape[1:], self.input_norm, self.eps)
        x_TE = x_TE + groups.all_reduce(self.attention(normed, batch, cache, rotary))
        normed = F.rms_norm(x_TE, x_TE.shape[1:], self.post_norm, self.eps)
        return x_TE + groups.all_reduce(self.mlp(normed))


class Stage:
    """The pipeline stage of one rank: embedding (first stage), layers, norm and vocabulary (last stage)."""

    def __init__(
        self,
        config: ModelConfig,
        share: RankShare,
        *,
        cache: PagedCache,
        groups: Communicator,
        source: WeightSource,
        device: str,
    ) -> None:
        self.config, self.share, self.cache, self.groups = config, share, cache, groups
        rotary_dim = config.rope_dim if share.is_mla else config.head_dim
        self.rotary = Rotary(rotary_dim, config.max_model_len, config.rope_theta, device)
        self.layers = [Layer(config, share, layer, source, device) for layer in share.layers]
        vocab = (config.vocab_size, config.hidden_size)
        if share.is_first_stage:
            self.embedding = source("model.embed_tokens.weight", vocab).to(device)
        if share.is_last_stage:
            self.norm = source("model.norm.weight", (config.hidden_size,)).to(device)
            head = _rows(source("lm_head.weight", vocab), share.vocab_rows, 1)
            self.head = head.contiguous().to(device)

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[SampledToken]:
        """One step. Mutates the cache; the last stage returns a greedy token per sample row, others nothing."""
        if self.share.is_first_stage:
            x_TE = self.embedding[batch.token_ids_T]
        else:
            x_TE = self.groups.recv_forward(len(batch.token_ids_T), self.config.hidden_size)
        for layer in self.layers:
            x_TE = layer(x_TE, batch, self.cache, self.rotary, self.groups)
        if not self.share.is_last_stage:
            self.groups.send_forward(x_TE)
            return []
        if not len(batch.sample_rows):
            return []
        best = self._logits(x_TE[batch.sample_rows]).log_softmax(dim=-1).max(dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [SampledToken(token_id, logprob) for token_id, logprob in pairs]

    def _logits(self, x_SE: Tensor) -> Tensor:
        """Logits `[samples, V]`. Each rank fills its rows of the vocabulary; the sum with zeros is exact."""
        normed = F.rms_norm(x_SE, x_SE.shape[1:], self.norm, self.config.norm_eps)
        logits_SV = torch.zeros(len(x_SE), self.config.vocab_size, device=x_SE.device)
        rows = self.share.vocab_rows
        logits_SV[:, rows.start : rows.stop] = F.linear(normed, self.head)
        return self.groups.all_reduce(logits_SV)
