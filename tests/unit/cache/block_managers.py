"""Block managers and requests of a few tokens."""

from kvconnector.cache.block_manager import (
    BlockSpaceManager,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)


def manager_of(num_gpu_blocks=10, **settings):
    """A manager of blocks of 4 tokens."""
    return BlockSpaceManager(4, num_gpu_blocks, 10, **{"watermark": 0.0} | settings)


def group_of(tokens, *seq_ids, num_encoder_tokens=0):
    """A request of one prompt and these sequences, which wait."""
    prompt = list(tokens)
    encoder = Sequence(0, range(num_encoder_tokens)) if num_encoder_tokens else None
    seqs = [Sequence(each, prompt) for each in seq_ids]
    return SequenceGroup(f"request-{seq_ids[0]}", seqs, encoder)


def start(manager, seq_id, tokens):
    """A request of one sequence that runs."""
    group = group_of(tokens, seq_id)
    manager.allocate(group)
    group.seqs()[0].status = SequenceStatus.RUNNING
    return group


def computed(manager, seq_id, tokens):
    """The same, with its prompt computed."""
    group = start(manager, seq_id, tokens)
    (seq,) = group.seqs()
    manager.mark_blocks_as_computed(group, seq.num_tokens - manager.get_num_computed_tokens(seq))
    return group


def num_cached_tokens(manager, seq_id, tokens):
    """What a new request finds."""
    (seq,) = start(manager, seq_id, tokens).seqs()
    cached = manager.get_num_cached_tokens(seq)
    manager.free(seq)
    return cached
