"""Small block managers, and requests of a few tokens for them."""

from kvconnector.cache.block_manager import (
    BlockSpaceManager,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)


def manager_of(num_gpu_blocks=10, **settings):
    """Make a manager with blocks of 4 tokens."""
    return BlockSpaceManager(4, num_gpu_blocks, 10, **{"watermark": 0.0} | settings)


def group_of(tokens, *seq_ids, num_encoder_tokens=0):
    """Make a waiting request with one prompt and these sequences."""
    prompt = list(tokens)
    encoder = Sequence(0, range(num_encoder_tokens)) if num_encoder_tokens else None
    seqs = [Sequence(each, prompt) for each in seq_ids]
    return SequenceGroup(f"request-{seq_ids[0]}", seqs, encoder)


def start(manager, seq_id, tokens):
    """Make a running request with one sequence."""
    group = group_of(tokens, seq_id)
    manager.allocate(group)
    group.seqs()[0].status = SequenceStatus.RUNNING
    return group


def computed(manager, seq_id, tokens):
    """Make a running request with one sequence, whose prompt is computed."""
    group = start(manager, seq_id, tokens)
    (seq,) = group.seqs()
    manager.mark_blocks_as_computed(group, seq.num_tokens - manager.get_num_computed_tokens(seq))
    return group


def num_cached_tokens(manager, seq_id, tokens):
    """Return the number of tokens that a new request finds in the cache."""
    (seq,) = start(manager, seq_id, tokens).seqs()
    cached = manager.get_num_cached_tokens(seq)
    manager.free(seq)
    return cached
