"""One rank's share of the model, Llama-like (GQA, SwiGLU, RoPE), also with MLA, windows, chunks, states, compressed
rows or an encoder. Float32.

Legend: T tokens of a step, M tokens that its encoder encodes, E hidden size, V vocabulary, S samples.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention import (
    CrossAttention,
    EncoderAttention,
    GroupedAttention,
    LatentAttention,
    Rotary,
    StepContext,
)
from minillm.batch import Batch
from minillm.compressed_attention import CompressedAttention
from minillm.messages import SampledToken
from minillm.paged_cache import PagedCache
from minillm.parallel import ProcessGroups
from minillm.state_mixer import StateMixer
from minillm.weights import RankWeights


class Mlp:
    """SwiGLU over this rank's rows; the caller all-reduces the result."""

    def __init__(self, weights: RankWeights, layer: int) -> None:
        config, own = weights.config, weights.share.mlp_rows
        name = f"model.layers.{layer}.mlp."
        wide = (config.intermediate_size, config.hidden_size)
        gate, up = (weights.rows(f"{name}{each}_proj.weight", wide, own) for each in ("gate", "up"))
        self.gate_up = torch.cat((gate, up))
        self.down = weights.columns(name + "down_proj.weight", wide[::-1], own)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """This rank's partial sum, `[T, E]`."""
        gate, up = F.linear(x_TE, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


OwnMixer = LatentAttention | GroupedAttention | StateMixer | EncoderAttention | CompressedAttention
Mixer = OwnMixer | CrossAttention


class Layer:
    """Pre-norm attention, or a recurrent mixer, then cross-attention in a decoder, and MLP, with residuals."""

    def __init__(self, weights: RankWeights, layer: int) -> None:
        config = weights.config
        kind = config.layer_kinds[layer]
        self.is_encoder = kind == "encoder"
        self.eps = config.norm_eps
        mixer: type[OwnMixer]
        mixer = LatentAttention if weights.share.is_mla else GroupedAttention
        if kind in ("state", "encoder"):
            mixer = StateMixer if kind == "state" else EncoderAttention
        if kind in ("fine", "coarse"):
            mixer = CompressedAttention
        mixers: dict[str, Mixer] = {"input": mixer(weights, layer)}
        if kind == "decoder":
            mixers["cross"] = CrossAttention(weights, layer)
        name, hidden = f"model.layers.{layer}.", config.hidden_size
        self.mixers = [
            (weights.whole(f"{name}{norm}_layernorm.weight", hidden), mixer)
            for norm, mixer in mixers.items()
        ]
        self.post_norm = weights.whole(name + "post_attention_layernorm.weight", hidden)
        self.mlp = Mlp(weights, layer)

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """The layer's output `[T, E]`, or the encoder's `[M, E]`, equal on all tensor ranks."""
        for norm, mixer in self.mixers:
            normed = F.rms_norm(x_TE, x_TE.shape[1:], norm, self.eps)
            x_TE = x_TE + context.groups.all_reduce(mixer(normed, context))
        normed = F.rms_norm(x_TE, x_TE.shape[1:], self.post_norm, self.eps)
        return x_TE + context.groups.all_reduce(self.mlp(normed))


def _tell_nobody(layer: int) -> None:
    """The engine has no connector."""


class Stage:
    """The pipeline stage of one rank: embedding (first stage), layers, norm and vocabulary (last stage)."""

    def __init__(self, weights: RankWeights, cache: PagedCache, groups: ProcessGroups) -> None:
        self.config, self.share = config, share = weights.config, weights.share
        self.cache, self.groups = cache, groups
        rotary_dim = config.mixer.rope_dim if share.is_mla else config.head_dim
        longest = max(config.max_model_len, config.mixer.max_encoder_len)
        self.rotary = Rotary(rotary_dim, longest, config.rope_theta, weights.device)
        self.layers = [Layer(weights, layer) for layer in share.layers]
        vocab = (config.vocab_size, config.hidden_size)
        if share.is_first_stage:
            self.embedding = weights.whole("model.embed_tokens.weight", *vocab)
        if share.is_last_stage:
            self.norm = weights.whole("model.norm.weight", config.hidden_size)
            self.head = weights.rows("lm_head.weight", vocab, share.vocab_rows)

    @torch.inference_mode()
    def run(
        self, batch: Batch, layer_written: Callable[[int], None] = _tell_nobody
    ) -> list[SampledToken]:
        """Run one step. Mutates the cache; calls `layer_written` after each layer. The last stage returns the likeliest
        tokens of each sample row, in order; other stages return nothing.
        """
        token_ids = torch.cat((batch.token_ids_T, batch.encoder_token_ids_M))
        if self.share.is_first_stage:
            rows = self.embedding[token_ids]
        else:
            rows = self.groups.recv_forward(len(token_ids), self.config.hidden_size)
        num_tokens = len(batch.token_ids_T)
        x_TE, encoded_ME = rows[:num_tokens], rows[num_tokens:]
        for index, layer in zip(self.share.layers, self.layers, strict=True):
            context = StepContext(batch, self.cache, self.rotary, self.groups, encoded_ME)
            if not layer.is_encoder:
                x_TE = layer(x_TE, context)
            elif len(encoded_ME):
                encoded_ME = layer(encoded_ME, context)
            layer_written(index)
        if not self.share.is_last_stage:
            self.groups.send_forward(torch.cat((x_TE, encoded_ME)))
            return []
        if not len(batch.sample_rows):
            return []
        logprobs_SV = self._logits(x_TE[batch.sample_rows]).log_softmax(dim=-1)
        best = logprobs_SV.topk(max(batch.num_samples), dim=-1)
        samples = zip(batch.num_samples, best.indices.tolist(), best.values.tolist(), strict=True)
        return [
            SampledToken(token_id, logprob)
            for count, token_ids, logprobs in samples
            for token_id, logprob in zip(token_ids[:count], logprobs[:count], strict=True)
        ]

    def _logits(self, x_SE: Tensor) -> Tensor:
        """Logits `[samples, V]`. Each rank fills its rows of the vocabulary; the sum with zeros is exact."""
        normed = F.rms_norm(x_SE, x_SE.shape[1:], self.norm, self.config.norm_eps)
        logits_SV = torch.zeros(len(x_SE), self.config.vocab_size, device=x_SE.device)
        rows = self.share.vocab_rows
        logits_SV[:, rows.start : rows.stop] = F.linear(normed, self.head)
        return self.groups.all_reduce(logits_SV)
