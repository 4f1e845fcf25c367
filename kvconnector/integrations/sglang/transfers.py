"""The requests of one SGLang rank, with the methods that SGLang's queues call.

In SGLang every rank runs its own copy of the scheduler, in the process that also runs the model. All copies create the
same senders and receivers in the same order, and reduce the results of `poll` over the ranks. So each rank orders its
own worker to move the blocks of its own pools, and no scheduler half is needed. SGLang calls all methods from the
scheduler's thread, and none of them blocks: with data-parallel attention all other ranks would wait, too. The worker's
threads move the bytes. Every wait for a peer has a deadline there (settings `peer` and `lease`); when it passes, the
request fails with a typed error.

On the prefill side a request is a streamed prompt. Consumers may follow it before it is computed; `send` advances the
watermark after each chunk. Until the last chunk SGLang may take the blocks back at any time, and consumers then discard
what they read. With the last chunk the lease gets the blocks, and `poll` returns `TRANSFERRING` until the worker
reports the request's end. SGLang's own backends let a prompt wait in `poll` for a decode engine before it is computed.
This one does not: here the decode engine waits for the prefill engine. Nor does it ask how long a prefix the decode
engine has cached: the decode engine reads only what it lacks.

On the decode side the worker greets the prefill engine when SGLang has looked up its address (`init`). The request is
`BOOTSTRAPPING` until the prefill engine has given the prompt blocks, so SGLang allocates none for it before. If each
engine could take memory for a request that the other one has no room for, both would wait for each other: one of them
must come first, and the prefill engine can proceed without the decode engine. The worker loads once SGLang has
allocated blocks (`send_metadata`). The load keeps the blocks until the worker reports its end.

Each data-parallel rank of a server is an engine of its own. A router names the server only, so before the worker can
greet an engine a `Finder` asks the server's registry which rank has the request (`registry.py`). An engine of another
kind has no registry, so the router names the engine and its directory service. It has no rows of metadata either: only
the first token comes, with the end of the prompt.

If one rank fails, SGLang frees the request's blocks in all ranks, although a lease or a load may still use them. A
decode engine first asks each rank for its `failure_exception`, which ends the load, and then keeps the blocks until
`is_abort_release_safe` (SGLang's deferred release). A prefill engine frees them at once, so its ranks agree first, by
what they answer when SGLang polls them and takes the least answer of all ranks. A rank whose complete prompt has failed
answers `WAITING`, which is less than what ranks without a failure answer. So all ranks see it, and give the prompt up.
A rank in which nothing reads the blocks any more then answers `DONE`. Once that is the least answer, nothing reads them
in any rank, and the request fails in all ranks in the same pass.

SGLang compares these answers only within a pipeline stage. What the stages of a decode engine tell each other is in
`stages.py`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NoReturn

from kvconnector import errors
from kvconnector.control.address import HostPort
from kvconnector.errors import (
    BlockIdError,
    IncompatiblePeerError,
    KVConnectorError,
    LocalError,
    OtherPromptError,
    PeerLostError,
    PeerUnreachableError,
    ReadRefusedError,
    RemoteError,
    RemoteProtocolError,
    TransferAbortedError,
    UnknownRequestError,
    UnknownTransferError,
)
from kvconnector.integrations.identity import Identity, PromptEnd, compare_identities
from kvconnector.integrations.sglang.fields import named_engine
from kvconnector.integrations.sglang.prompt_end import name_of_weights
from kvconnector.integrations.sglang.rank import RankTransfers
from kvconnector.integrations.sglang.requests import NO_BLOCKS
from kvconnector.integrations.sglang.stats import request_name
from kvconnector.layout import Watermark
from kvconnector.session.lease import USED_NAMES
from kvconnector.session.orders import (
    DropRequest,
    GrowRequest,
    HoldRequest,
    LoadRequest,
    WantRequest,
    WithdrawRequest,
)

DRAWN_TWICE = (
    "another request has or had this bootstrap_room, and a room names one transfer: let the router draw a new one for"
    " each request, from a generator that cannot be predicted"
)
LOST = (PeerLostError, PeerUnreachableError, IncompatiblePeerError)
"""Errors after which an engine may have been started anew, elsewhere."""


class Stage(IntEnum):
    """A request's progress, with the values of SGLang's `KVPoll`."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    TRANSFERRING = 3
    DONE = 4


class RoomTransfer:
    """One request on one rank. While its stage is `TRANSFERRING` the worker uses its blocks.

    Args:
        mgr: The rank.
        bootstrap_addr: The prefill engine's `host:port`, from the router.
        bootstrap_room: The router's number for the request.
    """

    gives_up: ClassVar[type[WithdrawRequest | DropRequest]]
    """The order that ends the request early."""

    def __init__(
        self, mgr: RankTransfers, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        self.kv_mgr = mgr
        self.room = bootstrap_room or 0
        self.request_id = f"{request_name(self.room)}.{next(mgr.numbers)}"
        self.stage = Stage.WAITING
        self.error: KVConnectorError | None = None
        self._address = bootstrap_addr
        self._names = self.request_id, *transfer_names(self.room)
        self.prompt_end = b""
        """What the prefill engine says of the prompt at its end, to decode engines of another kind."""
        self.identity: Callable[[], Identity] | None = None
        """Returns what the prompt's cache depends on; None before our hook has run."""
        self.held_s = 0.0
        """Seconds that a prompt's transfer took, once it has ended."""
        self._row = 0
        self._turn = 0
        if self.room not in mgr.rooms:
            mgr.rooms[self.room] = self.request_id
        else:
            self.stage = Stage.FAILED
            self.error = LocalError(DRAWN_TWICE, room=self.room)

    def poll(self) -> int:
        """Take the worker's reports once per pass of SGLang's queue, and return the request's `Stage`."""
        # SGLang polls each request once in a pass: if this one was polled after the last reports, a new pass begins
        if self._turn == self.kv_mgr.turn:
            self.kv_mgr.take()
        self._turn = self.kv_mgr.turn
        return self.stage

    def _transfer(self, order: HoldRequest | LoadRequest) -> None:
        self.stage = Stage.TRANSFERRING
        self.kv_mgr.order(order, self)

    def ended(self, reason: str | None) -> None:
        """Set the final stage, once the worker no longer uses the blocks. `reason` is the failure's, or None."""
        if reason is not None and self.error is None:
            self.error = error_from(reason, self.room)
        self.stage = Stage.DONE if self.error is None else Stage.FAILED
        self.kv_mgr.rooms.pop(self.room, None)

    def abort(self) -> None:
        """Give up the request. It becomes `FAILED` once nothing uses its blocks. Idempotent."""
        self.fail(TransferAbortedError("the request was aborted here", room=self.room))

    clear = abort

    def fail(self, error: KVConnectorError) -> None:
        """Fail this request, unless it is over. The first error counts."""
        if self.stage in {Stage.DONE, Stage.FAILED}:
            return
        if self.error is None:
            self.error = error
            self.kv_mgr.give_up(self.gives_up(self.request_id))
        if self.stage is not Stage.TRANSFERRING:
            self.ended(None)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Turn an error in the body into a failure of this request alone."""
        try:
            yield
        except KVConnectorError as error:
            self.fail(error)

    def failure_exception(self) -> NoReturn:
        """End the request on this rank, no matter which rank failed, and raise its error. Its blocks may still be used.

        Raises:
            KVConnectorError: this rank's error, or a `RemoteError` if only another rank failed.
        """
        error = self.error
        self.abort()
        if error is None or self.stage is Stage.DONE:
            error = _of_another_rank(self.room)
        raise error


class SentPrompt(RoomTransfer):
    """A prompt that this rank computes, and holds until decode engines have read it."""

    gives_up = WithdrawRequest
    _early_send_wait_event: Any = None
    """SGLang sets it before `send`: the CUDA event after which the pages are written."""
    stream: Any = None
    """The CUDA stream on which the steps run, if SGLang publishes chunks before the step that computes them has ended,
    as pipeline stages do; else None.
    """

    def __init__(
        self,
        mgr: RankTransfers,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
        **_: object,
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        self.num_tokens = 0
        """Tokens published so far."""
        self.prompt_tokens = 0
        """The prompt's length, in ranks in which SGLang tells it at the end; else 0."""
        self.weights: set[str] = set()
        """The versions of the weights with which they were computed."""
        self._pages = NO_BLOCKS
        self._is_complete = self._is_failing = False
        if self.error is not None:
            return
        if mgr.dp_size > 1 and not self._is_where_it_is_sought(req_has_disagg_prefill_dp_rank):
            return
        self._grow()

    def _is_where_it_is_sought(self, is_named: bool) -> bool:
        """Tell decode engines where the request is. Returns False if they would look at another rank: it has failed."""
        mgr = self.kv_mgr
        expected = self.room % mgr.dp_size
        if not mgr.follows_rooms:
            if mgr.poster is not None:
                mgr.poster.name(self.room, mgr.dp_rank)
        elif not is_named and expected != mgr.dp_rank:
            self.fail(
                RemoteProtocolError(
                    "a request was sent to another data-parallel rank than follow_bootstrap_room gives, so its decode"
                    " engine would look for it there: let the router also send disagg_prefill_dp_rank to it, or use"
                    " another --load-balance-method",
                    room=self.room,
                    dp_rank=mgr.dp_rank,
                    expected=expected,
                )
            )
            return False
        return True

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Record the request's row of metadata."""
        self._row = aux_index or 0

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Return True if `send` has pages to publish, or ends the prompt."""
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: Sequence[int],
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """Publish the prompt's next chunk. Consumers read it after the work queued on the current stream and `stream`.

        Args:
            kv_indices: The chunk's pages.
            state_indices: None before the last chunk. With it, the ids of the states, as in `Layout.blocks`: the lease
                then keeps all of the request's blocks.
            num_kv_tokens: Tokens in the pages; None if they are full.
        """
        # also in a rank that has failed, since its votes depend on it
        self._is_complete = is_last = state_indices is not None
        if self.stage is not Stage.WAITING:
            return
        self.weights.add(self.kv_mgr.weight_version())
        early, self._early_send_wait_event = self._early_send_wait_event, None
        layout, pages = self.kv_mgr.layout, [int(page) for page in kv_indices]
        # the last chunk is published once its step has ended, and need not wait for the ones after it
        with self.failing(), self.kv_mgr.after(early, None if is_last else self.stream):
            count = len(pages) * layout.page_size if num_kv_tokens is None else num_kv_tokens
            self._check_chunk(len(pages), count, is_last=is_last)
            self._pages = self._pages.extended(pages)
            self.num_tokens += count
            if state_indices is None:
                self._grow()
                return
            self.kv_mgr.rows.fill(self._row)
            blocks = layout.blocks(self._pages, state_indices, self._row, self.num_tokens)
            self._transfer(
                HoldRequest(*self._names, blocks, self.num_tokens, extra=self.prompt_end)
            )

    def _check_chunk(self, num_pages: int, num_tokens: int, *, is_last: bool) -> None:
        """Check that a chunk goes on where the last one ended: decode engines find a token by its place in the pages.

        Raises:
            BlockIdError: its tokens do not fit its pages, or it ends the prompt elsewhere. SGLang 0.5.21 sends a chunk
                with a negative number of tokens if it is paused (`retract`) during the first step of a prompt.
        """
        size, stop = self.kv_mgr.layout.page_size, self.num_tokens + num_tokens
        is_held = num_pages == -(-stop // size) - -(-self.num_tokens // size)
        is_all = not (is_last and self.prompt_tokens) or stop == self.prompt_tokens
        if num_tokens < 0 or not is_held or not is_all:
            raise BlockIdError(
                "SGLang published a chunk that is not the next one of its prompt: send the request again",
                room=self.room,
                pages=num_pages,
                page_size=size,
                tokens=(self.num_tokens, stop),
                prompt_tokens=self.prompt_tokens or None,
            )

    def _grow(self) -> None:
        blocks = self.kv_mgr.layout.growing(self._pages)
        self.kv_mgr.order(GrowRequest(*self._names, blocks, Watermark(self.num_tokens)))

    def ended(self, reason: str | None) -> None:
        super().ended(reason)
        if self.kv_mgr.poster is not None and not self.kv_mgr.follows_rooms:
            self.kv_mgr.poster.forget(self.room)

    def vote(self) -> int:
        """Return this rank's vote. SGLang takes the least vote of all ranks as the request's stage.

        A rank votes for its own stage. If its prompt is complete and has failed, it votes for `WAITING`, so that every
        rank learns of the failure, and for `DONE` as soon as nothing reads the prompt's pages any more.
        """
        stage = self.poll()
        if not self._is_complete or self.error is None:
            return stage
        is_over = self._is_failing and stage is not Stage.TRANSFERRING
        return Stage.DONE if is_over else Stage.WAITING

    def agreed(self, least: int) -> int:
        """Take the least vote of all ranks, and return the stage that SGLang may act on."""
        if self._is_complete and least == Stage.WAITING:
            self._is_failing = True
            self.fail(_of_another_rank(self.room))
        return Stage.FAILED if self._is_failing and least == Stage.DONE else least

    def mark_prefill_complete(self) -> None:
        """Do nothing: decode engines may allocate blocks before the prompt is computed."""

    poll_pp_consensus = RoomTransfer.poll


class LoadedPrompt(RoomTransfer):
    """A prompt that this rank reads. Set the fields below before `send_metadata`, which has no arguments for them."""

    gives_up = DropRequest
    num_tokens = 0
    """The prompt's length in tokens."""
    vocab_size = 0
    """How many tokens the model has. Another engine's first token must be one of them: to look up the embedding of one
    that is not would end this engine."""
    window_tokens: int | None = None
    """The length of the model's sliding window in tokens; None if it has none."""
    dp_rank: int | None = None
    """The data-parallel rank that the router named, if it did."""
    recompute: Mapping[str, object] | None = None
    """What to ask the prefill server for, if this rank has to ask: SGLang retracted the prompt, and its prefill engine
    computes it again."""
    abort_notified = True
    """SGLang's name. True lets its deferred release ask the manager whether a failed request's pages are free."""
    bootstrap_infos: tuple[object, ...] = ()
    """SGLang's name for those who must acknowledge the end of a request. Nobody has to."""
    stream: Any = None
    """A CUDA stream whose queued work may still write to the blocks; None if there is none."""

    def __init__(
        self, mgr: RankTransfers, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        if self.error is None:
            self.stage = Stage.BOOTSTRAPPING
        self.is_of_named_engine = bool(named_engine(bootstrap_addr))
        """True if the router named the engine itself, which is of another kind."""
        self._is_sought = False
        self._registry: HostPort | None = None
        self._find_until_s = 0.0

    def init(self, prefill_dp_rank: int) -> None:
        """Look for the data-parallel rank that has the request, then greet it and keep its lease alive.

        Args:
            prefill_dp_rank: SGLang's guess, which is not used: `dp_rank` is the router's word.
        """
        if self.stage is not Stage.BOOTSTRAPPING or self._is_sought:
            return
        self._is_sought = True
        with self.failing():
            if self.is_of_named_engine:
                engine = self.kv_mgr.prefill_engines.named_by(self._address)
                self.kv_mgr.follow(WantRequest(*self._names, engine, is_followed=True), self)
                return
            self._registry = self.kv_mgr.prefill_engines.registry_of(self._address)
            self._find_until_s = time.monotonic() + self.kv_mgr.config.lease.early_follow_s
            self.kv_mgr.finder.want(self._registry, self.room, self.dp_rank)
            self._look()

    def poll(self) -> int:
        if self._registry is not None and self.stage is Stage.BOOTSTRAPPING:
            with self.failing():
                self._look()
        if self.recompute is not None and (
            refusal := self.kv_mgr.recomputer.refusal(self.request_id)
        ):
            self.fail(
                RemoteError(
                    "the prefill server did not compute a retracted prompt again",
                    room=self.room,
                    reason=refusal,
                )
            )
        return super().poll()

    def _look(self) -> None:
        """Greet the engine, if it was found. Raises UnknownRequestError: nobody said in time which one it is."""
        registry = self._registry
        if registry is None or self._find_until_s == 0.0:
            return
        found = self.kv_mgr.finder.take(registry, self.room)
        if found is not None:
            self._find_until_s = 0.0
            if not found.directory:
                raise UnknownRequestError(
                    "a request names a data-parallel rank that the prefill server does not have",
                    room=self.room,
                    registry=str(registry),
                    dp_rank=found.dp_rank,
                    dp_size=found.dp_size,
                )
            engine = self.kv_mgr.prefill_engines.address_of(self._address, found)
            self.kv_mgr.follow(WantRequest(*self._names, engine, is_followed=True), self)
            if self.recompute is not None:
                self._have_it_computed(registry.host, found.http_port)
        elif time.monotonic() > self._find_until_s:
            raise UnknownRequestError(
                "the prefill server's registry did not say which of its engines has the request",
                room=self.room,
                registry=str(registry),
                reason=self.kv_mgr.finder.trouble(registry),
            )

    def _have_it_computed(self, host: str, port: int) -> None:
        if not port:
            raise UnknownRequestError(
                "the prefill server's registry does not say where its HTTP API is, so retracted prompts"
                " cannot be computed again",
                room=self.room,
                host=host,
            )
        self.kv_mgr.recomputer.ask(self.request_id, HostPort(host, port), self.recompute or {})

    def producer_started(self) -> None:
        """Let SGLang allocate blocks: the prefill engine has blocks for the prompt. If it turns out that it never will,
        this is called, too, and the load that SGLang then starts fails.
        """
        if self.stage is Stage.BOOTSTRAPPING:
            self.stage = Stage.WAITING

    def send_metadata(
        self,
        kv_indices: Sequence[int],
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        **_: object,
    ) -> None:
        """Start to read the prompt into these blocks, while it is being computed.

        Args:
            kv_indices: Pages for the tokens after the cached prefix.
            aux_index: The request's row of metadata.
            state_indices: Ids of the states, as in `Layout.blocks`.
            decode_prefix_len: Length of the cached prefix in tokens, a multiple of the page size.
        """
        if self.stage is not Stage.WAITING:
            return
        self._row = aux_index or 0
        with self.failing(), self.kv_mgr.after(self.stream):
            self.kv_mgr.rows.clear(self._row)
            ranges, blocks = self.kv_mgr.layout.to_load(
                kv_indices,
                state_indices or (),
                self._row,
                prefix_tokens=decode_prefix_len or 0,
                num_tokens=self.num_tokens,
                window_tokens=self.window_tokens,
            )
            self._transfer(
                LoadRequest(
                    self.request_id, ranges, blocks, remote_blocks=(), token_stop=self.num_tokens
                )
            )

    def ended(self, reason: str | None) -> None:
        if reason is None and self.error is None:
            try:
                self._take_metadata()
            except KVConnectorError as error:
                self.error = error
        super().ended(reason)
        if self._registry is not None:
            self.kv_mgr.finder.forget(self._registry, self.room)
            if isinstance(self.error, LOST):
                self.kv_mgr.finder.ask_again(self._registry)
        if self.recompute is not None:
            self.kv_mgr.recomputer.forget(self.request_id, is_done=self.stage is Stage.DONE)

    def _take_metadata(self) -> None:
        """Give SGLang the request's row of metadata, or, of an engine that has none, the first token.

        Raises:
            OtherPromptError: the prefill engine has computed another prompt.
            IncompatiblePeerError: or with other weights.
            RemoteError: such an engine has sent no first token, and SGLang's decode engines do not compute one.
        """
        with self.kv_mgr.after():
            end = PromptEnd.decode(self.prompt_end)
            if end.identity is not None and self.identity is not None:
                compare_identities(end.identity, (self.identity(),))
            self._compare_weights(end.weights)
            if self.kv_mgr.rows.spread(self._row):
                return
            token = end.token
            if token is None or not 0 <= token < self.vocab_size:
                raise RemoteError(
                    "the prefill engine sent neither metadata nor a usable first token: an engine of another"
                    " kind sends"
                    " none for requests with log probabilities, a grammar, penalties or a seed, nor with"
                    " first_token=never",
                    room=self.room,
                    engine=self._address,
                    token=token,
                    vocab_size=self.vocab_size,
                )
            self.kv_mgr.rows.put_first_token(self._row, token, self.room)

    def fail_with_another_stage(self) -> None:
        """Fail although this rank has read its part, because another pipeline stage has not: see `stages.py`."""
        if self.stage is Stage.DONE:
            self.stage, self.error = Stage.FAILED, _of_another_rank(self.room)

    def _compare_weights(self, theirs: str) -> None:
        """Compare versions of weights. An engine that names none is not compared."""
        ours = name_of_weights([self.kv_mgr.weight_version()])
        if theirs and ours and theirs != ours:
            raise IncompatiblePeerError(
                "the prompt was computed with other weights than this server's: update both servers, and give both the"
                " same weight_version",
                room=self.room,
                theirs=theirs,
                ours=ours,
            )

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Do nothing: `failure_exception` ends the load, and `is_abort_release_safe` says when."""


@dataclass(frozen=True, slots=True)
class Voter:
    """A prompt as SGLang's reduction polls it."""

    prompt: SentPrompt

    def poll(self) -> int:
        """Return the prompt's vote."""
        return self.prompt.vote()


def agree(
    original: Callable[..., Sequence[int]], pollers: Sequence[Any], *groups: Any, **named: Any
) -> list[int]:
    """Let all ranks of a prefill engine end a request in the same pass: a hook around SGLang's reduction of polls.

    Args:
        original: Polls each poller, and reduces the results over the ranks.
        pollers: Senders and receivers. Only prompts vote.
        groups: The ranks.
        named: The same.

    Returns:
        The requests' stages.
    """
    voters = [Voter(each) if isinstance(each, SentPrompt) else each for each in pollers]
    least = original(voters, *groups, **named)
    return [
        each.agreed(poll) if isinstance(each, SentPrompt) else poll
        for each, poll in zip(pollers, least, strict=True)
    ]


def _of_another_rank(room: int) -> RemoteError:
    error = RemoteError("the request failed in another rank of this engine", room=room)
    vars(error)["is_from_another_rank"] = True  # SGLang's name: it logs once
    return error


def transfer_names(room: int) -> tuple[str, str]:
    """Return the name and the secret of a room's transfer. Both sides derive them, since a router passes only the room.

    The secret is as hard to guess as the room, for which a router draws 63 random bits.
    """
    room_bytes = str(room).encode()
    name, secret = (
        hashlib.blake2b(room_bytes, digest_size=16, person=use).hexdigest()
        for use in (b"sglang-name", b"sglang-secret")
    )
    return f"sglang-{name}", secret


def next_room(room: int) -> int:
    """Return the room under which a retracted request's prompt is computed again: a room's name serves one transfer.

    All ranks of the decode engine derive the same one, and it is as hard to guess as the first.
    """
    digest = hashlib.blake2b(str(room).encode(), digest_size=8, person=b"sglang-again")
    return int.from_bytes(digest.digest(), "big") >> 1 or 1


def error_from(reason: str, room: int) -> KVConnectorError:
    """Return the typed error that a worker's reason, `Type: text`, names."""
    name, _, text = reason.partition(": ")
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, KVConnectorError)):
        kind, text = RemoteError, reason
    if kind is UnknownTransferError and USED_NAMES in text:
        return LocalError(DRAWN_TWICE, room=room)
    if kind is ReadRefusedError:  # both engines have agreed on all but the prompt
        kind = OtherPromptError
        text = text.removesuffix(f"; {ReadRefusedError.advice()}")
        text = f"the prefill engine does not hold what this prompt needs, as if it had a longer one: {text}"
    return kind(text.removesuffix(f"; {kind.advice()}"), room=room)
