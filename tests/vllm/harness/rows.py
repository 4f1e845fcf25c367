"""The comparison of rows in planes and of rows that stand for several tokens, and what wrong ones do."""

import torch

from tests.vllm.harness.digests import CacheDigests, digest


class RowDigests(CacheDigests):
    """The digests of engines whose caches `CacheDigests` does not know."""

    def cache_digests(self, block_ids, _first, end):
        """Digest the rows that an engine needs to continue after `end` tokens of a request whose blocks are
        `block_ids`, by group. Returns `{(our group, layer, part, head): {row: digest}}`.
        """
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        found = {}
        for number, group in enumerate(_groups()):
            for layer, views in group.cache.views.items():
                for part, view in enumerate(views):
                    rows, places = _places(group, block_ids, end)
                    content = _pages(group, layer, view)[places].flatten(2).cpu().numpy()
                    for head, of_head in enumerate(digest(content).T.tolist() if rows else ()):
                        found[number, layer, part, head] = dict(zip(rows, of_head, strict=True))
        return found

    def kinds(self):
        """Return what each of our groups keeps: its kind, tokens and tokens of a row."""
        infos = [group.info for group in _groups()]
        return [f"{info.keeps} {info.extent_tokens} of {info.row_tokens}" for info in infos]

    def spoil(self, block_ids, end, number):
        """Clear the rows of one of our groups that `cache_digests` digests. Returns their number."""
        group = _groups()[number]
        rows, places = _places(group, block_ids, end)
        for layer, views in group.cache.views.items():
            for view in views:
                _pages(group, layer, view)[places] = 0
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        return len(rows)


def _groups():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker._groups


def _places(group, block_ids, end):
    """Return the numbers of a group's rows, and where they are in `_pages`."""
    info, size = group.info, group.cache.geometry.block_size
    starts = {"all": 0, "window": end - info.extent_tokens + 1}
    if info.keeps == "chunk":
        starts["chunk"] = end // info.extent_tokens * info.extent_tokens
    tokens = info.row_tokens * info.tile_tokens
    rows = list(range(max(0, starts[info.keeps]) // tokens, end // tokens))
    table, ratio = block_ids[info.vllm_group], info.kernel_blocks
    blocks = [table[row // size // ratio] * ratio + row // size % ratio for row in rows]
    at = torch.tensor(blocks, dtype=torch.long), torch.tensor(rows, dtype=torch.long) % size
    return rows, (at[0], slice(None), at[1])


def _pages(group, layer, view):
    """Return the bytes `[blocks, heads, rows, elements, bytes of one]` of a layer's part, where they are."""
    from kvconnector.integrations.vllm.caches import layer_number

    (tensor,) = (each for name, each in group.tensors.items() if layer_number(name) == layer)
    storage = tensor.untyped_storage()
    whole = torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(storage)
    shape, steps = (*view.shape, view.item_size_bytes), (*view.strides_bytes, 1)
    return whole.as_strided(shape, steps, view.address - storage.data_ptr())
