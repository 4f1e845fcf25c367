import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from kvconnector.integrations.vllm.parts import Cut, LayerCache, state_parts, state_pieces
from tests.vllm.test_caches import BLOCKS, SIZE, raw, read

pytestmark = pytest.mark.vllm

CHANNELS, WIDTH = {"MAMBA1": 24, "MAMBA2": 40, "GDN_ATTN": 40}, 3


def recurrent(kind, is_dim_first, tp_size=1, spec_blocks=0):
    channels = CHANNELS[kind] // tp_size
    conv = (channels, WIDTH) if is_dim_first else (WIDTH, channels)
    temporal = (channels, 16) if kind == "MAMBA1" else (6 // tp_size, 4, 16)
    return MambaSpec(
        block_size=SIZE,
        shapes=(conv, temporal),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum[kind],
        num_speculative_blocks=spec_blocks,
    )


@pytest.mark.parametrize("kind", CHANNELS)
def test_a_recurrent_state_reads_the_same_in_both_channel_orders(kind):
    conv = torch.randint(-99, 99, (BLOCKS, CHANNELS[kind], WIDTH)).to(torch.bfloat16)
    found = {}
    for is_dim_first in (True, False):
        spec = recurrent(kind, is_dim_first)
        page = torch.zeros(BLOCKS, 1, 1, spec.state_content_size_bytes + 64, dtype=torch.int8)
        stored = conv if is_dim_first else conv.transpose(1, 2).contiguous()
        nbytes = CHANNELS[kind] * WIDTH * 2
        page[:, 0, 0, :nbytes] = stored.reshape(BLOCKS, -1).view(torch.int8)
        page[:, 0, 0, nbytes : spec.state_content_size_bytes] = 3
        cut = Cut(0, 1, 1)
        pieces = state_pieces(spec, cut, is_dim_first=is_dim_first)
        parts = state_parts(LayerCache("l", spec, page), cut, pieces)
        found[is_dim_first] = {g.name: (g, read(view).copy()) for g, view in parts}
    first, last = found[True], found[False]
    assert list(first) == list(last)
    assert first["temporal"][1].min() == first["temporal"][1].max() == 3
    for name, (geometry, values) in first.items():
        assert geometry == last[name][0]
        assert np.array_equal(values, last[name][1])
    channels = np.concatenate([v for name, (_, v) in first.items() if name != "temporal"], axis=1)
    assert np.array_equal(channels[:, :, 0], raw(conv[:, :, None])[:, :, 0])


def test_other_states_need_equal_engines():
    spec = recurrent("MAMBA1", True)
    other = MambaSpec(
        block_size=SIZE,
        shapes=spec.shapes,
        dtypes=spec.dtypes,
        mamba_type=MambaAttentionBackendEnum.LINEAR,
    )
    names = [state_pieces(other, Cut(0, tp, 1), is_dim_first=True)[0].name for tp in (1, 2)]
    assert len(set(names)) == 2
