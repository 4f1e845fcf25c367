"""The scenarios of the cases: each drives a pair of engines."""

import json
import re
import secrets
import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from kvconnector import errors
from kvconnector.integrations.sglang.transfers import next_room
from tests.sglang.harness import faults
from tests.sglang.harness.dump import compare
from tests.sglang.harness.engine import Engine, Request
from tests.sglang.harness.model import FIRST_WORD, IMAGE_PROMPT, adapters_of, image_of
from tests.sglang.harness.spans import SpanServer
from tests.support.keys import keyed_controls, variables_of
from tests.support.spans import HEADERS, TRACE_ID
from tests.vllm.harness.pair import prompt_of
from tests.vllm.harness.report import becomes

LENGTHS = (7, 16, 64, 79, 130, 500)
"""Prompt lengths: less than a page, a page, a chunk, a chunk and less than one more page, several chunks."""
EXAMPLES = Path(__file__).parents[3] / "examples"
SETTLE_S = 0.3
PROMPT_S = 5.0
QUIET_S = 3.0
ENDLESS_TOKENS = 3000
SOON = {
    "KVCONNECTOR_LEASE_DURATION_S": "6",
    "KVCONNECTOR_LEASE_EARLY_FOLLOW_S": "6",
    "KVCONNECTOR_PEER_HEARTBEAT_INTERVAL_S": "1",
    "KVCONNECTOR_PEER_TIMEOUT_S": "3",
    "KVCONNECTOR_PEER_HELLO_TIMEOUT_S": "3",
}
"""Deadlines with which cases of loss end soon."""
ROUNDS = 9
ANSWER_TOKENS = 40
DRAFTS = {
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
    "decode-log-interval": 1,
}
"""An engine that drafts with its model's own layer for that, three tokens at a time."""


def tokens(pair, outcome):
    """Prompts of several lengths, one after the other, get the right tokens."""
    for length in LENGTHS:
        pair.ask(outcome, f"{length} tokens", prompt_of(length))


def graphs(pair, outcome):
    """Steps that replay CUDA graphs give the tokens of an engine without them, alone and several at once."""
    for length in LENGTHS:
        pair.ask(outcome, f"{length} tokens", prompt_of(length), max_tokens=ANSWER_TOKENS)
    crowd(pair, outcome)
    for side, work in (("prefill", "Prefill"), ("decode", "Decode")):
        steps = re.findall(rf"{work} batch.*cuda graph: (\w+)", getattr(pair, side).log_text())
        wanted = (
            pair.specs[side].options.get(f"cuda-graph-backend-{side}", "disabled") != "disabled"
        )
        outcome.figures[f"{side}: steps by graph"] = f"{steps.count('True')} of {len(steps)}"
        outcome.check(f"{side} steps replay graphs", "True" in steps, wanted)


def tokens_on_nodes(pair, outcome):
    """Prompts get the right tokens, one after the other and at once, where an engine has ranks on two hosts."""
    tokens(pair, outcome)
    crowd(pair, outcome)
    for log in (log for engine in (pair.prefill, pair.decode) for log in engine.logs):
        outcome.check(f"{log.stem} has a rank", log.read_text().count("kvconnector moves"), 1)


def drafts(pair, outcome):
    """A decode engine that drafts gives the tokens that one engine alone gives, with drafts and without them."""
    spec = pair.specs["decode"]
    log = spec.log.with_name("drafting.log")
    log.unlink(missing_ok=True)
    alone = dict.fromkeys(name for name in spec.options if name.startswith("disaggregation"))
    prompts = [prompt_of(length, seed=11) for length in LENGTHS]
    expected = [pair.alone(prompt, max_tokens=ANSWER_TOKENS) for prompt in prompts]
    drafting = Engine(replace(spec, log=log, options={**spec.options, **alone}))
    try:
        drafting.wait_until_ready()
        found = [drafting.ask(prompt, max_tokens=ANSWER_TOKENS).tokens for prompt in prompts]
    finally:
        drafting.kill()
    outcome.check("one engine that drafts", found, expected)
    outcome.figures["accepted_alone"] = _accepted(outcome, drafting)
    for prompt in prompts:
        pair.ask(outcome, f"{len(prompt)} tokens", prompt, max_tokens=ANSWER_TOKENS)
    asked = [pair.submit(prompt, max_tokens=ANSWER_TOKENS) for prompt in prompts]
    for each, right in zip(asked, expected, strict=True):
        pair.compare(outcome, f"{len(each.prompt)} tokens, at once", each, right)
    pair.check_idle(outcome)
    outcome.figures["accepted"] = _accepted(outcome, pair.decode)


def _accepted(outcome, engine):
    """Return how many tokens an engine's steps gave at the most, per request, and complain if it was one."""
    lines = re.findall(r"accept len: ([\d.]+)", engine.log_text())
    most = max(map(float, lines), default=0.0)
    outcome.check("drafts were accepted", most > 1)
    return most


def prefix_hits(pair, outcome):
    """The engines do not transfer tokens that one or both of them already have, and the rest is right."""
    prompt = prompt_of(200, seed=1)
    pair.ask(outcome, "first", prompt)
    pair.ask(outcome, "the same again", prompt)
    pair.ask(outcome, "longer", prompt + prompt_of(70, seed=2))
    pair.ask(outcome, "another tail", prompt[:100] + prompt_of(50, seed=3))
    pair.prefill.is_idle()
    pair.ask(outcome, "in the decode engine's cache alone", prompt + prompt_of(30, seed=4))
    pair.decode.is_idle()
    pair.ask(outcome, "in the prefill engine's cache alone", prompt + prompt_of(20, seed=5))


def window_hits(pair, outcome):
    """Prompts with common beginnings longer than the window get the right tokens, whichever slots of the window the
    engines' trees have kept: those of a prompt's end, of a turn's answer, or none where the beginnings part.
    """
    base = prompt_of(300, seed=70)
    pair.ask(outcome, "first", base)
    pair.ask(outcome, "the same again", base)
    pair.ask(outcome, "longer", base + prompt_of(70, seed=71))
    # where these end, or part from it, the decode engine never had the window
    for count in (250, 160, 97):
        _ask_for_tokens(pair, outcome, base[:count])
        _ask_for_tokens(pair, outcome, base[:count] + prompt_of(30, seed=count))
    # after an answer of one token no slot of the window has been given up, also those that nothing was transferred to
    for seed, length in enumerate((300, 304, 333)):
        once = prompt_of(length, seed=90 + seed)
        _ask_for_tokens(pair, outcome, once, max_tokens=1)
        for count in (length - 1, length - 32, 224, 160):
            _ask_for_tokens(pair, outcome, once[:count] + prompt_of(20, seed=count))
    # answers longer than the window: its first tokens have left it when they are cached
    turn = base[:200] + prompt_of(20, seed=72)
    for number in range(3):
        (answer,) = _ask_for_tokens(pair, outcome, turn, max_tokens=150)
        _ask_for_tokens(pair, outcome, turn + answer[:40])
        turn = turn + answer + prompt_of(9, seed=73 + number)
    pair.prefill.is_idle()
    _ask_for_tokens(pair, outcome, base + prompt_of(30, seed=76))
    pair.decode.is_idle()
    _ask_for_tokens(pair, outcome, base + prompt_of(20, seed=77))
    # many at once, so that slots are evicted and taken again
    starts = [base[: 100 + 50 * number] for number in range(4)] * 2
    prompts = [start + prompt_of(40, seed=80 + at) for at, start in enumerate(starts)]
    _ask_for_tokens(pair, outcome, *prompts, max_tokens=80)
    hits = [int(count) for count in re.findall(r"cached prefix: (\d+)", pair.decode.log_text())]
    outcome.figures["cached tokens"] = sum(hits)
    outcome.check("the decode engine had cached beginnings", sum(map(bool, hits)) > 5)
    outcome.check("windows have a pool", "hybrid_swa=True" in pair.decode.log_text())
    pair.check_idle(outcome)


def _ask_for_tokens(pair, outcome, *prompts, **options):
    """Ask for prompts at once, and compare tokens alone: what the decode engine has cached it may have computed itself,
    in steps of other lengths, which differ in the last bits. Returns the right tokens of each.
    """
    expected = [pair.alone(prompt, **options) for prompt in prompts]
    asked = [pair.submit(prompt, **options) for prompt in prompts]
    for each, right in zip(asked, expected, strict=True):
        answer = each.decode.answer()
        what = f"{len(each.prompt)} tokens, {options}"
        outcome.check(what, [answer.error, each.prefill.answer().error], ["", ""])
        outcome.compare(what, answer, right)
    return expected


def crowd(pair, outcome):
    """More requests at once than an engine runs get the right tokens."""
    prompts = [prompt_of(40 + 37 * number, seed=6) for number in range(8)]
    expected = [pair.alone(prompt) for prompt in prompts]
    asked = [pair.submit(prompt) for prompt in prompts]
    for each, right in zip(asked, expected, strict=True):
        pair.compare(outcome, f"{len(each.prompt)} tokens", each, right)
    pair.check_idle(outcome)


def split_prompts(pair, outcome):
    """The ranks of a prefill engine with context parallelism compute a part of each prompt, and have all of it."""
    crowd(pair, outcome)
    is_split = "prompts are split among ranks" in pair.prefill.log_text()
    outcome.check("the ranks split prompts", is_split)


def split_layers(pair, outcome):
    """The same with ranks that keep some of the layers each, and lend them to one another."""
    split_prompts(pair, outcome)
    tokens(pair, outcome)
    plans = re.findall(r"Layer shard plan .* local=(\[\d+,\d+\))", pair.prefill.log_text())
    outcome.check("the ranks have layers of their own", len({*plans}), 2)


def metrics(pair, outcome):
    """Both engines' metrics, `kvconnector top` and the dashboard's queries show what was transferred."""
    crowd(pair, outcome)
    urls = [f"http://127.0.0.1:{engine.port}" for engine in (pair.prefill, pair.decode)]
    command = [sys.executable, "-m", "kvconnector", "top", "--count", "2", "--interval", "0.5"]
    shown = subprocess.run([*command, "--json", *urls], capture_output=True, text=True, check=False)
    outcome.check(f"top: {shown.stderr}", shown.returncode, 0)
    looks = [json.loads(line) for line in shown.stdout.splitlines()]
    outcome.check("looks", len(looks), 2)
    prefill, decode = looks[-1].values()
    outcome.check("the prefill engine", [*prefill], [f"sglang-prefill-{pair.bootstrap_port}"])
    (loads,) = decode.values()
    outcome.check("loads", sum(loads["loads"].values()), outcome.prompts)
    outcome.check("bytes", loads["nbytes"] > 0)
    for name, engine in (prefill | decode).items():
        idle = {"in_flight": 0, "held": 0, "expired": 0}
        outcome.check(name, {each: engine[each] for each in idle}, idle)
        outcome.check(f"failures of {name}", sum(engine["failures"].values()), 0)
    table = subprocess.run([*command, *urls], capture_output=True, text=True, check=False).stdout
    outcome.check("top names the engines", all(name in table for name in prefill | decode))
    pages = "".join(
        Request(engine.port, "/metrics").text() for engine in (pair.prefill, pair.decode)
    )
    dashboard = (EXAMPLES / "monitoring/dashboard.json").read_text()
    asked = {*re.findall(r"(?<!:)\bkvconnector_\w+", dashboard)}
    outcome.check(
        "the dashboard asks for", [each for each in sorted(asked) if each not in pages], []
    )


def spans(pair, outcome):
    """Both engines' transfers are spans in the trace of their request, where SGLang's own spans are."""
    with closing(SpanServer()) as server:
        traced = {"enable-trace": True, "otlp-traces-endpoint": server.url}
        for side in ("prefill", "decode"):
            pair.restart(side, traced, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf")
        pair.ask(outcome, "not in a trace", prompt_of(60))
        asked = pair.submit(prompt_of(90), headers=HEADERS)
        outcome.check(
            "answered", [asked.decode.answer().error, asked.prefill.answer().error], ["", ""]
        )
        name = f"room-{asked.room}"

        def kinds():
            ours = [each for each in server.found if each[2].get("kvconnector.request") == name]
            return {kind: trace for kind, trace, _ in ours}

        becomes(lambda: len(kinds()) == 2)
        expected = dict.fromkeys(("kvconnector.hold", "kvconnector.load"), TRACE_ID)
        outcome.check("spans of the request", kinds(), expected)
        others = {kind for kind, trace, _ in server.found if trace == TRACE_ID} - {*expected}
        outcome.check(
            "SGLang's spans are in its trace", any("kvconnector" not in each for each in others)
        )
    pair.check_idle(outcome)


def retraction(pair, outcome):
    """The decode engine has no room for all answers: it retracts requests and resumes them."""
    prompts = [prompt_of(100, seed=20 + number) for number in range(3)]
    expected = [pair.alone(prompt, max_tokens=200) for prompt in prompts]
    asked = [pair.submit(prompt, max_tokens=200) for prompt in prompts]
    for number, (each, right) in enumerate(zip(asked, expected, strict=True)):
        pair.compare(outcome, f"request {number}", each, right)
    outcome.check("retracted", "Retract requests" in pair.decode.log_text())
    pair.check_idle(outcome)


def recomputed(pair, outcome):
    """The decode engine retracts its requests, as before new weights, and has their prompts computed again, twice."""
    _retract(pair, outcome, [{}] * 3)


def _retract(pair, outcome, fields):
    """Retract one request for each of the `fields`, twice."""
    prompts = [prompt_of(100 + 33 * number, seed=20 + number) for number in range(len(fields))]
    both = [*zip(prompts, fields, strict=True)]
    expected = [pair.alone(prompt, max_tokens=1000, **more) for prompt, more in both]
    asked = [pair.submit(prompt, max_tokens=1000, **more) for prompt, more in both]
    for each in asked:
        outcome.check("computed", not each.prefill.answer().error)
    rooms = [each.room for each in asked]
    _wait_until_read(pair, outcome, rooms)
    for _ in range(2):
        pair.decode.post("/pause_generation", {"mode": "retract"})
        pair.decode.post("/continue_generation", {})
        rooms = [next_room(room) for room in rooms]
        _wait_until_read(pair, outcome, rooms)
    for number, (each, right) in enumerate(zip(asked, expected, strict=True)):
        answer = each.decode.answer()
        outcome.check(f"request {number}: {answer.error}", not answer.error)
        outcome.compare(f"request {number}", answer, right)
        for room in (each.room, next_room(each.room), next_room(next_room(each.room))):
            outcome.compare_bytes(f"request {number}", compare(pair.dumps, room))
    pair.check_idle(outcome)


def _wait_until_read(pair, outcome, rooms):
    """Wait until the decode engine has all of these prompts: SGLang retracts no request before."""
    deadline = time.monotonic() + PROMPT_S * len(rooms)
    while not all(any(pair.dumps.glob(f"{room}.decode.*.dump")) for room in rooms):
        if time.monotonic() > deadline:
            outcome.complaints.append("a prompt was not read")
            break
        time.sleep(0.01)


def named(pair, outcome):
    """A router names the prefill rank to both engines, whatever the room says."""
    prompts = [prompt_of(50 + 31 * number, seed=30 + number) for number in range(6)]
    expected = [pair.alone(prompt) for prompt in prompts]
    asked = []
    for number, prompt in enumerate(prompts):
        rank = number % 2
        named = {"disagg_prefill_dp_rank": rank}
        fields = {"prefill": {"routed_dp_rank": rank, **named}, "decode": named}
        asked.append(
            pair.submit(prompt, per_side=fields, room=2 * secrets.randbits(60) + number // 3)
        )
    for each, right in zip(asked, expected, strict=True):
        pair.compare(outcome, f"{len(each.prompt)} tokens", each, right)
    pair.check_idle(outcome)


def against_room(pair, outcome):
    """A request that was sent to another rank than its room's, without a word to the decode engine, fails at once."""
    prompt = prompt_of(70, seed=50)
    pair.ask(outcome, "before", prompt)
    started = time.monotonic()
    fields = {"prefill": {"routed_dp_rank": 1}}
    asked = pair.submit(prompt, per_side=fields, room=2 * secrets.randbits(60) + 2)
    answer = asked.prefill.answer()
    took_s = time.monotonic() - started
    _check_failed(outcome, "against its room", answer, "")
    outcome.check(
        "it failed at once", took_s < PROMPT_S and "follow_bootstrap_room" in answer.error
    )
    asked.decode.answer()
    pair.check_idle(outcome)
    pair.ask(outcome, "afterwards", prompt)


def late_prefill(pair, outcome):
    """The decode engine is asked seconds before the prefill engine."""
    prompt, room = prompt_of(130, seed=51), secrets.randbits(62) + 1
    expected = pair.alone(prompt)
    decode = pair.submit(prompt, ("decode",), room=room)
    time.sleep(PROMPT_S)
    prefill = pair.submit(prompt, ("prefill",), room=room)
    pair.compare(outcome, "asked later", replace(decode, prefill=prefill.prefill), expected)
    pair.check_idle(outcome)


def crossed(pair, outcome):
    """Each engine has memory for one request, and the prefill engine is asked for the last one first."""
    prompts = {secrets.randbits(62) + 1: prompt_of(300, seed=40 + number) for number in range(2)}
    expected = [pair.alone(prompt) for prompt in prompts.values()]
    at_decode = [pair.submit(prompt, ("decode",), room=room) for room, prompt in prompts.items()]
    time.sleep(SETTLE_S)
    at_prefill = [
        pair.submit(prompt, ("prefill",), room=room)
        for room, prompt in reversed([*prompts.items()])
    ]
    asked = zip(at_decode, reversed(at_prefill), expected, strict=True)
    for decode, prefill, right in asked:
        pair.compare(
            outcome, f"room {decode.room}", replace(decode, prefill=prefill.prefill), right
        )
    pair.check_idle(outcome)


def mixed_up(pair, outcome):
    """A router gives two requests one room: the decode engine does not answer with another prompt's cache."""
    one, other = prompt_of(90, seed=42), prompt_of(90, seed=43)
    room = secrets.randbits(62) + 1
    decode = pair.submit(other, ("decode",), room=room).decode
    pair.submit(one, ("prefill",), room=room).prefill.answer()
    answer, log = decode.answer(), pair.decode.log_text()
    _check_failed(outcome, "a different prompt", answer, log, errors.OtherPromptError)
    outcome.check("where to try again", "(retry: never)" in answer.error)
    room, expected = secrets.randbits(62) + 1, pair.alone(one)
    first, second = (pair.submit(prompt, room=room) for prompt in (one, other))
    pair.compare(outcome, "the first of a room", first, expected)
    answers = second.prefill.answer(), second.decode.answer()
    outcome.check("the second fails on both sides", all(each.error for each in answers))
    said = "draw a new one for each request" in answers[1].error
    outcome.check(f"and says why: {answers[1].error}", said)
    pair.check_idle(outcome)
    pair.ask(outcome, "afterwards", other)


def failing_stages(pair, outcome):
    """What one pipeline stage of the decode engine fails, or each of them, fails in all: none keeps its pages, and none
    computes it, so the next requests get theirs.
    """
    lengths = [int(each) for each in faults.IN_STAGES[faults.VARIABLE].split(",")]
    pair.ask(outcome, "at first", prompt_of(90))
    for number in range(5):  # of which the decode engine has no room for all
        for stage, length in enumerate(lengths):
            asked = pair.submit(prompt_of(length, seed=number))
            _check_failed(outcome, f"failed by stage {stage}", asked.decode.answer(), "")
            asked.prefill.answer()
        room = secrets.randbits(62) + 1
        decode = pair.submit(prompt_of(90, seed=number), ("decode",), room=room).decode
        pair.submit(prompt_of(90, seed=number + 5), ("prefill",), room=room).prefill.answer()
        _check_failed(outcome, "failed by all stages", decode.answer(), "")
        pair.ask(outcome, "afterwards", prompt_of(90, seed=number + 10))
    pair.check_idle(outcome)


def adapters(pair, outcome):
    """Adapters, which have other ids in each engine, are compared by their names, and stay at a retraction."""
    pair.load_adapters(adapters_of(pair.model))
    prompt, names = prompt_of(90, seed=42), (None, "sql", "poems")
    answers = {tuple(pair.alone(prompt, lora_path=name)) for name in names}
    outcome.check("each adapter gives an answer of its own", len(answers) == len(names))
    for name in names:
        pair.ask(outcome, f"adapter {name}", prompt, lora_path=name)
    for computed, wanted in (("sql", "poems"), ("sql", None), (None, "poems")):
        fields = {"prefill": {"lora_path": computed}, "decode": {"lora_path": wanted}}
        asked = pair.submit(prompt, per_side=fields)
        asked.prefill.answer()
        answer, log = asked.decode.answer(), pair.decode.log_text()
        what = f"{computed} for {wanted}"
        _check_failed(outcome, what, answer, log, errors.OtherPromptError)
        outcome.check(f"{what}: names what differs", "adapter" in answer.error)
    _retract(pair, outcome, [{"lora_path": name} for name in names])


def _words(count, seed):
    """Return a prompt without tokens that stand for images."""
    return [max(token, FIRST_WORD) for token in prompt_of(count, seed)]


def images(pair, outcome):
    """Prompts with images get the right tokens, with what one or both engines have cached of equal ones and without it,
    and never the answer to another image.
    """
    one, other = {"image_data": [image_of(1)]}, {"image_data": [image_of(2)]}
    both = {"image_data": [image_of(1), image_of(2)]}
    prompt = _words(30, seed=1) + IMAGE_PROMPT + _words(40, seed=2)
    twice = prompt + IMAGE_PROMPT + _words(9, seed=3)
    asked = {"one": (prompt, one), "the other": (prompt, other), "both": (twice, both)}
    asked["both, the other way round"] = twice, {"image_data": both["image_data"][::-1]}
    answers = [pair.alone(text, **media) for text, media in asked.values()]
    outcome.check("each image has an answer of its own", len({*map(tuple, answers)}), len(answers))
    for what, (text, media) in asked.items():
        pair.ask(outcome, what, text, **media)
    for what, (text, media) in asked.items():
        pair.ask(outcome, f"{what}, cached", text, **media)
    longer = prompt + _words(50, seed=4)
    pair.ask(outcome, "one, longer", longer, **one)
    pair.prefill.is_idle()
    pair.ask(outcome, "one, in the decode engine's cache alone", longer, **one)
    pair.decode.is_idle()
    pair.ask(outcome, "the other, in the prefill engine's cache alone", longer, **other)
    at_once = [(longer[: 100 + 3 * at], media) for at, media in enumerate((one, other) * 3)]
    expected = [pair.alone(text, **media) for text, media in at_once]
    submitted = [pair.submit(text, **media) for text, media in at_once]
    for each, right in zip(submitted, expected, strict=True):
        pair.compare(outcome, "at once", each, right)
    for computed, wanted, said in (
        (one, other, "images"),
        (one, {}, "a longer"),
        ({}, one, "a shorter"),
    ):
        # without an image the prompt has its place all the same, as one token
        mixed = pair.submit(prompt, per_side={"prefill": computed, "decode": wanted})
        mixed.prefill.answer()
        answer = mixed.decode.answer()
        outcome.check(f"another image: {answer.error}", answer.error != "" and said in answer.error)
    log = pair.decode.log_text()
    outcome.check("it names the remedy", errors.OtherPromptError.remedy in log)
    hits = [int(count) for count in re.findall(r"cached prefix: (\d+)", pair.decode.log_text())]
    has_cache = "disaggregation-decode-enable-radix-cache" in pair.specs["decode"].options
    outcome.check("the decode engine had cached beginnings", any(hits), has_cache)
    pair.check_idle(outcome)
    pair.ask(outcome, "afterwards", prompt, **other)


def malformed(pair, outcome):
    """Requests whose fields no engine can use get an error, and others go on."""
    prompt = prompt_of(90, seed=41)
    for field, value in MALFORMED:
        asked = pair.submit(prompt, ("decode",), **{field: value})
        answer = asked.decode.answer()
        _check_failed(outcome, f"{field}={value!r} at the decode engine", answer, "")
    for side in ("prefill", "decode"):
        for field, options in TOO_MUCH.items():
            answer = getattr(pair.submit(prompt, (side,), **options), side).answer()
            _check_failed(outcome, f"{field} at the {side} engine", answer, "")
            outcome.check(f"{field}: its name", field in answer.error)
    for value in (0, -1, 1 << 63):
        asked = pair.submit(prompt, ("prefill",), bootstrap_room=value)
        answer = asked.prefill.answer()
        _check_failed(outcome, f"room {value} at the prefill engine", answer, "")
    pair.check_idle(outcome)
    pair.ask(outcome, "afterwards", prompt)


def weights(pair, outcome):
    """While only one server has new weights no prompt is decoded. Afterwards prompts are, and their caches."""
    prompt = prompt_of(90, seed=44)
    pair.ask(outcome, "before", prompt)
    for number, (first, second) in enumerate((("prefill", "decode"), ("decode", "prefill"))):
        new = {"model_path": str(pair.model), "weight_version": f"step-{number}"}
        getattr(pair, first).post("/update_weights_from_disk", new)
        asked = pair.submit(prompt)
        asked.prefill.answer()
        answer, log = asked.decode.answer(), pair.decode.log_text()
        what = f"the {first} server alone has new weights"
        _check_failed(outcome, what, answer, log, errors.IncompatiblePeerError)
        outcome.check(f"{what}: {answer.error}", "same weight_version" in answer.error)
        pair.check_idle(outcome)
        getattr(pair, second).post("/update_weights_from_disk", new)
        pair.ask(outcome, "both have", prompt)
    expected = pair.alone(prompt, max_tokens=1000)
    asked = pair.submit(prompt, max_tokens=1000)
    _wait_until_read(pair, outcome, [asked.room])
    pair.decode.post("/pause_generation", {"mode": "retract"})
    new = {"model_path": str(pair.model), "weight_version": "step-2"}
    for engine in (pair.prefill, pair.decode):
        engine.post("/update_weights_from_disk", new)
    pair.decode.post("/continue_generation", {})
    _wait_until_read(pair, outcome, [next_room(asked.room)])
    outcome.compare("retracted meanwhile", asked.decode.answer(), expected)
    pair.check_idle(outcome)


def logprobs(pair, outcome):
    """The first token's log probabilities are transferred with it."""
    pair.ask(outcome, "with log probabilities", prompt_of(90), return_logprob=True)


def times(pair, outcome):
    """Measure the first answer, and then first tokens at the decode engine and at one engine alone.

    Prompts of one chunk and of eight are new to the engines, and each is asked once, by both ways in turn.
    """
    figures = outcome.figures
    figures["first contact s"] = _seconds(pair.submit(prompt_of(64, seed=90), max_tokens=1).decode)
    for chunks in (1, 8):
        found = {"alone": [], "pair": []}
        for number in range(ROUNDS):
            prompt = prompt_of(64 * chunks - 3, seed=100 + number)
            started = time.monotonic()
            expected = pair.alone(prompt, max_tokens=1)
            found["alone"].append(time.monotonic() - started)
            asked = pair.submit(prompt, max_tokens=1)
            found["pair"].append(_seconds(asked.decode))
            outcome.prompts += 1
            outcome.equal += asked.prefill.answer().tokens == expected
        for name, seconds in found.items():
            figures[f"{name}, {chunks} chunks, ms"] = round(statistics.median(seconds) * 1e3, 1)
    outcome.check("first tokens equal to one engine's alone", outcome.equal, outcome.prompts)


def _seconds(request):
    started = time.monotonic()
    request.answer()
    return round(time.monotonic() - started, 4)


def abort(pair, outcome):
    """Requests that are aborted before, during and after their transfer leave nothing held."""
    prompt = prompt_of(300, seed=7)
    pair.ask(outcome, "before the aborts", prompt)
    pair.forget()
    for what, side in (("alone", "prefill"), ("alone", "decode")):
        asked = pair.submit(prompt, to=(side,))
        time.sleep(SETTLE_S)
        getattr(pair, side).abort(f"{side}-{asked.name}")
        answer = getattr(asked, side).answer()
        _check_failed(outcome, f"aborted at the {side} engine {what}", answer, "")
    for side in ("prefill", "decode"):
        asked = pair.submit(prompt, max_tokens=200)
        getattr(pair, side).abort(f"{side}-{asked.name}")
        for request in (asked.prefill, asked.decode):
            request.answer()
    pair.check_idle(outcome)
    pair.ask(outcome, "after the aborts", prompt)


def kill(pair, outcome, side, other):
    """One engine dies while the other has a request for it. Only that request fails, in time, by an error of ours."""
    prompt, left = prompt_of(400, seed=8), getattr(pair, other)
    pair.ask(outcome, "before", prompt)
    pair.forget()
    getattr(pair, side).pause()
    asked = pair.submit(prompt, to=(other,))
    time.sleep(SETTLE_S)
    getattr(pair, side).kill()
    answer = getattr(asked, other).answer()
    _check_failed(outcome, "its request", answer, left.log_text(), *ERRORS)
    pair.check_idle(outcome, other)
    pair.restart(side)
    pair.ask(outcome, "after its restart", prompt)


def lost_node(pair, outcome, side, other):
    """One host of an engine is cut off before a request. The other engine, which needs the rank there, fails it with an
    error of ours, holds nothing, and goes on once the engine has been started again.
    """
    prompt, left = prompt_of(400, seed=8), getattr(pair, other)
    node = getattr(pair, side).spec.nodes.hosts[-1]
    pair.ask(outcome, "before", prompt)
    pair.forget()
    node.cut()
    answer = getattr(pair.submit(prompt), other).answer()
    _check_failed(outcome, "its request", answer, left.log_text(), *LOSSES)
    pair.check_idle(outcome, other)
    node.restore()
    pair.restart(side)
    pair.ask(outcome, "after its restart", prompt)


def steps_at_a_loss(pair, outcome, *, dies=True):
    """While a decode rank's prefill engine dies, or falls silent, the other rank, which shares each step with it, goes
    on.
    """
    for seed in range(4):  # all ranks have met, and the steps are compiled
        fields = {"decode": {"routed_dp_rank": seed % 2}}
        room = 2 * secrets.randbits(60) + 2 + seed // 2
        asked = pair.submit(prompt_of(90, seed=seed), per_side=fields, room=room)
        outcome.check("before", asked.decode.answer().error, "")
        asked.prefill.answer()
    going = pair.submit(
        prompt_of(80, seed=60),
        per_side={"decode": {"routed_dp_rank": 1, "stream": True}},
        max_tokens=ENDLESS_TOKENS,
    )
    arrivals = []
    reader = threading.Thread(target=lambda: arrivals.extend(going.decode.arrivals()))
    reader.start()
    going.prefill.answer()
    time.sleep(QUIET_S)
    lost_s = time.monotonic()
    asked = pair.submit(prompt_of(500, seed=61), per_side={"decode": {"routed_dp_rank": 0}})
    time.sleep(SETTLE_S)
    pair.prefill.pause()
    time.sleep(SETTLE_S)
    if dies:
        pair.prefill.kill()
    answer = asked.decode.answer()
    failed_s = time.monotonic()
    time.sleep(QUIET_S)
    pair.decode.abort(f"decode-{going.name}")
    reader.join()
    _check_failed(outcome, "its request", answer, pair.decode.log_text(), *ERRORS)
    outcome.figures |= {
        "longest step before the loss, ms": _longest_ms(arrivals, 0.0, lost_s),
        "longest step from then until 3 s after the request failed, ms": _longest_ms(
            arrivals, lost_s
        ),
        "s until it failed": round(failed_s - lost_s, 1),
    }
    outcome.check("the other rank goes on", arrivals[-1] > failed_s)
    waits = _longest_ms(arrivals, lost_s) >= float(SOON["KVCONNECTOR_PEER_TIMEOUT_S"]) * 1e3
    outcome.check("the other rank waits for the lost engine", waits, False)
    pair.check_idle(outcome, "decode")


def _longest_ms(times, start_s, stop_s=float("inf")):
    within = [each for each in times if start_s <= each <= stop_s]
    return round(max(b - a for a, b in pairwise(within)) * 1e3, 1)


def registry_down(pair, outcome):
    """A decode engine that does not know the prefill server yet, and gets no answer from its registry, fails requests
    in time, and serves the next ones once the registry answers again.
    """
    prompt = prompt_of(120, seed=62)
    pair.ask(outcome, "before", prompt)
    pair.restart("decode")
    pair.prefill.pause_first()
    asked = pair.submit(prompt, ("decode",))
    answer = asked.decode.answer()
    _check_failed(
        outcome, "without a registry", answer, pair.decode.log_text(), errors.UnknownRequestError
    )
    outcome.check("the error names the registry", f":{pair.bootstrap_port}" in answer.error)
    pair.prefill.resume()
    pair.check_idle(outcome)
    pair.ask(outcome, "afterwards", prompt)


def restart_decode(pair, outcome):
    """A decode engine that is started again is served at once."""
    prompt = prompt_of(250, seed=13)
    pair.ask(outcome, "before", prompt)
    pair.restart("decode")
    pair.ask(outcome, "after", prompt)
    crowd(pair, outcome)


def restart_prefill(pair, outcome):
    """A prefill engine that is started again under its address is found again."""
    prompt = prompt_of(250, seed=9)
    pair.ask(outcome, "before", prompt)
    pair.restart("prefill")
    pair.decode.is_idle()
    for number in range(3):
        asked = pair.submit(prompt)
        answer = asked.decode.answer()
        asked.prefill.answer()
        if not answer.error:
            break
        outcome.figures["failed after the restart"] = number + 1
    pair.ask(outcome, "after", prompt)


def lost_router(pair, outcome):
    """Only one of the engines is asked: it gives up at its deadline, with an error of ours."""
    prompt = prompt_of(150, seed=11)
    for side in ("prefill", "decode"):
        engine = getattr(pair, side)
        asked = pair.submit(prompt, to=(side,))
        answer = getattr(asked, side).answer()
        _check_failed(outcome, f"only the {side} engine asked", answer, engine.log_text(), *ERRORS)
    pair.check_idle(outcome)
    pair.ask(outcome, "afterwards", prompt)


def keys(pair, outcome):
    """Engines with keys move caches; a decode engine whose key is not authorised gets an error and no bytes."""
    trusts = {"prefill": ["decode"], "decode": ["prefill"], "other": ["prefill"]}
    _, controls = keyed_controls(pair.dumps.parent / "keys", **trusts)
    settings = {name: variables_of(control) for name, control in controls.items()}
    pair.restart("prefill", **settings["prefill"])
    pair.restart("decode", **settings["decode"])
    prompt = prompt_of(150, seed=12)
    pair.ask(outcome, "authorised", prompt)
    pair.restart("decode", **settings["other"])
    asked = pair.submit(prompt)
    answers = asked.decode.answer(), asked.prefill.answer()
    _check_failed(outcome, "not authorised", answers[0], pair.decode.log_text(), *REFUSALS)
    pair.check_idle(outcome)
    pair.restart("decode", **settings["decode"])
    pair.ask(outcome, "authorised again", prompt)


def _check_failed(outcome, what, answer, log, *errors):
    """Complain unless `answer` has an error and `log` the advice of one of `errors`: SGLang logs no names."""
    outcome.checks += 1
    if not answer.error:
        outcome.complaints.append(f"{what}: answered {answer.tokens} instead of an error")
    if errors and not any(error.remedy in log for error in errors):
        names = " or ".join(error.__name__ for error in errors)
        outcome.complaints.append(f"{what}: no {names} in the log")


TOO_MUCH = {
    "top_logprobs_num": {"return_logprob": True, "top_logprobs_num": 129},
    "n=2": {"sampling_params": {"max_new_tokens": 1, "n": 2}},
}
"""Requests of which SGLang's engines admit more than they can move."""
MALFORMED = (
    ("bootstrap_room", None),
    ("bootstrap_room", 0),
    ("bootstrap_room", -5),
    ("bootstrap_room", 1 << 63),
    ("bootstrap_host", None),
    ("bootstrap_host", ""),
    ("bootstrap_host", "a b\r\nc"),
    ("bootstrap_host", "x" * 3000),
    ("bootstrap_port", 0),
    ("bootstrap_port", -1),
    ("bootstrap_port", 1 << 40),
    ("disagg_prefill_dp_rank", -1),
)
LOSSES = (errors.PeerLostError, errors.PeerUnreachableError, errors.LeaseExpiredError)
REFUSALS = (errors.AuthenticationError, errors.PeerUnreachableError)
ERRORS = (
    errors.TransferTimeoutError,
    errors.PeerLostError,
    errors.PeerUnreachableError,
    errors.LeaseExpiredError,
    errors.UnknownTransferError,
    errors.UnknownRequestError,
)
