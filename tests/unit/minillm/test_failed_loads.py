"""A decode engine whose load fails computes the tokens that did not arrive, and keeps those that it had before."""

import pytest

from tests.unit.minillm.seed_cases import refused_load

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    "architecture, num_kept",
    [("llama", 48), ("hybrid", 48), ("mamba", 48), ("mla", 48), ("encoder-decoder", 0)],
)
def test_a_refused_load_is_computed_from_its_first_block_on(tmp_path, architecture, num_kept):
    stats = refused_load(architecture, tmp_path)
    assert (stats.cached_tokens, stats.loaded_tokens) == (num_kept, 0)
