"""A Mamba-2-like recurrent layer: a short causal convolution before a gated linear recurrence. Float32.

Legend: T tokens of a step, E hidden size, H heads, P head dim, N state dim, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention import StepContext
from minillm.batch import SequenceSlice
from minillm.cache_groups import cache_name
from minillm.paged_cache import PagedCache
from minillm.weights import RankWeights

CHUNK_TOKENS = 64
DECAY_OFFSET = 3.0
"""Makes a token's weight fall by about 5% with each later one, so that a state depends on dozens of tokens."""


class StateMixer:
    """`S_t = a_t S_(t-1) + b_t u_t'`, `y_t = c_t' S_t` per head, over this rank's heads; the caller all-reduces.

    The cache holds the convolution's last inputs and the state `S [N, P]`, one of each per block of a sequence: a block
    that the sequence has left stays as it was after its last token.
    """

    def __init__(self, weights: RankWeights, layer: int) -> None:
        config, own = weights.config, weights.share.state_heads
        self.name, self.config, self.heads = cache_name(layer, "state"), config, len(own)
        name = f"{self.name}."
        hidden, dim, rank = config.hidden_size, config.head_dim, config.mixer.state_dim
        # per head: gate and input [P], b and c [N], decay [1]
        self.widths = {"gate": dim, "in": dim, "b": rank, "c": rank, "decay": 1}
        self.projections = [
            weights.rows(
                f"{name}{each}_proj.weight", (config.num_heads * width, hidden), own, width
            )
            for each, width in self.widths.items()
        ]
        conv_shape = (config.num_heads * dim, config.mixer.conv_width)
        self.conv = weights.rows(name + "conv.weight", conv_shape, own, dim).unsqueeze(1)
        o_shape = (hidden, config.num_heads * dim)
        self.o = weights.columns(name + "o_proj.weight", o_shape, own, dim)

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """Advance every sequence's state. Returns this rank's partial sum, `[T, E]`."""
        gate, u, b, c, decay = (
            F.linear(x_TE, weight).unflatten(1, (self.heads, width))
            for weight, width in zip(self.projections, self.widths.values(), strict=True)
        )
        log_a_TH = -F.softplus(decay.squeeze(2) - DECAY_OFFSET)
        outputs = []
        for sequence in context.batch.sequences:
            for own, conv_part, state_part in self._blocks(sequence, context.cache):
                u_THP = self._convolve(u[own], conv_part)
                shape = (self.config.mixer.state_dim, self.config.head_dim)
                state_HNP = state_part.unflatten(1, shape)
                outputs.append(scan(u_THP, b[own], c[own], log_a_TH[own], state_HNP))
        y_THP = F.rms_norm(torch.cat(outputs), (self.config.head_dim,), eps=self.config.norm_eps)
        return F.linear((y_THP * F.silu(gate)).flatten(1), self.o)

    def _blocks(
        self, sequence: SequenceSlice, cache: PagedCache
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield a sequence's rows by block, with the block's parts `[H, width]`: the state before these rows."""
        group = cache.group_of[self.name]
        block_size = cache.groups[group].block_size
        block_ids = sequence.block_ids[group].tolist()
        parts = cache.parts[self.name]
        start, stop = sequence.start, sequence.start + sequence.count
        while start < stop:
            index = start // block_size
            end = min(stop, (index + 1) * block_size)
            if start == 0:
                # the block may have been another request's
                for part in parts:
                    part[block_ids[0]].zero_()
            elif start % block_size == 0:
                for part in parts:
                    part[block_ids[index]] = part[block_ids[index - 1]]
            rows = slice(
                sequence.first + start - sequence.start, sequence.first + end - sequence.start
            )
            conv_part, state_part = (part[block_ids[index], :, 0] for part in parts)
            yield rows, conv_part, state_part
            start = end

    def _convolve(self, u_THP: Tensor, kept: Tensor) -> Tensor:
        """Convolve each channel causally, then apply SiLU. Mutates `kept [H, (width - 1) * P]`, the last inputs."""
        past = kept.unflatten(1, (-1, self.config.head_dim)).transpose(0, 1)
        line_LHP = torch.cat((past, u_THP))
        kept.copy_(line_LHP[len(u_THP) :].transpose(0, 1).flatten(1))
        mixed = F.conv1d(line_LHP.flatten(1).T.unsqueeze(0), self.conv, groups=len(self.conv))
        return F.silu(mixed[0].T.unflatten(1, (self.heads, -1)))


def scan(
    u_THP: Tensor, b_THN: Tensor, c_THN: Tensor, log_a_TH: Tensor, state_HNP: Tensor
) -> Tensor:
    """Process all tokens of one sequence, a chunk at a time. Mutates the state; returns `[T, H, P]`.

    Inside a chunk, token i sees token j <= i with the weight `c_i' b_j a_(j+1) ... a_i`, as attention without softmax.
    """
    outputs = []
    for first in range(0, len(u_THP), CHUNK_TOKENS):
        own = slice(first, first + CHUNK_TOKENS)
        u_HCP, b_HCN, c_HCN = (x[own].transpose(0, 1) for x in (u_THP, b_THN, c_THN))
        sum_HC = log_a_TH[own].T.cumsum(1)
        gap_HCC = sum_HC.unsqueeze(2) - sum_HC.unsqueeze(1)
        causal = torch.ones(gap_HCC.shape[1:], dtype=torch.bool, device=u_THP.device).tril()
        # above the diagonal the gap is positive and could overflow
        weight_HCC = gap_HCC.masked_fill(~causal, -torch.inf).exp()
        scores_HCC = (c_HCN @ b_HCN.transpose(1, 2)) * weight_HCC
        from_state_HCP = (c_HCN @ state_HNP) * sum_HC.exp().unsqueeze(2)
        outputs.append((scores_HCC @ u_HCP + from_state_HCP).transpose(0, 1))
        left_HC = (sum_HC[:, -1:] - sum_HC).exp()
        added_HNP = (b_HCN * left_HC.unsqueeze(2)).transpose(1, 2) @ u_HCP
        state_HNP.mul_(sum_HC[:, -1].exp()[:, None, None]).add_(added_HNP)
    return torch.cat(outputs)
