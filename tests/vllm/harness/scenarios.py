"""The scenarios of the cases: each drives a pair of engines and adds to the outcome what went wrong."""

import time
from itertools import product

from tests.vllm.harness.digests import difference, merged
from tests.vllm.harness.engine import ANSWER_TIMEOUT_S
from tests.vllm.harness.pair import prompt_of
from tests.vllm.harness.report import becomes

LENGTHS = (7, 64, 130, 600, 2000)
SETTLE_S = 0.5
AT_ONCE_S = 10.0
"""Seconds, a third of a lease's."""
BOUNDARIES = (5, 127, 128, 129, 1000, 1024, 1025, 4096)
"""Prompts that end before, with and after a window, a block and rows of 4 and of 128 tokens."""
STEPS = 200
SPOILT_LENGTH, SPOILT_STEPS = 1000, 60
DRIFT_RATIO, DRIFT_SLACK = 1.5, 0.02
"""How much further than an engine alone a handed-over request may be from a computed prompt, in log probability."""
CLEAR_CANDIDATES = 8
"""Prompts among which one without near-ties is chosen."""
BLOCK_BYTES = 1 << 18
"""Of 64 tokens of the "llama": K and V of four layers with four heads of 32 floats."""


def tokens(pair, outcome):
    """Prompts whose lengths are and are not multiples of blocks get the right tokens."""
    for length in LENGTHS:
        prompt = pair.clear_prompt(length)
        _compare(pair, outcome, f"{length} tokens", prompt, pair.alone(prompt))


def converted(pair, outcome):
    """Engines whose caches have other types: the decode engine gets the bytes that its own kernel stores for the same
    prompt, and gives the tokens that it gives alone but for near-ties, see `_compare_by_drift`. That holds for a model
    of one layer, whose K and V come from no cache; further layers see what a cache of the other type has rounded.

    A first token that the prefill engine has sampled comes from K and V of its own type, so it may be another one. From
    there on the decode engine gives the tokens that it gives alone after that one.
    """
    for length in LENGTHS:
        what = f"{length} tokens"
        # the last token is computed alone, and in bf16 may round otherwise than in the prompt's step
        prompt = pair.clear_prompt(length, candidates=CLEAR_CANDIDATES)
        own = pair.decode.ask(prompt, logprobs=2)
        expected = merged(pair.decode.call("digests", own.block_ids, 0, length - 1))
        pair.decode.forget()
        # a prefill engine's first token has no log probability: the decode engine samples one itself
        answer = pair.decode.ask(prompt, pair.prefilled(prompt), logprobs=2)
        found = merged(pair.decode.call("digests", answer.block_ids, 0, length - 1))
        outcome.compare_bytes(what, difference(expected, found))
        outcome.check(f"{what}: computed", answer.computed_tokens, 1)
        bound = _compare_by_drift(pair, outcome, what, prompt=prompt, own=own, answer=answer)
        pair.decode.forget()
        offer = pair.offered(pair.begin_prefill(prompt))
        answer = pair.decode.ask(prompt, offer.params)
        pair.decode.forget()
        what = f"{length} tokens and a first one"
        outcome.check(f"{what}: computed", answer.computed_tokens, 0)
        outcome.check(f"{what}: the first", answer.tokens[:1], offer.tokens)
        gap = own.gaps[0] if offer.tokens != own.tokens[:1] else 0.0
        outcome.figures[f"{what}: gap to the decode engine's own"] = round(gap, 4)
        rest = pair.decode.ask(prompt + offer.tokens, max_tokens=15, logprobs=2)
        _compare_tokens(outcome, what, answer.tokens[1:], rest, bound)
        pair.decode.forget()


def steps(pair, outcome):
    """Every row that the decode engine needs arrives, and `STEPS` tokens later it is as close to one engine as that
    engine is to itself.

    Random weights leave near-ties, and kernels that select rows add them up in any order, so one engine asked twice
    gives other tokens. So a request is judged by its drift, see `_compare_by_drift`. What wrong rows do is shown with
    those of each kind of cache cleared in the prefill engine.

    The prompts are decoded together, alone as after their loads: without graphs a step takes as long for all of them
    as for one.
    """
    prompts = {f"{length} tokens": prompt_of(length) for length in BOUNDARIES}
    for what, prompt in prompts.items():
        outcome.compare_bytes(what, pair.compared(prompt, max_tokens=1)[1])
        pair.prefill.forget()
        pair.decode.forget()

    def decoded(offers):
        asks = [
            pair.decode.submit(prompt, params, max_tokens=STEPS, logprobs=2)
            for prompt, params in zip(prompts.values(), offers, strict=True)
        ]
        answers = [pair.decode.answer(each) for each in asks]
        pair.decode.forget()
        return answers

    alone = decoded([None] * len(prompts))
    handed_over = decoded([pair.prefilled(prompt) for prompt in prompts.values()])
    pair.prefill.forget()
    for (what, prompt), own, answer in zip(prompts.items(), alone, handed_over, strict=True):
        outcome.check(f"{what}: computed", answer.computed_tokens, 1)
        _compare_by_drift(pair, outcome, what, prompt=prompt, own=own, answer=answer)
    _spoil(pair, outcome)


def _compare_by_drift(pair, outcome, what, *, prompt, own, answer):
    """Compare a request with the engine's own answer to its prompt. Both have log probabilities.

    The *drift* is how far the log probabilities of the tokens that it decoded are from those that one prompt of the
    same tokens has, step by step. Tokens may differ from the engine's own only where the two likeliest of these are
    closer than that, and the drift may not be greater than the engine's own. Returns how close they may be.
    """
    drift, drift_alone = (_drift(pair, prompt, each) for each in (answer, own))
    bound = DRIFT_RATIO * max(*drift, *drift_alone) + DRIFT_SLACK
    _compare_tokens(outcome, what, answer.tokens, own, bound)
    means = _mean(drift), _mean(drift_alone)
    is_near = means[0] <= DRIFT_RATIO * means[1] + DRIFT_SLACK
    outcome.check(f"{what}: drift {means[0]:.4f}, alone {means[1]:.4f}", is_near)
    outcome.figures |= {
        f"{what}: distinct tokens": len({*answer.tokens}),
        f"{what}: drift": round(means[0], 4),
        f"{what}: greatest drift": round(max(drift), 4),
        f"{what}: drift alone": round(means[1], 4),
        f"{what}: greatest drift alone": round(max(drift_alone), 4),
    }
    return bound


def _compare_tokens(outcome, what, tokens, own, bound):
    """Tokens differ from an engine's own only where the two likeliest of these are at most `bound` apart."""
    outcome.prompts += 1
    are_equal = [a == b for a, b in zip(tokens, own.tokens, strict=True)]
    first = [*are_equal, False].index(False)
    gap = [*own.gaps, 0.0][first]
    outcome.equal += gap <= bound
    if gap > bound:
        outcome.complaints.append(
            f"{what}: token {first} differs, of which the two likeliest are {gap:.3f} apart"
        )
    outcome.figures |= {f"{what}: equal tokens": first, f"{what}: gap there": round(gap, 4)}


def _spoil(pair, outcome):
    """Clear the rows of one kind of cache after another before they are read: the drift of most tells it."""
    clean = {}
    kinds = pair.decode.call("kinds")
    for number, kind in [(None, "none"), *enumerate(kinds)]:
        prompt = prompt_of(SPOILT_LENGTH, seed="spoilt")
        offer = pair.prefill.answer(pair.begin_prefill(prompt))
        if number is not None:
            rows = pair.prefill.call("spoil", offer.block_ids, SPOILT_LENGTH - 1, number)
            outcome.check(f"rows of {kind}", rows[0] > 0)
        answer = pair.decode.ask(prompt, offer.params, max_tokens=SPOILT_STEPS, logprobs=2)
        drift = _drift(pair, prompt, answer)
        pair.prefill.forget()
        pair.decode.forget()
        clean = clean or {"mean": _mean(drift)}
        outcome.figures[f"drift without {number} {kind}"] = round(_mean(drift), 4)
        outcome.figures[f"first drift without {number} {kind}"] = round(drift[0], 4)
    found = [value for name, value in outcome.figures.items() if name.startswith("drift without")]
    is_told = max(found) > 2 * DRIFT_RATIO * clean["mean"] + DRIFT_SLACK
    outcome.check("cleared rows show in the drift", is_told)


def _drift(pair, prompt, answer):
    """Return how far each token's log probability is from the one that a prompt of the same tokens gives it."""
    pair.decode.forget()
    whole = pair.decode.ask(prompt + answer.tokens, max_tokens=1, prompt_logprobs=0)
    pairs = zip(answer.scores, whole.prompt_scores[len(prompt) - 1 :], strict=True)
    return [abs(a - b) for a, b in pairs]


def _mean(numbers):
    return sum(numbers) / len(numbers)


def _compare(pair, outcome, what, prompt, expected, *, cached=0):
    """Compare one request's tokens, and its caches after the `cached` tokens that the decode engine had."""
    answer, difference = pair.compared(prompt, cached)
    outcome.compare_bytes(what, difference)
    # the last token, unless the first sampled one came from the prefill engine
    if answer.computed_tokens not in {0, 1}:
        outcome.complaints.append(f"{what}: {answer.computed_tokens} computed by the decode engine")
    is_asked = answer.tokens != expected and not difference
    if why := is_asked and pair.differs_alone(prompt, expected):
        outcome.prompts += 1
        outcome.differs_alone.append(f"{what}: {why}")
    else:
        outcome.compare(what, answer, expected)


def first_tokens(pair, outcome, *, is_streamed=False):
    """The decode engine computes nothing of a prompt: it continues from the prefill engine's token, which may be the
    only one.
    """
    pair.prefilled(prompt_of(40))
    for length in LENGTHS:
        prompt = pair.clear_prompt(length)
        expected = pair.alone(prompt)
        answer, difference = (pair.streamed if is_streamed else pair.compared)(
            prompt, is_whole=True
        )
        outcome.compare_bytes(f"{length} tokens", difference)
        outcome.compare(f"{length} tokens", answer, expected)
        outcome.check(f"{length} tokens: computed", answer.computed_tokens, 0)
        pair.decode.forget()
        if is_streamed:
            pair.prefill.forget()
            prefill, decode = pair.begin_streamed(prompt, max_tokens=1)
            only = pair.decode.answer(decode)
            pair.prefill.answer(prefill)
        else:
            only = pair.decode.ask(prompt, pair.prefilled(prompt), max_tokens=1)
        outcome.compare(f"one of {length} tokens", only, expected[:1])
        outcome.check(f"one of {length} tokens: computed", only.computed_tokens, None)


def prefix_hits(pair, outcome):
    """The decode engine already has a prefix of each length in blocks, and the prefill engine a different one."""
    length = 600
    block = pair.specs[1].block_size
    for cached in range(block - 3, length + block, block):
        prompt = pair.clear_prompt(length, seed=cached)
        expected = pair.alone(prompt)
        pair.decode.ask(prompt[: min(cached, length)], max_tokens=1)
        pair.prefill.ask(prompt[: cached // 2], max_tokens=1)
        what = f"{cached} of {length} cached"
        _compare(pair, outcome, what, prompt, expected, cached=cached // block * block)


def _at_once(pair, outcome, prompts, max_tokens=16):
    """Ask the decode engine for all prompts at once; equal ones are prefilled once."""
    expected = {}
    for prompt in prompts:
        expected[tuple(prompt)] = pair.decode.ask(prompt, max_tokens=max_tokens).tokens
        pair.decode.forget()
    offers = {prompt: pair.prefilled(list(prompt)) for prompt in expected}
    asks = [pair.decode.submit(p, offers[tuple(p)], max_tokens=max_tokens) for p in prompts]
    for request, prompt in zip(asks, prompts, strict=True):
        outcome.compare(request, pair.decode.answer(request), expected[tuple(prompt)])


def crowd(pair, outcome):
    prompts = [prompt_of(100 + 37 * number, seed=number) for number in range(8)]
    _at_once(pair, outcome, prompts)


def preempted(pair, outcome):
    """More tokens than fit into the decode engine's cache: it preempts requests that it has loaded."""
    prompts = [prompt_of(750, seed=20 + number) for number in range(5)]
    _at_once(pair, outcome, prompts, max_tokens=150)
    outcome.check("preemptions", pair.decode.call("report")["preemptions"] > 0)


def slept(pair, outcome):
    """Each engine sleeps and wakes up; transfers before and after are right."""
    for turn, sleeper in enumerate((None, pair.prefill, pair.decode)):
        if sleeper is not None:
            sleeper.call("sleep")
        prompt = prompt_of(600, seed=30 + turn)
        _compare(pair, outcome, f"turn {turn}", prompt, pair.alone(prompt))


def completions(pair, outcome):
    _at_once(pair, outcome, [prompt_of(600, seed=6)] * 3)


def streamed(pair, outcome):
    """The decode engine reads prompts while they are computed, in turn with offered ones, and several at once; then a
    client leaves in the middle of a prompt.
    """
    pair.prefilled(prompt_of(40))
    for number, length in enumerate(LENGTHS):
        expected = pair.alone(prompt_of(length))
        for is_streamed in (number % 2 == 0, number % 2 == 1):
            prompt = prompt_of(length)
            answer, difference = (pair.streamed if is_streamed else pair.compared)(prompt)
            what = f"{length} tokens, {'streamed' if is_streamed else 'offered'}"
            outcome.compare(what, answer, expected)
            outcome.compare_bytes(what, difference)
            for engine in (pair.prefill, pair.decode):
                engine.call("reset_cache")
    prompts = [prompt_of(100 + 150 * number, seed=number) for number in range(4)]
    alone = [pair.alone(prompt) for prompt in prompts]
    begun = [pair.begin_streamed(prompt) for prompt in prompts]
    for (prefill, decode), expected in zip(begun, alone, strict=True):
        answer = pair.decode.answer(decode)
        outcome.compare(f"{decode} of several", answer, expected)
        pair.prefill.answer(prefill)
    prefill, decode = pair.begin_streamed(prompt_of(2000, seed=9))
    for engine, request in ((pair.decode, decode), (pair.prefill, prefill)):
        engine.call("abort", request)


def mixed_up(pair, outcome):
    """A router gives the decode engine another prompt than the prefill engine under one name: the decode engine
    computes its own, and finds nothing of the other one in its prefix cache.
    """
    pair.prefilled(prompt_of(40))
    for length in (130, 2000):
        prompt = prompt_of(length, seed=10)
        for changed in (0, length // 2, length - 1):
            own = [*prompt[:changed], 1 + prompt[changed] % 7, *prompt[changed + 1 :]]
            expected = pair.alone(own)
            prefill, decode = pair.begin_streamed(prompt, decoded=own)
            answer = pair.decode.answer(decode)
            pair.prefill.answer(prefill)
            what = f"{length} tokens, of which {changed} differs"
            outcome.compare(what, answer, expected)
            outcome.check(f"{what}: computed", answer.computed_tokens, length)
            outcome.compare(f"{what}, again", pair.decode.ask(own), expected)
            pair.decode.forget()
            pair.prefill.forget()


def streamed_then_killed(pair, outcome):
    """The prefill engine dies in the middle of a prompt: the decode engine computes the prompt itself."""
    pair.prefilled(prompt_of(40))
    pair.streamed(prompt_of(300, seed=2))
    prompt = prompt_of(3000, seed=2)
    expected = pair.alone(prompt)
    _, request = pair.begin_streamed(prompt)
    held = becomes(lambda: pair.decode.call("report")["used_blocks"] > 0, poll_s=0.01)
    outcome.check("the decode engine has blocks for it", held)
    pair.prefill.kill()
    answer = pair.decode.answer(request, 2 * ANSWER_TIMEOUT_S)
    outcome.compare("after the loss", answer, expected)


def abort(pair, outcome):
    """Requests that are aborted before, during and after their transfer leave nothing held."""
    prompt = prompt_of(900, seed=1)
    expected = pair.alone(prompt)
    _compare(pair, outcome, "before the aborts", prompt, expected)
    pair.decode.forget()
    before = pair.decode.submit(prompt, pair.prefilled(prompt))
    pair.decode.call("abort", before)
    offer = pair.prefilled(prompt)
    pair.prefill.pause()
    during = pair.decode.submit(prompt, offer)
    time.sleep(SETTLE_S)
    pair.decode.call("abort", during)
    pair.prefill.resume()
    after = pair.decode.submit(prompt, pair.prefilled(prompt), max_tokens=2000)
    time.sleep(SETTLE_S)
    pair.decode.call("abort", after)
    outcome.complaints += pair.leftovers()
    _compare(pair, outcome, "after the aborts", prompt, expected)


def _killed_during_a_load(pair, prompt):
    """Kill the prefill engine before the decode engine has loaded a prompt. Returns the answer."""
    offer = pair.prefilled(prompt)
    pair.prefill.pause()
    request = pair.decode.submit(prompt, offer)
    time.sleep(SETTLE_S)
    pair.prefill.kill()
    return pair.decode.answer(request, 2 * ANSWER_TIMEOUT_S)


def killed(pair, outcome):
    """The prefill engine dies in the middle of a transfer: depending on its policy, the decode engine computes the
    prompt itself or fails only this request.
    """
    is_recomputed = pair.specs[1].transfer["kv_load_failure_policy"] == "recompute"
    warm, prompt = prompt_of(300, seed=2), prompt_of(2000, seed=2)
    expected = pair.alone(prompt)
    pair.compared(warm)
    answer = _killed_during_a_load(pair, prompt)
    if is_recomputed:
        outcome.compare("after the loss", answer, expected)
    outcome.check("the decode engine later", pair.alone(prompt), expected)
    outcome.complaints += pair.leftovers("decode")
    outcome.check("the request's end", answer.reason, "length" if is_recomputed else "error")


def reset(pair, outcome):
    """As for new weights, the prefill engine takes its offers back at once: the decode engine computes the prompt."""
    prompt = prompt_of(600, seed=5)
    expected = pair.alone(prompt)
    _compare(pair, outcome, "before", prompt, expected)
    pair.decode.forget()
    offer = pair.prefilled(prompt)
    began_s = time.monotonic()
    pair.prefill.forget(has_tier=True)
    outcome.check("at once", time.monotonic() - began_s < AT_ONCE_S, True)
    answer = pair.decode.ask(prompt, offer)
    outcome.compare("after", answer, expected)
    outcome.check("computed", answer.computed_tokens, len(prompt))
    pair.decode.forget()
    _compare(pair, outcome, "a later offer", prompt, expected)


def restarted(pair, outcome):
    """The prefill engine is killed and started again under its name and port."""
    prompt = prompt_of(600, seed=3)
    expected = pair.alone(prompt)
    _compare(pair, outcome, "before", prompt, expected)
    pair.decode.forget()
    pair.restart_prefill()
    for number in range(3):
        _compare(pair, outcome, f"request {number} after", prompt, expected)
        pair.decode.forget()


def consumer_gone(pair, outcome):
    """The decode engine dies before it reads: the prefill engine's blocks are free once the lease ends."""
    prompt = prompt_of(100)
    _compare(pair, outcome, "before", prompt, pair.alone(prompt))
    pair.prefilled(prompt_of(900, seed=4))
    pair.decode.kill()
    outcome.complaints += pair.leftovers("prefill")


def reclaimed(pair, outcome):
    """Offers that nobody reads fill half of the prefill engine's cache: it takes the oldest back, and who comes late
    computes the prompt.
    """
    prompts = [prompt_of(600, seed=40 + number) for number in range(5)]
    expected = [pair.alone(prompt) for prompt in prompts]
    pair.compared(prompt_of(40))
    half = pair.specs[0].cache_bytes // BLOCK_BYTES // 2
    offers = [pair.prefilled(prompt) for prompt in prompts]
    has_room = becomes(lambda: pair.prefill.call("report")["used_blocks"] <= half)
    outcome.check("half of the cache is free", has_room)
    # ten blocks each
    num_late = len(prompts) - half // 10
    for number, (prompt, offer, tokens) in enumerate(zip(prompts, offers, expected, strict=True)):
        answer = pair.decode.ask(prompt, offer)
        outcome.compare(f"offer {number}", answer, tokens)
        is_loaded = answer.computed_tokens in {0, 1}
        outcome.check(f"offer {number} is loaded", is_loaded, number >= num_late)


def chat(pair, outcome):
    """Several turns: the decode engine's blocks of one turn are read by the prefill engine for the next."""
    conversation = prompt_of(500, seed=5)
    offer = {}
    turns = []
    for turn in range(3):
        pair.prefill.forget()
        prefill = pair.prefill.ask(
            conversation,
            {**offer, "do_remote_decode": True, "do_remote_prefill": False},
            max_tokens=1,
        )
        if turn and not prefill.cached_tokens:
            outcome.complaints.append(f"turn {turn}: the prefill engine read nothing")
        answer = pair.decode.ask(conversation, prefill.params)
        turns.append((conversation, answer))
        offer = dict(answer.params or {})
        conversation = conversation + answer.tokens + prompt_of(50, seed=turn)
    if not offer:
        outcome.complaints.append("the decode engine offers no blocks for the next turn")
    # the decode engine still holds its last offer, so the prefill engine gives the right tokens
    for turn, (prompt, answer) in enumerate(turns):
        pair.prefill.forget()
        outcome.compare(f"turn {turn}", answer, pair.prefill.ask(prompt).tokens)


def chat_without_reasoning(pair, outcome):
    """Twelve turns after the first, whose template ends a prompt with the beginning of an answer, and leaves that and
    the reasoning out later: the prefill engine reads all but a few of the tokens before.
    """
    history, opening = prompt_of(200, seed=6), prompt_of(3, seed=7)
    offer, turns, unchanged = {}, [], 0
    for turn in range(13):
        prompt = history + opening
        pair.prefill.forget()
        prefill = pair.prefill.ask(
            prompt, {**offer, "do_remote_decode": True, "do_remote_prefill": False}, max_tokens=1
        )
        if turn:
            read = prefill.cached_tokens
            few = range(unchanged - len(opening), unchanged + 1)
            outcome.check(f"turn {turn}: {read} of {unchanged} tokens read", read in few)
        answer = pair.decode.ask(prompt, prefill.params)
        turns.append((prompt, answer))
        offer = dict(answer.params or {})
        unchanged = len(history)
        history = history + answer.tokens[-4:] + prompt_of(20, seed=f"turn {turn}")
    for turn, (prompt, answer) in enumerate(turns):
        pair.prefill.forget()
        outcome.compare(f"turn {turn}", answer, pair.prefill.ask(prompt).tokens)


def _in_tier(pair, outcome, prompt, cached):
    outcome.check("loaded into the tier", pair.fill_tier(prompt, cached), "")
    pair.decode.call("loads")


def from_both(pair, outcome):
    """The decode engine's tier has a prefix of a prompt, and the prefill engine the rest."""
    length = 600
    block = pair.specs[1].block_size
    pair.decode.ask(prompt_of(40), pair.prefilled(prompt_of(40)))
    for cached, is_streamed in product((0, block, 512, 599 // block * block), (False, True)):
        prompt = prompt_of(length, seed=f"{cached}-{is_streamed}")
        expected = pair.prefill.ask(prompt).tokens
        _in_tier(pair, outcome, prompt, cached)
        what = f"{cached} of {length} in the tier"
        if is_streamed:
            answer, difference = pair.streamed(prompt)
            outcome.compare(f"{what}, streamed", answer, expected)
            outcome.compare_bytes(f"{what}, streamed", difference)
        else:
            _compare(pair, outcome, what, prompt, expected)
        loads = pair.decode.call("loads")
        tier_blocks = [cached // block] * bool(cached)
        outcome.check(what, (loads["remote"], loads["tier"]), ([cached], tier_blocks))


def from_tier_alone(pair, outcome):
    """vLLM's own `MultiConnector` takes only the tier's prefix: the decode engine computes the rest, and the prefill
    engine frees its blocks.
    """
    length, cached = 600, 448
    prompt = prompt_of(length, seed=1)
    expected = pair.prefill.ask(prompt).tokens
    _in_tier(pair, outcome, prompt, cached)
    answer = pair.decode.ask(prompt, pair.prefilled(prompt))
    outcome.compare("after the tier's prefix", answer, expected)
    outcome.check("computed", answer.computed_tokens, length - cached)
    outcome.check("loads", pair.decode.call("loads")["remote"], [])
    other = prompt_of(length, seed=2)
    _compare(pair, outcome, "without a prefix", other, pair.prefill.ask(other).tokens)


def killed_beside_tier(pair, outcome):
    """The prefill engine dies while its range is read: the decode engine computes that range, not the tier's."""
    length, cached = 2000, 1600
    prompt = prompt_of(length, seed=2)
    expected = pair.prefill.ask(prompt).tokens
    _in_tier(pair, outcome, prompt, cached)
    answer = _killed_during_a_load(pair, prompt)
    outcome.compare("after the loss", answer, expected)
    outcome.check("computed", answer.computed_tokens, length - cached)
    outcome.check("tier", pair.decode.call("loads")["tier"], [cached // pair.specs[1].block_size])
    outcome.complaints += pair.leftovers("decode")


def aborted_beside_tier(pair, outcome):
    """Requests that are aborted while one connector or both load them leave nothing held."""
    prompt, cached = prompt_of(900, seed=1), 448
    expected = pair.prefill.ask(prompt).tokens
    _in_tier(pair, outcome, prompt, cached)
    for is_stopped in (False, True):
        offer = pair.prefilled(prompt)
        if is_stopped:
            pair.prefill.pause()
        request = pair.decode.submit(prompt, offer)
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not (loads := pair.decode.call("loads"))["tier"] and time.monotonic() < deadline:
            time.sleep(0.001)
        pair.decode.call("abort", request)
        pair.prefill.resume()
        outcome.check("both load", len(loads["remote"]), 1)
        outcome.complaints += pair.leftovers()
    _compare(pair, outcome, "after the aborts", prompt, expected)
