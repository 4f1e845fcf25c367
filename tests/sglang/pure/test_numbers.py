"""What SGLang's caches state of their elements, as the way in which they are stored allows."""

import pytest

from kvconnector.integrations.sglang.numbers import Numbers, numbers_of_pool
from kvconnector.topology.geometry import UNKNOWN_ROUNDING

PLAIN = {
    "device": "cpu",
    "backends": ("triton", "triton"),
    "has_latent": False,
    "is_scaled": False,
}


@pytest.mark.parametrize(
    "dtype, changes, expected",
    [
        ("bfloat16", {}, Numbers("bfloat16")),
        ("bf16", {"has_latent": True}, Numbers("bfloat16")),
        ("float16", {"backends": ("trtllm_mha",) * 2}, Numbers("float16")),
        ("float32", {}, Numbers()),
        ("nvfp4", {}, Numbers()),
        ("fp8_e4m3", {}, Numbers("float8_e4m3fn", "cast", True)),
        ("fp8_e5m2", {}, Numbers("float8_e5m2", "cast", True)),
        ("fp8_e4m3", {"is_scaled": True}, Numbers("float8_e4m3fn", "cast")),
        # kernels of their own
        (
            "fp8_e4m3",
            {"backends": ("fa3", "trtllm_mha")},
            Numbers("float8_e4m3fn", UNKNOWN_ROUNDING, True),
        ),
        ("fp8_e4m3", {"has_latent": True}, Numbers("float8_e4m3fn", UNKNOWN_ROUNDING, True)),
    ],
)
def test_a_cache_states_what_is_known_of_its_numbers(dtype, changes, expected):
    assert numbers_of_pool(dtype, **PLAIN | changes) == expected
