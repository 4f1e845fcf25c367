"""What an engine states of keys that SGLang's kernel for norms and rotation rotates."""

import math
from types import SimpleNamespace

import pytest

from kvconnector.integrations.model_values import position_encodings
from kvconnector.integrations.sglang.rotation import FUSED_ROPE, fused_encodings, rotates_with_norms

SCALED = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
SCALED |= {"original_max_position_embeddings": 32768}


def _config(length=131072, **more):
    return SimpleNamespace(rope_parameters={**SCALED, **more}, max_position_embeddings=length)


def test_scaled_keys_differ_by_kernel_and_by_what_only_this_one_reads():
    (_, by_module), ((_, text),) = position_encodings(_config())[0], fused_encodings(_config())
    assert text.startswith(by_module)
    assert FUSED_ROPE in text
    assert fused_encodings(_config()) == (("", text),)
    own = 0.1 * math.log(SCALED["factor"]) + 1  # what modules multiply by without a factor
    for other in (_config(262144), _config(attention_factor=own)):
        assert position_encodings(other) == (("", by_module),)
        assert fused_encodings(other) != (("", text),)


def test_plain_keys_are_the_same_by_each_kernel():
    plain = SimpleNamespace(rope_theta=10000.0, max_position_embeddings=4096)
    assert fused_encodings(plain) == position_encodings(plain)


@pytest.mark.parametrize(
    "device, is_asked, is_rocm, rotates",
    [
        ("cuda", True, False, True),
        ("cuda", False, False, False),
        ("cuda", True, True, False),
        ("cpu", True, False, False),
    ],
)
def test_the_kernel_is_used_on_cuda_alone_and_if_asked_for(device, is_asked, is_rocm, rotates):
    assert rotates_with_norms(device, is_asked=is_asked, is_rocm=is_rocm) == rotates
