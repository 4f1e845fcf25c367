"""The digests by which cases compare the caches of whole engines must notice every difference."""

import numpy as np
import pytest

from tests.vllm.harness.digests import difference, digest, merged, tokens_of_rank


def test_one_wrong_byte_is_named():
    content = np.random.default_rng(1).integers(0, 256, (6, 2, 128), dtype=np.uint8)
    changed = content.copy()
    changed[3, 1, 77] ^= 1
    expected, found = (
        merged([{("layer", head): dict(enumerate(digest(c)[:, head].tolist())) for head in (0, 1)}])
        for c in (content, changed)
    )
    assert difference(expected, expected) == ""
    assert difference(expected, found) == "1 of 6 tokens of ('layer', 1) differ, from 3 to 3"


def test_a_missing_layer_is_named_and_two_ranks_that_keep_a_token_must_agree():
    assert "one engine only" in difference({("a", 0): {0: 1}}, {})
    assert "no token" in difference({("a", 0): {0: 1}}, {("a", 0): {1: 1}})
    ranks = [{("a", 0): {0: 5}}, {("a", 0): {0: 6}}]
    assert difference(merged([ranks[0]]), merged(ranks))


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_context_parallel_ranks_have_each_token_once(interleave):
    ranks = [tokens_of_rank(5, 83, 3, rank, interleave) for rank in range(3)]
    assert sorted(np.concatenate([numbers for numbers, _ in ranks])) == list(range(5, 83))
    for rank, (numbers, places) in enumerate(ranks):
        own = [token for token in range(83) if token // interleave % 3 == rank]
        assert [own[place] for place in places] == numbers.tolist()
