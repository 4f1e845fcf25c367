"""Attention to a window of latents and to rows that each stand for several tokens, as in DeepSeek-V4. Float32.

Every layer caches a window of latents, as MLA has them. Beside it a *compressor* keeps an input of each recent token,
and closes a row with every `m`-th: a latent that is the weighted sum of the inputs of its tokens. Short rows (`m` of 4)
overlap, so that a row also has the tokens of the one before it, and have an index key: a query sees the few rows whose
keys fit its own best. Long rows (`m` of 16) do not overlap, and a query sees all of them. Tokens after the last whole
row are in the window alone, until their inputs close the next row: a wrong input is a wrong token later.

Legend: T tokens of a step, E hidden size, C latent cache dim, I index dim, S a compressor's input, R rows, L tokens of
one sequence, P tokens of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention import LatentAttention, StepContext, attend, first_of_window
from minillm.batch import SequenceSlice
from minillm.cache_groups import cache_name
from minillm.config import CompressedKind
from minillm.weights import RankWeights


class CompressedAttention(LatentAttention):
    """One layer's window, compressor and rows; with short rows also its indexer. The caller all-reduces."""

    def __init__(self, weights: RankWeights, layer: int) -> None:
        super().__init__(weights, layer)
        mixer, hidden = self.config.mixer, self.config.hidden_size
        self.is_fine = self.config.layer_kinds[layer] == "fine"
        kinds: dict[str, CompressedKind] = {
            "window": "latents",
            "rows": "fine_rows" if self.is_fine else "coarse_rows",
            "inputs": "fine_compressor" if self.is_fine else "coarse_compressor",
            "index": "fine_index",
        }
        self.names = {what: cache_name(layer, kind) for what, kind in kinds.items()}
        self.row_tokens = mixer.fine_tokens if self.is_fine else mixer.coarse_tokens
        self.span = self.row_tokens * (2 if self.is_fine else 1)
        """Number of tokens whose inputs make a row: the last ones are its own."""
        name, width = f"{self.name}.compressor.", self.config.compressed_width(kinds["inputs"])
        self.inputs = weights.whole(name + "kv_proj.weight", width, hidden)
        self.place_weights = weights.whole(name + "place.weight", 1, self.span)[0]
        self.index_q = weights.whole(name + "index_q_proj.weight", mixer.index_dim, hidden)

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """Cache latents, inputs and the rows that this step closes, and attend. Returns a partial sum, `[T, E]`."""
        positions_T, rotary = context.batch.positions_T, context.rotary
        latents_TC = self.latents(F.linear(x_TE, self.kv_a), positions_T, rotary).squeeze(1)
        inputs_TS = F.linear(x_TE, self.inputs)
        self._write("window", latents_TC, context)
        self._write("inputs", inputs_TS, context)
        self._close_rows(inputs_TS, context)
        q_THC = self.queries(x_TE, positions_T, rotary)
        index_q_TI = F.linear(x_TE, self.index_q)
        outputs = []
        for sequence in context.batch.sequences:
            own = slice(sequence.first, sequence.first + sequence.count)
            window_LC, sees_TL = self._window(latents_TC[own], sequence, context)
            rows_RC, sees_TR = self._rows(index_q_TI[own], sequence, context)
            keys_LHC = torch.cat((window_LC, rows_RC)).unsqueeze(1)
            mask_TL = torch.cat((sees_TL, sees_TR), dim=1)
            outputs.append(attend(q_THC[own], keys_LHC, keys_LHC, mask_TL, self.scale))
        return self.out(torch.cat(outputs))

    def _write(self, what: str, values_TC: Tensor, context: StepContext) -> None:
        name, cache = self.names[what], context.cache
        slots = context.batch.slots[cache.group_of[name]]
        cache.write(name, (values_TC.unsqueeze(1),), slots)

    def _read(
        self, what: str, tokens: range, sequence: SequenceSlice, context: StepContext
    ) -> Tensor:
        """Return some tokens or rows of earlier steps, or of this one once they are written, `[L, C]`."""
        name, cache = self.names[what], context.cache
        (part_HLC,) = cache.read(name, cache.block_ids(name, sequence.block_ids), tokens)
        return part_HLC[0]

    def _close_rows(self, inputs_TS: Tensor, context: StepContext) -> None:
        """Cache the rows whose last tokens this step has, and their index keys."""
        batch, dim = context.batch, self.config.cache_dim
        # what a token that closes a row writes; the slots of the others are none
        latents_TC = inputs_TS.new_zeros(len(inputs_TS), dim)
        keys_TI = inputs_TS.new_zeros(len(inputs_TS), self.config.mixer.index_dim)
        for sequence in batch.sequences:
            m, start, stop = self.row_tokens, sequence.start, sequence.start + sequence.count
            rows = range(start // m, stop // m)
            if not rows:
                continue
            first = max(0, (rows.start + 1) * m - self.span)
            own = inputs_TS[sequence.first : sequence.first + sequence.count]
            past = self._read("inputs", range(first, max(first, start)), sequence, context)
            line_LS = torch.cat((past, own))
            pooled_RS = self._pool(line_LS, first, rows)
            places = torch.arange(rows.start, rows.stop, device=own.device) * m
            latents = self.latents(pooled_RS[:, :dim], places, context.rotary).squeeze(1)
            at = places + (sequence.first - start + m - 1)
            latents_TC[at] = latents
            if self.is_fine:
                keys_TI[at] = pooled_RS[:, dim:-1]
        self._write("rows", latents_TC, context)
        if self.is_fine:
            self._write("index", keys_TI, context)

    def _pool(self, line_LS: Tensor, first: int, rows: range) -> Tensor:
        """Return the weighted sums of the inputs of each row's tokens, `[R, S]`. The line begins with token `first`."""
        device = line_LS.device
        stops = (torch.arange(rows.start, rows.stop, device=device) + 1) * self.row_tokens
        tokens_RP = stops.unsqueeze(1) - self.span + torch.arange(self.span, device=device)
        inputs_RPS = line_LS[(tokens_RP - first).clamp(min=0)]
        scores_RP = inputs_RPS[..., -1] + self.place_weights
        weights_RP = scores_RP.masked_fill(tokens_RP < 0, -torch.inf).softmax(dim=1)
        return torch.einsum("rp,rps->rs", weights_RP, inputs_RPS)

    def _window(
        self, latents_TC: Tensor, sequence: SequenceSlice, context: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Return the latents that some query's window has, and which query sees which."""
        device, first_seen = latents_TC.device, first_of_window(self.config.mixer.sliding_window)
        stop = sequence.start + sequence.count
        queries = torch.arange(sequence.start, stop, device=device)
        oldest = int(first_seen(queries[:1]))
        past = self._read("window", range(oldest, sequence.start), sequence, context)
        tokens = torch.arange(oldest, stop, device=device)
        seen = (tokens <= queries.unsqueeze(1)) & (tokens >= first_seen(queries).unsqueeze(1))
        return torch.cat((past, latents_TC)), seen

    def _rows(
        self, index_q_TI: Tensor, sequence: SequenceSlice, context: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Return all rows up to the step's end, and which query sees which: whole ones, with an index the best."""
        stop = sequence.start + sequence.count
        rows = range(stop // self.row_tokens)
        rows_RC = self._read("rows", rows, sequence, context)
        queries = torch.arange(sequence.start, stop, device=index_q_TI.device)
        numbers = torch.arange(len(rows), device=index_q_TI.device)
        seen_TR = (numbers + 1) * self.row_tokens <= (queries + 1).unsqueeze(1)
        count = self.config.mixer.index_rows
        if self.is_fine and len(rows) > count:
            keys_RI = self._read("index", rows, sequence, context)
            scores_TR = (index_q_TI @ keys_RI.T).masked_fill(~seen_TR, -torch.inf)
            best = scores_TR.topk(count, dim=1).indices
            seen_TR = seen_TR & torch.zeros_like(seen_TR).scatter(1, best, value=True)
        return rows_RC, seen_TR
