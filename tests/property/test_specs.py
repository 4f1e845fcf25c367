from hypothesis import given
from hypothesis import strategies as st

from kvconnector.cache.specs import CacheLimits, DType, SlidingWindowSpec

UINT8 = DType("uint8")

any_sizes = given(
    block_size=st.integers(1, 9),
    reach=st.integers(1, 40),
    batched=st.integers(1, 20),
    max_model_len=st.integers(1, 80),
)


def check_worst_case(spec, limits, first_read):
    """The spec has pages for any step, at most one too many. `first_read` of the computed tokens is the first one that
    the next token needs.
    """
    worst = 0
    for computed in range(limits.max_model_len):
        stop = min(computed + limits.max_num_batched_tokens, limits.max_model_len)
        blocks = {token // spec.block_size for token in range(first_read(computed), stop)}
        worst = max(worst, len(blocks))
    pages = spec.max_memory_usage_bytes(limits) // spec.page_size_bytes
    assert worst <= pages <= worst + 1


@any_sizes
def test_a_sliding_window_always_fits_its_worst_case(block_size, reach, batched, max_model_len):
    spec = SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=UINT8, sliding_window=reach
    )
    limits = CacheLimits(max_model_len=max_model_len, max_num_batched_tokens=batched)
    check_worst_case(spec, limits, lambda computed: max(computed - reach + 1, 0))
