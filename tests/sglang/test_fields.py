"""Whatever a client writes into a request's fields, SGLang's queues take it or answer with an error."""

import ast
import inspect
import math
import textwrap
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvconnector.integrations.sglang.fields import MAX_ROOM
from kvconnector.integrations.tracing import headers_of

pytestmark = pytest.mark.sglang

GOOD = {"room": 7, "host": "10.0.0.1", "port": 8998, "rank": None}
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
FIELDS = st.fixed_dictionaries({name: st.just(value) | ANYTHING for name, value in GOOD.items()})


@pytest.fixture(scope="module")
def queues():
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    from kvconnector.integrations.sglang.backend import hook_queues

    hook_queues()
    return {"decode": DecodePreallocQueue, "prefill": PrefillBootstrapQueue}


UNTRACED = SimpleNamespace(spans=None)


def _request(fields):
    return SimpleNamespace(
        rid="r",
        bootstrap_room=fields["room"],
        bootstrap_host=fields["host"],
        bootstrap_port=fields["port"],
        disagg_prefill_dp_rank=fields["rank"],
        origin_input_ids=[1, 2],
        output_ids=[],
        return_logprob=False,
        finished_reason=None,
    )


@cache
def _metadata():
    """Return SGLang's own rows of metadata."""
    import torch
    from sglang.srt.disaggregation.utils import MetadataBuffers

    return MetadataBuffers(1, 16, torch.float32, 0)


def _ask(queue, fields, stats=UNTRACED, context=None, **of_request):
    """Let a queue admit a request. Returns the error that its client gets, or None."""
    streamer = Mock()
    of_queue = SimpleNamespace(
        kv_manager=SimpleNamespace(stats=stats),
        metadata_buffers=_metadata(),
        scheduler=SimpleNamespace(output_streamer=streamer, enable_hisparse=False),
        max_input_len=100,
        max_total_num_tokens=100,
        token_to_kv_pool_allocator=SimpleNamespace(prealloc_ceiling_fits=lambda *_: True),
        _prealloc_required_tokens=lambda _: (2, 2),
        _uses_swa_tail_prealloc=lambda: False,
        _rebootstrap_prefill_len=lambda req: len(req.origin_input_ids),
    )
    admitted = queue.__new__(queue)
    admitted.__dict__.update(vars(of_queue))
    request = _request(fields)
    vars(request).update(of_request)
    if context is not None:
        request.time_stats = SimpleNamespace(trace_ctx=context)
    if queue._check_if_req_exceed_kv_capacity(admitted, request):
        streamer.stream_output.assert_called_once()
        return request.finished_reason.message
    streamer.stream_output.assert_not_called()
    return None


@settings(max_examples=300, deadline=None)
@given(fields=FIELDS)
@example(fields=GOOD | {"host": None})
@example(fields=GOOD | {"room": 1 << 63})
@example(fields=GOOD | {"host": "a\r\nb"})
@example(fields=GOOD | {"host": "p@h"})
def test_the_decode_queue_admits_only_requests_with_which_it_can_compute(queues, fields):
    from sglang.srt.disaggregation.decode import _bootstrap_addr

    if _ask(queues["decode"], fields) is not None:
        return
    request = _request(fields)
    assert _bootstrap_addr(request).endswith(f":{fields['port']}")
    assert 1 <= request.bootstrap_room <= MAX_ROOM
    assert fields["rank"] is None or fields["rank"] >= 0


@settings(max_examples=200, deadline=None)
@given(fields=FIELDS)
def test_the_prefill_queue_admits_only_rooms_that_the_metadata_can_hold(queues, fields):
    import torch

    error = _ask(queues["prefill"], fields)
    if error is None:
        torch.zeros(1, dtype=torch.uint64)[0] = fields["room"]
    else:
        assert "bootstrap_room" in error


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_well_formed_requests_are_admitted(queues, side):
    for change in (
        {},
        {"rank": 3},
        {"host": "::1"},
        {"host": "[fe80::1]"},
        {"host": "p-0.p"},
        {"host": "x" * 63},
        {"host": "prefill 0@10.0.0.1"},
        {"host": "p@[fe80::1]"},
    ):
        assert _ask(queues[side], GOOD | change) is None


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("room", 0, "bootstrap_room"),
        ("host", None, "bootstrap_host"),
        ("host", "x" * 3000, "no address"),
        ("host", ".".join(["x" * 50] * 5), "no address"),
        ("host", "x" * 64, "no address"),
        ("host", "p..p", "no address"),
        ("port", 0, "no address"),
        ("port", "8998", "bootstrap_port"),
        ("port", 8998.0, "bootstrap_port"),
        ("port", True, "bootstrap_port"),
        ("rank", "1", "disagg_prefill_dp_rank"),
        ("rank", True, "disagg_prefill_dp_rank"),
        ("rank", -1, "disagg_prefill_dp_rank"),
        ("host", "p@", "no address"),
        ("host", "p\nq@10.0.0.1", "names an engine"),
        ("host", "p" * 513 + "@10.0.0.1", "names an engine"),
        ("host", "\ud800@10.0.0.1", "names an engine"),
    ],
)
def test_the_client_learns_which_field_is_wrong(queues, field, value, text):
    assert text in _ask(queues["decode"], GOOD | {field: value})


@pytest.mark.parametrize("host", ["10.0.0.1", "vllm@10.0.0.1"])
@pytest.mark.parametrize(
    "name, text",
    [
        ("return_logprob", "log probabilities"),
        ("return_hidden_states", "hidden states"),
        ("return_sampling_mask", "sampling mask"),
        ("multimodal_inputs", "images"),
        ("input_embeds", "embeddings"),
    ],
)
def test_what_only_sglangs_prefill_engines_send_is_refused_of_others_by_name(host, name, text):
    from kvconnector.integrations.sglang.fields import problem_of

    request = _request(GOOD | {"host": host})
    setattr(request, name, True)
    problem = problem_of(request, is_prefill=False)
    if "@" in host:
        assert text in problem
        assert "'vllm@10.0.0.1' is of another kind" in problem
    else:
        assert problem is None
    assert problem_of(request, is_prefill=True) is None


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_more_log_probabilities_than_a_row_holds_are_refused(queues, side):
    """SGLang's scheduler would end when it fills the row, and with it all other requests."""
    for count in (0, 1, 128, 129, 1000):
        logprob = SimpleNamespace(
            top_logprobs_num=count,
            output_top_logprobs_val=[[0.5] * count],
            output_top_logprobs_idx=[[1] * count],
            output_token_logprobs_val=[0.5],
            output_token_logprobs_idx=[1],
        )
        problem = _ask(queues[side], GOOD, logprob=logprob)
        filled = _computed(logprob)
        if problem is None:
            _metadata().set_buf(filled)
        else:
            assert f"at most 128 with two engines, not {count}" in problem
            with pytest.raises(RuntimeError):
                _metadata().set_buf(filled)


_CACHED = ("cached_tokens", "cached_tokens_device", "cached_tokens_host", "cached_tokens_storage")


def _computed(logprob):
    """Return a request whose first token has been computed, with log probabilities if it asks for them."""
    return SimpleNamespace(
        output_ids=[1],
        metadata_buffer_index=0,
        bootstrap_room=7,
        return_logprob=logprob is not None,
        return_sampling_mask=False,
        hidden_states_tensor=None,
        disagg_kv_sender=None,
        multimodal_inputs=None,
        get_mm_token_counts=lambda: (0, 0, 0),
        logprob=logprob,
        **dict.fromkeys(_CACHED, 0),
    )


def test_a_row_has_no_log_probabilities_of_an_earlier_request(queues):
    """A decode server that asks for what its prefill server was not asked for reads the row all the same."""
    import torch

    logprob = SimpleNamespace(
        top_logprobs_num=2,
        output_top_logprobs_val=[[-0.5, -1.5]],
        output_top_logprobs_idx=[[11, 12]],
        output_token_logprobs_val=[-0.5],
        output_token_logprobs_idx=[11],
    )
    rows = _metadata()

    def row(name):
        return getattr(rows, name)[0][:3].tolist()

    rows.set_buf(_computed(logprob))
    assert row("output_top_logprobs_val")[:2] == [-0.5, -1.5]
    assert math.isnan(row("output_top_logprobs_val")[2])
    assert row("output_token_logprobs_idx")[0] == 11
    rows.set_buf(_computed(None))
    for name in ("output_token_logprobs_val", "output_top_logprobs_val"):
        assert getattr(rows, name)[0].isnan().all()
    for name in ("output_token_logprobs_idx", "output_top_logprobs_idx"):
        assert not torch.any(getattr(rows, name)[0])
    assert row("output_ids")[0] == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_samples_that_sglang_gives_one_room_are_refused(queues, side):
    """They would take one another's transfer. That SGLang does so, its own expansion of a request shows."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    asked = GenerateReqInput(
        input_ids=[1, 2], sampling_params={"n": 2}, bootstrap_room=7, bootstrap_port=8998
    )
    asked.normalize_batch_and_arguments()
    assert (asked.batch_size, asked.parallel_sample_num, asked[0].bootstrap_room) == (1, 2, 7)
    for count, is_refused in ((2, True), (1, False)):
        problem = _ask(queues[side], GOOD, sampling_params=SamplingParams(n=count))
        assert (problem is not None) == is_refused
        assert not is_refused or "n=2 with one bootstrap_room" in problem


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_queues_ask_before_they_compute_with_the_fields(queues, side):
    """Nothing but the check for rejected requests comes before."""
    method = queues[side].create_sender if side == "prefill" else queues[side].add
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    names = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]
    before = names[: names.index("_check_if_req_exceed_kv_capacity")]
    assert not {"_create_receiver_and_enqueue", "kv_sender_class", "_bootstrap_addr"} & {*before}


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_trace_of_a_request_that_is_admitted_is_noted_by_its_room(queues, side):
    from sglang.srt.observability.trace import TraceNullContext

    stats = Mock()
    span = object()
    assert _ask(queues[side], GOOD, stats, SimpleNamespace(root_span_context=span)) is None
    stats.note_trace.assert_called_once_with(GOOD["room"], span)
    assert _ask(queues[side], GOOD | {"room": 0}, stats, SimpleNamespace()) is not None
    stats.note_trace.assert_called_once()
    assert _ask(queues[side], GOOD, stats) is None
    stats.note_trace.assert_called_with(GOOD["room"], None)
    assert _ask(queues[side], GOOD, stats, TraceNullContext()) is None
    assert not headers_of(stats.note_trace.call_args.args[1])
