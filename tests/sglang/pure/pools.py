"""Pools as SGLang lays them out, and their listing in `KVArgs`, without SGLang.

Each element's value encodes its part, layer, head, token or channel, so that a rank of any engine can tell what it must
have after a load.
"""

from types import SimpleNamespace

import torch

from kvconnector.integrations.sglang.caches import Shape
from kvconnector.integrations.sglang.metadata import (
    MASKS,
    NEEDED_SEEDS,
    OWN_COLUMNS,
    ROOM,
    NamedPointers,
)

HEAD_DIM = 8
NUM_SLOTS = 6
NUM_ROWS = 5
ROW_WIDTHS = (16, 3, 40, 8, 8, 8)
SEED_WIDTHS = (64, 128, 96)
"""What a draft model needs: probabilities, tokens and a hidden state, of which 64 bytes are there without it."""
ROOM_WIDTH = 64
COLUMNS = (
    *(name for name in OWN_COLUMNS if name not in (*MASKS, ROOM)),
    *NEEDED_SEEDS,
    ROOM,
)
"""Their names, in the order of SGLang 0.5.23."""
CONV_GROUPS = (12, 12, 24)
CONV_WIDTH = 3
STATE_HEADS = 12
STATE_DIMS = (2, 4)
DTYPE = torch.int32


class Model:
    """The model of both engines. `windows` are layers with a sliding window, `states` layers with a recurrent state."""

    def __init__(
        self, *, layers=4, heads=4, latent=False, windows=(), states=(), window_tokens=0, draft=0
    ):
        self.layers = layers
        self.heads = 1 if latent else heads
        self.latent = latent
        self.windows, self.states = windows, states
        self.window_tokens = window_tokens
        self.draft = draft

    def code(self, part, layer, outer, inner):
        """Return a different value for each element."""
        return ((((part * 16 + layer) * 4096) + outer) * 64 + inner).to(DTYPE)


class Pools:
    """One rank's tensors and its `KVArgs`."""

    head_dim = HEAD_DIM

    def __init__(
        self,
        model,
        *,
        rank,
        tp_size,
        pp_size,
        is_prefill,
        page_size,
        num_pages=24,
        draft=None,
        replica=0,
    ):
        self.model, self.page_size = model, page_size
        num_drafts = model.draft if draft is None else draft
        self.has_draft = num_drafts > 0
        pp_rank, tp_rank = rank
        per_stage = model.layers // pp_size
        stage = range(pp_rank * per_stage, (pp_rank + 1) * per_stage)
        self.shape = Shape(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            is_prefill=is_prefill,
            replica=replica,
            num_layers=model.layers,
            kv_heads=model.heads,
            window_heads=model.heads,
            kv_layers=[each for each in stage if each not in {*model.windows, *model.states}],
            window_layers=[each for each in stage if each in model.windows],
            has_latent=model.latent,
            device="cpu",
            dtype="int32",
        )
        self.heads = self.shape.cut(model.heads).held
        rows = num_pages * page_size
        parts = 1 if model.latent else 2
        self.kv = self._pages(self.shape.kv_layers, parts, rows)
        self.draft = self._pages(range(model.layers, model.layers + num_drafts), parts, rows)
        self.window = self._pages(self.shape.window_layers, 2, rows)
        stateful = [each for each in stage if each in model.states]
        conv = (NUM_SLOTS, sum(CONV_GROUPS) // tp_size, CONV_WIDTH)
        self.conv = {layer: torch.zeros(conv, dtype=DTYPE) for layer in stateful}
        temporal = (NUM_SLOTS, STATE_HEADS // tp_size, *STATE_DIMS)
        self.temporal = {layer: torch.zeros(temporal, dtype=DTYPE) for layer in stateful}
        seeds = (*SEED_WIDTHS[:2], SEED_WIDTHS[2] if self.has_draft else 64)
        widths = (*ROW_WIDTHS, *seeds, ROOM_WIDTH)
        self.aux = [torch.zeros(NUM_ROWS, width, dtype=torch.uint8) for width in widths]
        self.args = self._listed()

    def _pages(self, layers, parts, rows):
        shape = (rows, len(self.heads), self.head_dim)
        return [{layer: torch.zeros(shape, dtype=DTYPE) for layer in layers} for _ in range(parts)]

    def _listed(self):
        def columns(tensors, item_rows):
            return (
                [tensor.data_ptr() for tensor in tensors],
                [tensor.nbytes for tensor in tensors],
                [tensor[0].nbytes * item_rows for tensor in tensors],
            )

        def flat(parts):
            return [tensor for part in parts for tensor in part.values()]

        args = SimpleNamespace(page_size=self.page_size, num_draft_entries=len(flat(self.draft)))
        args.state_types, states = [], []
        if self.model.windows:
            args.state_types.append("swa")
            states.append(columns(flat(self.window), self.page_size))
        tensors = [*self.conv.values(), *self.temporal.values()]
        if self.model.states:
            args.state_types.append("mamba")
            states.append(columns(tensors, 1))
        args.state_data_ptrs, args.state_data_lens, args.state_item_lens = (
            list(map(list, zip(*states, strict=True))) if states else ([], [], [])
        )
        cuts = [tensor.shape[1] for tensor in tensors]
        groups = [list(CONV_GROUPS)] * len(self.conv) + [None] * len(self.temporal)
        empty = [[]] * (len(states) - bool(self.model.states))
        args.state_dim_per_tensor = [*empty, cuts]
        args.state_slice_outer_counts = [*empty, [1] * len(tensors)]
        args.state_conv_shard_groups = [*empty, groups]
        args.state_layer_ids = [*empty, [*self.conv, *self.temporal]]
        args.swa_kv_cache_layout = "nhd"
        listed = [layer for part in (*self.kv, *self.draft) for layer in part]
        args.kv_layer_ids = listed * bool(self.model.states)
        kv = columns(flat(self.kv) + flat(self.draft), self.page_size)
        args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = kv
        pointers, args.aux_data_lens, args.aux_item_lens = columns(self.aux, 1)
        args.aux_data_ptrs = NamedPointers(pointers, COLUMNS)
        return args

    def rows_of(self, pages, first_token, tokens):
        """Return the rows of these tokens, if the pages begin with the page of `first_token`."""
        base = first_token // self.page_size
        return [
            pages[token // self.page_size - base] * self.page_size + token % self.page_size
            for token in tokens
        ]

    def expected_pages(self, part, layer, tokens):
        """Return the values of these tokens on this rank, `[token, head, dim]`."""
        heads = torch.tensor([*self.heads]).view(-1, 1) * self.head_dim
        tokens = torch.tensor([*tokens], dtype=torch.int64).view(-1, 1, 1)
        return self.model.code(part, layer, tokens, heads + torch.arange(self.head_dim))

    def expected_conv(self, layer):
        """Return this rank's channels, group after group."""
        channels = torch.arange(sum(CONV_GROUPS)).split(CONV_GROUPS)
        own = [group.chunk(self.shape.tp_size)[self.shape.tp_rank] for group in channels]
        return self.model.code(8, layer, torch.cat(own).view(-1, 1), torch.arange(CONV_WIDTH))

    def expected_temporal(self, layer):
        """Return this rank's state heads."""
        own = torch.arange(STATE_HEADS).chunk(self.shape.tp_size)[self.shape.tp_rank]
        inner = torch.arange(STATE_DIMS[0] * STATE_DIMS[1])
        return self.model.code(9, layer, own.view(-1, 1), inner).view(-1, *STATE_DIMS)

    def write_tokens(self, caches, pages, tokens, part_base=0, first_token=0):
        """Write tokens as a model's forward pass would."""
        rows = self.rows_of(pages, first_token, tokens)
        for part, layers in enumerate(caches):
            for layer, tensor in layers.items():
                tensor[rows] = self.expected_pages(part_base + part, layer, tokens)

    def write_end(self, slot, row, token):
        """Write states, and a row of metadata whose first byte is the token."""
        for layer, tensor in self.conv.items():
            tensor[slot] = self.expected_conv(layer)
        for layer, tensor in self.temporal.items():
            tensor[slot] = self.expected_temporal(layer)
        for number, tensor in enumerate(self.aux):
            tensor[row] = torch.arange(tensor.shape[1]) + token + number
