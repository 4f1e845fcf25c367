"""Plain PyTorch in place of kernels that SGLang has only for GPUs and AMX, so that engines with MLA and Mamba 2 layers
run on any CPU. All engines that a case compares use the same ones.
"""

import ctypes
import functools
import math
import sys
from collections import defaultdict
from itertools import pairwise, takewhile

import torch
from torch.nn import functional

UNUSED_OPS = (
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Kernels of gated delta nets, which SGLang looks up for every recurrent model and for the processor of Qwen's images,
and never calls here.
"""


def stand_in(kind):
    """Put them into SGLang's modules, before an engine on a device of this kind starts."""
    from sglang.srt.arg_groups import overrides

    # SGLang keeps Gemma 3's windows in the pool of all other layers, although it has a pool for windows
    overrides._MODEL_OVERRIDE_FNS.pop("Gemma3ForCausalLM", None)
    if kind == "cpu":
        _stand_in_on_a_cpu()
        return
    _stand_in_on_a_gpu()


def _stand_in_on_a_gpu():
    """Keep to PyTorch and Triton, without kernels that SGLang has compiled or compiles when they are used."""
    from sglang.kernels.ops.speculative import spec_tree, tree
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.layers.dual_gemm import DualGemm
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.model_executor.runner_backend_utils import weak_ref_tensor

    # a graph then keeps its intermediate results, which costs memory alone
    weak_ref_tensor.weak_ref_tensor = torch.Tensor.detach
    # it would compile a kernel, for a minute
    memory_pool.can_use_store_cache = lambda *_: False
    DualGemm._select_mode = lambda *_: None  # it would import CUTLASS
    triton_backend.is_arch_support_pdl = lambda: False  # a compiled kernel's module says it
    # chains of drafts: SGLang has these in Triton, too
    spec_tree.sgl_build_tree_kernel_efficient = spec_tree.sgl_build_tree_kernel_triton
    tree.verify_tree_greedy = _in_triton(spec_tree.verify_tree_greedy_triton)
    _choose_without_trials()


def _in_triton(verify):
    """Return `verify` with the names of the compiled kernel's arguments."""

    def call(*, retrive_index, retrive_next_token, retrive_next_sibling, **others):
        verify(
            retrieve_index=retrive_index,
            retrieve_next_token=retrive_next_token,
            retrieve_next_sibling=retrive_next_sibling,
            **others,
        )

    return call


def _choose_without_trials():
    """Let Triton take the smallest form of a kernel that it would choose by trials, which last minutes for recurrent
    layers, and choose differently in two engines, whose results then differ in the last bits.
    """
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def run_smallest(kernel, *arguments, **options):
        if len(kernel.configs) > 1:
            kernel.configs = [min(kernel.configs, key=_size_of)]
        return run(kernel, *arguments, **options)

    Autotuner.run = run_smallest


def _size_of(config):
    sizes = [each for each in config.kwargs.values() if isinstance(each, int)]
    return math.prod(sizes) * config.num_stages, config.num_warps


def _stand_in_on_a_cpu():
    from sglang.srt.layers.attention.mamba import mamba
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    # SGLang assumes that torch's attention has kernels for prompts without latents
    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    # data-parallel attention pads idle and short batches, and asks for a length of what it adds
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    from sglang.srt.mem_cache.allocator import paged

    if not hasattr(paged, "alloc_decode_naive"):
        _allocate_plainly(paged)
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        run = getattr(TorchNativeAttnBackend, name)
        setattr(TorchNativeAttnBackend, name, _through_windows(run))
    TorchNativeAttnBackend.forward_extend = _split_prompts(TorchNativeAttnBackend.forward_extend)
    if not torch.cuda.is_available():  # asked for with context parallelism, and not used
        torch.cuda.current_stream = lambda *_: None
        _pin_nothing()
    for name in UNUSED_OPS:
        setattr(torch.ops.sgl_kernel, name, None)
    _draft_plainly()
    mamba.causal_conv1d_fn = mamba.causal_conv1d_fn_triton = convolve_prompts
    mamba.causal_conv1d_update = mamba.causal_conv1d_update_triton = convolve_tokens
    mamba.mamba_chunk_scan_combined = scan_prompts
    mamba.selective_state_update = scan_tokens


def _allocate_plainly(paged):
    """Replace the kernels that allocate pages: SGLang 0.5.21 has them in Triton alone."""

    def extend(*arguments):
        *lengths, free_pages, out, _, page_size = arguments
        pages = free_pages if len(free_pages) else free_pages.new_zeros(1)  # it then takes none
        paged.alloc_extend_naive(*lengths, pages, out, page_size, "cpu")

    def decode(seq_lens, last_loc, free_pages, out, _, page_size):
        out.copy_(last_loc + 1)
        begins = ((seq_lens - 1) % page_size == 0).nonzero().flatten()
        for number, request in enumerate(begins[: len(free_pages)].tolist()):
            out[request] = free_pages[number] * page_size

    # they are called as kernel[grid](...)
    paged.alloc_extend_kernel = defaultdict(lambda: extend)
    paged.alloc_decode_kernel = defaultdict(lambda: decode)


def _draft_plainly():
    """Let engines draft with torch's attention, for which SGLang has no draft backends, and replace compiled kernels
    that describe and check chains of drafts. Trees of drafts (`speculative-eagle-topk` above 1) are refused: torch's
    attention takes no mask for them.
    """
    from sglang.kernels.ops.kvcache import cache_move
    from sglang.kernels.ops.speculative import cache_locs, eagle, multi_layer_eagle, spec_tree
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    class Step(TorchNativeAttnBackend):
        """The attention of one step of a chain. `number`: how many drafts of this chain it sees, its own among them."""

        def __init__(self, runner, number):
            super().__init__(runner)
            self._number = number

        def _run_sdpa_forward_decode(self, *arguments, **options):
            *tensors, lengths, encoder_lens = arguments
            longer = lengths + self._number
            return super()._run_sdpa_forward_decode(*tensors, longer, encoder_lens, **options)

    class Steps:
        """The attention of all steps of a chain."""

        def __init__(self, factory):
            numbers = range(1, factory.speculative_num_steps)
            self.attn_backends = [Step(factory.draft_model_runner, number) for number in numbers]

        def init_forward_metadata(self, batch):
            for each in self.attn_backends:
                each.init_forward_metadata(batch)

    def steps(factory):
        if factory.topk != 1:
            raise ValueError(
                f"torch's attention drafts chains only: speculative-eagle-topk 1, not {factory.topk}"
            )
        return Steps(factory) if factory.speculative_num_steps > 1 else None

    DraftBackendFactory.create_decode_backend = steps
    DraftBackendFactory.create_draft_extend_backend = lambda factory: TorchNativeAttnBackend(
        factory.draft_model_runner
    )
    eagle.fill_bonus_tokens_cpu = take_last_accepted
    eagle.fill_accept_out_cache_loc_cpu = pack_accepted
    multi_layer_eagle.rotate_input_ids_cpu = rotate_prompts
    allocation.assign_req_to_token_pool_cpu = put_rows
    cache_move.copy_all_layer_kv_cache_cpu = copy_rows
    cache_locs.assign_extend_cache_locs_cpu = take_rows
    cache_locs.assign_draft_cache_locs_contiguous_cpu = take_rows_of_drafts
    spec_tree.sgl_build_tree_kernel_efficient_cpu = describe_chains
    spec_tree.sgl_verify_tree_greedy_cpu = accept_greedily


def take_last_accepted(accepted, counts, last, width):
    """Write each request's last accepted token to `last`: `accepted` is `[request, width]`, with `counts` of them."""
    requests = torch.arange(len(counts))
    last.copy_(accepted.view(-1, width)[requests, counts.long() - 1])


def pack_accepted(index, rows, out):
    """Write the cache's rows of accepted tokens to the beginning of `out`: `index` names them in `rows`, or is -1."""
    kept = index.flatten()
    kept = kept[kept >= 0].long()
    out[: len(kept)] = rows[kept]


def copy_rows(addresses, strides, targets, sources):
    """Copy rows within each of the tensors at `addresses`; a row has the bytes that `strides` has for its tensor."""
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + stride * source, stride) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + stride * target, row, stride)


def rotate_prompts(tokens, starts, lengths, following, places):
    """Move each prompt's tokens one to the left, in place, and add what follows: at its end, or at `places`."""
    for number, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if not length:
            continue
        tokens[start : start + length - 1] = tokens[start + 1 : start + length].clone()
        place = start + length - 1 if places is None else int(places[number])
        tokens[place] = following.flatten()[number]


def take_rows(requests, table, starts, stops, out, _):
    """Write to `out` the rows of the cache of each request's tokens from its start to its stop, one after the other."""
    bounds = zip(requests.tolist(), starts.tolist(), stops.tolist(), strict=True)
    found = torch.cat([table[request, start:stop] for request, start, stop in bounds])
    out[: len(found)] = found


def put_rows(requests, table, starts, stops, rows, _):
    """Write `rows` into the table, in place of what `take_rows` takes."""
    at = 0
    bounds = zip(requests.tolist(), starts.tolist(), stops.tolist(), strict=True)
    for request, start, stop in bounds:
        table[request, start:stop] = rows[at : at + stop - start]
        at += stop - start


def take_rows_of_drafts(requests, table, lengths, out, *sizes):
    """Do so for the drafts that follow each request's tokens."""
    width, topk, steps = sizes
    take_rows(requests, table, lengths, lengths + topk * steps, out, width)


def describe_chains(*arguments):
    """Describe the drafts of each request as a chain, whose first is the request's last token.

    Args:
        arguments: Parents and scores, which only trees need; then the requests' lengths without drafts; then what is
            written: which drafts of its request each draft sees, its position, its place among all, the number of the
            draft that follows it (-1 after the last one) and of one in place of it (-1: a chain has none), all
            `[request, draft]` but the first, which has one more dimension; then drafts per step (1), steps, drafts
            and the kind of mask.
    """
    _, _, lengths, mask, positions, places, following, siblings, _, _, count, _ = arguments
    numbers = torch.arange(count)
    mask.view(-1, count, count).copy_(numbers <= numbers.unsqueeze(1))
    positions.view(-1, count).copy_(lengths.unsqueeze(1) + numbers)
    places.copy_(torch.arange(places.numel()).view_as(places))
    following.copy_(torch.cat([numbers[1:], torch.tensor([-1])]).expand_as(following))
    siblings.fill_(-1)


def accept_greedily(
    *, predicts, accept_index, accept_token_num, candidates, retrive_index, target_predict, **_
):
    """Accept the drafts of each chain up to the first that is not the model's own token.

    Args:
        predicts: Written: the model's token after each accepted one, by its place among all.
        accept_index: Written: places of accepted tokens, `[request, step]`.
        accept_token_num: Written: how many drafts of each request are accepted.
        candidates: `[request, draft]`, the first of which is the request's last token.
        retrive_index: Their places.
        target_predict: The model's token after each.
    """
    most = accept_index.shape[1] - 1
    for number, (drafts, right) in enumerate(
        zip(candidates.tolist(), target_predict.tolist(), strict=True)
    ):
        pairs = zip(drafts[1 : most + 1], right, strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        places = retrive_index[number, : accepted + 1].long()
        accept_index[number, : accepted + 1] = places.to(accept_index.dtype)
        predicts[places] = target_predict[number, : accepted + 1].to(predicts.dtype)
        accept_token_num[number] = accepted


def _through_windows(run):
    """Return a method of torch's attention that reads windows where it writes them: in their own pool. Where drafts are
    checked, it takes their number from the queries.
    """

    @functools.wraps(run)
    def call(backend, *arguments, **options):
        *tensors, rows, requests, lengths = arguments[:7]
        more = arguments[7:]
        if len(more) > 1 and more[1] is None:
            # drafts are checked: their requests' lengths are without them, and no others are given
            count = torch.full_like(lengths, len(tensors[0]) // max(1, len(lengths)))
            lengths, more = lengths + count, (lengths, count, *more[2:])
        if backend.use_sliding_window_kv_pool and options["sliding_window_size"] is not None:
            rows = backend.token_to_kv_pool.translate_loc_from_full_to_swa(rows[requests].long())
            requests = torch.arange(len(requests))
        return run(backend, *tensors, rows, requests, lengths, *more, **options)

    return call


@functools.cache
def _say_once(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _split_prompts(whole):
    """Return an attention backend's method for prompts that also has prefill context parallelism, which SGLang has for
    GPUs' backends: a rank computes its share of the queries against all keys, which it gathers and stores.
    """

    @functools.wraps(whole)
    def forward_extend(backend, *arguments, **options):
        from sglang.srt.layers.cp.base import get_cp_strategy
        from sglang.srt.layers.cp.utils import is_cp_active
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        q, k, v, layer, batch = arguments[:5]
        if not is_cp_active(batch):
            return whole(backend, *arguments, **options)
        _say_once("prompts are split among ranks")
        strategy, pool = get_cp_strategy(), backend.token_to_kv_pool
        k, v = (
            strategy.gather_kv_cache(each.reshape(-1, layer.tp_k_head_num, dim), batch)
            for each, dim in ((k, layer.qk_head_dim), (v, layer.v_head_dim))
        )
        pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
        rows = backend.req_to_token_pool.req_to_token
        caches = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

        def attend(queries, bounds, lengths, _):
            """The queries of each prompt belong to the last of its `lengths` tokens."""
            out = queries.new_empty(*queries.shape[:2], layer.v_head_dim)
            for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
                length = int(lengths[number])
                tokens = rows[batch.req_pool_indices[number], :length].long()
                positions = torch.arange(length - stop + start, length)
                mask = torch.arange(length) <= positions.unsqueeze(1)
                found = functional.scaled_dot_product_attention(
                    queries[start:stop].movedim(0, 1),
                    *(cache[tokens].movedim(0, 1) for cache in caches),
                    attn_mask=mask,
                    scale=layer.scaling,
                    enable_gqa=True,
                )
                out[start:stop] = found.movedim(1, 0)
            return out

        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return strategy.run_attention(queries, batch, backend.device, attend).flatten(1)

    return forward_extend


def _pin_nothing():
    """Let adapters, which SGLang keeps in pinned memory, be in any: without a GPU there is no other."""
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda values, *_: values


def _unpinned(make):
    @functools.wraps(make)
    def call(*arguments, pin_memory=False, **options):
        return make(*arguments, **options)

    return call


def convolve_prompts(
    x,
    weight,
    bias,
    *,
    activation,
    conv_states,
    has_initial_state,
    cache_indices,
    query_start_loc,
    **_,
):
    """Depthwise causal convolution and SiLU of several prompts.

    Args:
        x: `[channel, token]`, one prompt after another.
        weight: `[channel, width]`.
        bias: `[channel]`.
        activation: "silu".
        conv_states: The last inputs of each slot, `[slot, channel, width - 1]`; changed in place.
        has_initial_state: Per prompt, True if it continues with its slot's state.
        cache_indices: Its slot.
        query_start_loc: Where each prompt begins, and the last one's end.

    Returns:
        `[channel, token]`.
    """
    out, bounds = torch.empty_like(x), query_start_loc.tolist()
    for number, (start, stop) in enumerate(pairwise(bounds)):
        state = conv_states[cache_indices[number]]
        before = state.to(x.dtype)
        if has_initial_state is None or not has_initial_state[number]:
            before = torch.zeros_like(before)
        joined = torch.cat([before, x[:, start:stop]], dim=1)
        out[:, start:stop] = functional.conv1d(
            joined, weight.unsqueeze(1), bias, groups=len(weight)
        )
        state.copy_(joined[:, -state.shape[1] :])
    return functional.silu(out)


def convolve_tokens(x, conv_states, weight, bias, activation, *, conv_state_indices):
    """Do the same for one more token of each request: `x` is `[request, channel]`."""
    joined = torch.cat([conv_states[conv_state_indices].to(x.dtype), x.unsqueeze(2)], dim=2)
    conv_states[conv_state_indices] = joined[:, :, 1:].to(conv_states.dtype)
    return functional.silu((joined * weight).sum(2) + bias)


def scan_prompts(x, dt, a, b, c, *, D, dt_bias, cu_seqlens, initial_states, out, state_dtype, **_):
    """Mamba 2's recurrence, token by token.

    Args:
        x: `[1, token, head, dim]`, several prompts one after another.
        dt: Time steps, `[1, token, head]`.
        a: Decay of each head.
        b: Input weights, `[1, token, group, state]`.
        c: Output weights, `[1, token, group, state]`.
        D: Weight of each head's own input.
        dt_bias: Of each head.
        cu_seqlens: Where each prompt begins, and the last one's end.
        initial_states: Per prompt, `[prompt, head, dim, state]`, or None.
        out: Written, like `x`.
        state_dtype: Of the states that are returned.

    Returns:
        None, the prompts' last states, None: only SGLang's prefix cache needs intermediate states.
    """
    bounds, last = cu_seqlens.tolist(), []
    for number, (start, stop) in enumerate(pairwise(bounds)):
        state = torch.zeros(*x.shape[2:], b.shape[-1])
        if initial_states is not None:
            state = initial_states[number].float()
        for token in range(start, stop):
            state, out[0, token] = _step(
                state, x[0, token], dt[0, token] + dt_bias, a, b[0, token], c[0, token], D
            )
        last.append(state)
    return None, torch.stack(last).to(state_dtype), None


def scan_tokens(states, x, dt, *weights, dt_bias, state_batch_indices, out, **_):
    """Process one more token of each request, and change their states in place."""
    a, b, c, d = weights
    for number, slot in enumerate(state_batch_indices.tolist()):
        state, out[number] = _step(
            states[slot].float(),
            x[number],
            dt[number, :, 0] + dt_bias[:, 0],
            a[:, 0, 0],
            b[number],
            c[number],
            d[:, 0],
        )
        states[slot] = state.to(states.dtype)


def _step(state, x, dt, *weights):
    a, b, c, d = weights
    heads = len(x) // len(b)
    b, c = (each.float().repeat_interleave(heads, 0).unsqueeze(1) for each in (b, c))
    dt = functional.softplus(dt.float()).view(-1, 1, 1)
    state = state * torch.exp(dt * a.view(-1, 1, 1)) + dt * x.float().unsqueeze(2) * b
    return state, (state * c).sum(2) + d.view(-1, 1) * x
