"""Requests as the block manager sees them: sequences of tokens with the hashes of their blocks, and groups of these."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as AbstractSequence
from enum import Enum
from hashlib import blake2b

from kvconnector.errors import LocalError, Retry

ExtraKey = int | str | bytes
"""A value on which the cache depends besides tokens: an adapter's name, a digest of media, a tenant's salt."""


class SequenceError(LocalError):
    """A sequence or a group contradicts itself or its block table."""

    retry = Retry.NEVER


def encode_extra_keys(extra_keys: AbstractSequence[ExtraKey]) -> bytes:
    """Return bytes that differ if the keys differ. Raises SequenceError: a key is neither int, str nor bytes."""
    for key in extra_keys:
        if not isinstance(key, int | str | bytes):
            raise SequenceError("an extra key must be int, str or bytes", extra_key=key)
    return repr(list(extra_keys)).encode()


def root_hash(block_size: int) -> bytes:
    """Return the parent hash of every sequence's first block, which depends on the block size."""
    return _digest(block_size.to_bytes(8, "little"))


def block_hash(parent: bytes, token_ids: array[int], encoded_extra_keys: bytes) -> bytes:
    """Return the hash of a full block. Through `parent`, at first `root_hash`, it covers all tokens before, too.

    Python's `hash()` will not do: a collision would give a request the KV cache of another, so no client may be able to
    provoke one by its prompt.
    """
    return _digest(parent + token_ids.tobytes() + encoded_extra_keys)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=32).digest()


class SequenceStatus(Enum):
    """The state of a sequence. The scheduler sets it; the block manager only reads it."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sequence:
    """The tokens of one candidate answer, prompt included. They can only be appended to.

    Args:
        seq_id: An id, unique in a block manager.
        token_ids: At least one token; they are copied.
        extra_keys: Values on which the cache depends besides the tokens.
        status: The sequence's state.

    Raises:
        SequenceError: there is no token, one is not a 64-bit integer, or an extra key is neither int, str nor bytes.
    """

    def __init__(
        self,
        seq_id: int,
        token_ids: Iterable[int],
        *,
        extra_keys: Iterable[ExtraKey] = (),
        status: SequenceStatus = SequenceStatus.WAITING,
    ) -> None:
        self.seq_id = seq_id
        self.status = status
        self._token_ids = _token_array(token_ids, seq_id)
        if not self._token_ids:
            raise SequenceError("a sequence needs at least one token", seq_id=seq_id)
        self._extra_keys = tuple(extra_keys)
        self._encoded_extra_keys = encode_extra_keys(self._extra_keys)
        self._chains: dict[int, list[bytes]] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append_tokens(self, token_ids: Iterable[int]) -> None:
        """Append generated tokens. Raises SequenceError: one is not a 64-bit integer."""
        self._token_ids.extend(_token_array(token_ids, self.seq_id))

    def fork(self, seq_id: int) -> Sequence:
        """Return a copy with another id and the same status."""
        child = Sequence(seq_id, self._token_ids, extra_keys=self._extra_keys, status=self.status)
        child._chains = {block_size: list(chain) for block_size, chain in self._chains.items()}
        return child

    def shares_prefix(self, other: Sequence, num_tokens: int) -> bool:
        """Return True if both have the same extra keys and the same first `num_tokens` tokens."""
        return (
            self._encoded_extra_keys == other._encoded_extra_keys
            and min(self.num_tokens, other.num_tokens) >= num_tokens
            and self._token_ids[:num_tokens] == other._token_ids[:num_tokens]
        )

    def block_hashes(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Return the hashes of the first `num_blocks` blocks. Raises SequenceError: one of them is not full."""
        if num_blocks * block_size > self.num_tokens:
            raise SequenceError(
                "only full blocks have a hash",
                seq=self,
                num_blocks=num_blocks,
                block_size=block_size,
            )
        chain = self._chains.setdefault(block_size, [])
        if len(chain) < num_blocks:
            extra = self._encoded_extra_keys
            parent = chain[-1] if chain else root_hash(block_size)
            for start in range(len(chain) * block_size, num_blocks * block_size, block_size):
                parent = block_hash(parent, self._token_ids[start : start + block_size], extra)
                chain.append(parent)
        return chain[:num_blocks]

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {self.num_tokens} tokens, {self.status.value})"


class SequenceGroup:
    """The sequences of one request: one, or several samples or beams of the same prompt.

    Args:
        request_id: An id, unique in a block manager.
        seqs: At least one sequence; their ids differ.
        encoder_seq: The input of cross-attention in an encoder-decoder model, a token per position of the encoder's
            output. Its blocks belong to the request, not to a sequence.

    Raises:
        SequenceError: there is no sequence, or two have the same id.
    """

    def __init__(
        self, request_id: str, seqs: Iterable[Sequence], encoder_seq: Sequence | None = None
    ) -> None:
        self.request_id = request_id
        self.encoder_seq = encoder_seq
        self._seqs: dict[int, Sequence] = {}
        for seq in seqs:
            self.add(seq)
        if not self._seqs:
            raise SequenceError("a group needs at least one sequence", request_id=request_id)

    def add(self, seq: Sequence) -> None:
        """Add a sequence, usually a fork. Raises SequenceError: the group has one with its id."""
        if seq.seq_id in self._seqs:
            raise SequenceError(
                "the group has this sequence", request_id=self.request_id, seq_id=seq.seq_id
            )
        self._seqs[seq.seq_id] = seq

    def seqs(self, status: SequenceStatus | None = None) -> list[Sequence]:
        """Return all sequences, or those with `status`, in the order in which they were added."""
        return [seq for seq in self._seqs.values() if status is None or seq.status is status]


def _token_array(token_ids: Iterable[int], seq_id: int) -> array[int]:
    try:
        return array("q", token_ids)
    except (TypeError, OverflowError) as exc:
        raise SequenceError(f"a token is not a 64-bit integer: {exc}", seq_id=seq_id) from exc
