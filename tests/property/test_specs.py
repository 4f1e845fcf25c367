from hypothesis import given
from hypothesis import strategies as st

from kvconnector.cache.specs import CacheLimits, DType, SlidingWindowSpec


@given(
    block_size=st.integers(1, 9),
    window=st.integers(1, 40),
    batched=st.integers(1, 20),
    max_model_len=st.integers(1, 80),
)
def test_a_sliding_window_has_pages_for_any_step_and_at_most_one_too_many(
    block_size, window, batched, max_model_len
):
    spec = SlidingWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=1,
        dtype=DType("uint8"),
        sliding_window=window,
    )
    limits = CacheLimits(max_model_len=max_model_len, max_num_batched_tokens=batched)
    worst = 0
    for computed in range(max_model_len):
        needed = range(max(computed - window + 1, 0), min(computed + batched, max_model_len))
        worst = max(worst, len({token // block_size for token in needed}))
    pages = spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
    assert worst <= pages <= worst + 1
