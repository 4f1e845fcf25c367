"""Pools of sparse attention as SGLang lays them out, without SGLang: DSA's indexer, and DeepSeek-V4's rows.

Two engines' pools hold unlike bytes. `moved` says, obviously rather than fast, which bytes belong to a prompt, so that
a test can compare every byte that must arrive, and every byte that must stay.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from kvconnector.integrations.sglang.caches import Shape
from kvconnector.integrations.sglang.metadata import NEEDED, NamedPointers

NUM_ROWS, ROW_WIDTHS = 4, (16, 8)
LATENT, INDEX = (576, 8), (128, 4)
WINDOW = 128


@dataclass(frozen=True)
class SparseModel:
    """DSA if `ratios` is None; layers in `shared` then use another layer's selection. Else DeepSeek-V4. `draft` layers
    of a draft model follow.
    """

    layers: int
    ratios: tuple[int, ...] | None = None
    shared: tuple[int, ...] = ()
    draft: int = 0


class SparsePools:
    """One rank's tensors, uint8 `[items, bytes]`, and its `KVArgs`.

    `ring` is the number of states in a page's ring, 16 where an engine speculates. `owners`: the layers of each stage,
    where these are ranks of context parallelism that split DSA's layers. SGLang then lists a draft model in the last.
    """

    def __init__(
        self,
        model,
        *,
        is_prefill,
        page_size,
        rank=(0, 0),
        tp_size=1,
        pp_size=1,
        ring=8,
        pages=12,
        slots=3,
        owners=None,
    ):
        self.model, self.page_size, self.ring = model, page_size, ring
        stages = owners or [each.tolist() for each in np.array_split(range(model.layers), pp_size)]
        self.layers = stages[rank[0]]
        self.drafted = range(model.layers, model.layers + model.draft)
        if owners and rank[0] < pp_size - 1:
            self.drafted = range(0)
        self._random = np.random.default_rng([1 + is_prefill, rank[0]])
        self._pages, self._slots = pages, slots
        self.args = SimpleNamespace(page_size=page_size, num_draft_entries=0, kv_layer_ids=[])
        self.args.mla_compression_ratios = model.ratios
        self.args.state_types, states = [], []
        kv = self._dsa(states) if model.ratios is None else self._compressed(states)
        self.aux = [torch.ones(NUM_ROWS, width, dtype=torch.uint8) for width in ROW_WIDTHS]
        for kind, columns in (("kv", kv), ("aux", self._listed((each, 1) for each in self.aux))):
            for name, values in zip(("data_ptrs", "data_lens", "item_lens"), columns, strict=True):
                setattr(self.args, f"{kind}_{name}", values)
        self.args.aux_data_ptrs = NamedPointers(self.args.aux_data_ptrs, NEEDED)
        for at, name in enumerate(("data_ptrs", "data_lens", "item_lens")):
            setattr(self.args, f"state_{name}", [columns[at] for columns in states])
        self.shape = Shape(
            tp_rank=rank[1],
            tp_size=tp_size,
            pp_rank=rank[0],
            pp_size=pp_size,
            is_prefill=is_prefill,
            num_layers=model.layers,
            kv_heads=1,
            window_heads=1,
            kv_layers=self.layers,
            window_layers=(),
            has_latent=True,
            device="cpu",
            dtype="uint8",
            is_split=owners is not None,
        )

    def _make(self, layers, items, nbytes):
        """Return a tensor of random bytes for each layer."""
        return {
            layer: torch.from_numpy(self._random.integers(0, 256, (items, nbytes), dtype=np.uint8))
            for layer in layers
        }

    @staticmethod
    def _listed(tensors):
        """Return the addresses, lengths and item lengths of tensors, each with the number of its rows in an item."""
        columns = [(t.data_ptr(), t.nbytes, t.shape[1] * rows) for t, rows in tensors]
        return [list(column) for column in zip(*columns, strict=True)]

    def _dsa(self, states):
        layers = [*self.layers, *self.drafted]
        self.args.num_draft_entries = len(self.drafted)
        self.kv = self._make(layers, self._pages, self.page_size * 656)
        self.index = self._make(layers, self._pages, self.page_size * sum(INDEX))
        self.args.state_types.append("dsa")
        own = [(each, int(layer not in self.model.shared)) for layer, each in self.index.items()]
        states.append(self._listed(own))
        return self._listed((each, 1) for each in self.kv.values())

    def _compressed(self, states):
        model, pages, size = self.model, self._pages, self.page_size

        def page(rows):
            return -(-rows * sum(LATENT) // 576) * 576

        of4, of128 = ([at for at, m in enumerate(model.ratios) if m == ratio] for ratio in (4, 128))
        self.c4 = self._make(of4, pages, page(size // 4))
        self.index = self._make(of4, pages, size // 4 * sum(INDEX))
        self.c128 = self._make(of128, pages, page(size // 128))
        self.window = self._make(range(model.layers), pages, page(size))
        self.c4_state = self._make(of4, pages * self.ring, 8192)
        self.index_state = self._make(of4, pages * self.ring, 2048)
        self.c128_state = self._make(of128, self._slots * 128, 4096)
        self.draft_window = self._make(self.drafted, pages, page(size))
        self.args.state_types.append("swa")
        states.append(
            self._listed(
                [(each, 1) for each in self.window.values()]
                + [(each, self.ring) for each in self.c4_state.values()]
                + [(each, self.ring) for each in self.index_state.values()]
            )
        )
        if of128:
            self.args.state_types.append("c128_state")
            states.append(self._listed((each, 128) for each in self.c128_state.values()))
        if model.draft:
            self.args.state_types.append("swa")
            states.append(self._listed((each, 1) for each in self.draft_window.values()))
        self.args.kv_layout = "v4," + ",".join(f"c{m}:v4" for m in sorted({*model.ratios} - {0}))
        tensors = *self.c4.values(), *self.index.values(), *self.c128.values()
        return self._listed((each, 1) for each in tensors)

    def states(self, num_tokens, prefix, pages, slot):
        """Return the ids of the states as SGLang names them."""
        if self.model.ratios is None:
            return [pages[prefix // self.page_size : -(-num_tokens // self.page_size)]]
        window = self._window_pages(num_tokens, pages)
        named = {"swa": window, "c128_state": [slot] if num_tokens % 128 else []}
        return [named[kind] for kind in self.args.state_types]

    def _window_pages(self, num_tokens, pages):
        first = max(0, num_tokens - WINDOW) // self.page_size
        return pages[first : -(-num_tokens // self.page_size)]

    def streamed(self, num_tokens, pages, slot, prefix=0):
        """Return views of the bytes of the rows that the first tokens of a prompt complete."""
        size, tokens = self.page_size, range(prefix, num_tokens)
        if self.model.ratios is None:
            own = {layer: t for layer, t in self.index.items() if layer not in self.model.shared}
            return [
                *_rows(self.kv, pages, tokens, size, (656,)),
                *_rows(own, pages, tokens, size, INDEX),
            ]
        of4, of128 = range(prefix // 4, num_tokens // 4), range(prefix // 128, num_tokens // 128)
        return [
            *_rows(self.c4, pages, of4, size // 4, LATENT),
            *_rows(self.index, pages, of4, size // 4, INDEX),
            *_rows(self.c128, pages, of128, size // 128, LATENT),
        ]

    def moved(self, num_tokens, prefix, pages, slot, *, with_draft=True):
        """Return views of the bytes of a prompt's rows, in the same order for both engines."""
        size, found = self.page_size, self.streamed(num_tokens, pages, slot, prefix)
        if self.model.ratios is None:
            return found
        tokens = range(max(0, num_tokens - WINDOW), num_tokens)
        found += _rows(self.window, pages, tokens, size, LATENT)
        if with_draft:
            found += _rows(self.draft_window, pages, tokens, size, LATENT)
        pending = range(max(0, num_tokens // 4 * 4 - 4), num_tokens)
        for tensor in (*self.c4_state.values(), *self.index_state.values()):
            found += [tensor[pages[t // size] * self.ring + t % self.ring] for t in pending]
        left_over = range(num_tokens // 128 * 128, num_tokens)
        for tensor in self.c128_state.values():
            found += [tensor[slot * 128 + token % 128] for token in left_over]
        return found

    @property
    def tensors(self):
        """All tensors of the caches."""
        names = (
            "kv",
            "c4",
            "index",
            "c128",
            "window",
            "c4_state",
            "index_state",
            "c128_state",
            "draft_window",
        )
        return [each for name in names for each in getattr(self, name, {}).values()]


def _rows(tensors, pages, rows, per_page, planes):
    """Yield each plane of each row of each layer: a page has all its rows of the first plane, then of the next."""
    for tensor in tensors.values():
        for row in rows:
            page, at, offset = tensor[pages[row // per_page]], row % per_page, 0
            for width in planes:
                yield page[offset + at * width : offset + (at + 1) * width]
                offset += per_page * width
