"""Plain PyTorch in place of kernels that SGLang has only for GPUs and AMX, so that engines with MLA and Mamba 2 layers
run on any CPU. All engines that a case compares use the same ones.
"""

import functools
import math
import sys
from collections import defaultdict
from itertools import pairwise

import torch
from torch.nn import functional

UNUSED_OPS = ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu")
"""Kernels of gated delta nets, which SGLang looks up for every recurrent model."""


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
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.layers.dual_gemm import DualGemm
    from sglang.srt.mem_cache import memory_pool

    # it would compile a kernel, for a minute
    memory_pool.can_use_store_cache = lambda *_: False
    DualGemm._select_mode = lambda *_: None  # it would import CUTLASS
    triton_backend.is_arch_support_pdl = lambda: False  # a compiled kernel's module says it
    _choose_without_trials()


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
    for name in UNUSED_OPS:
        setattr(torch.ops.sgl_kernel, name, None)
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


def _through_windows(run):
    """Return a method of torch's attention that reads windows where it writes them: in their own pool."""

    @functools.wraps(run)
    def call(backend, *arguments, **options):
        *tensors, rows, requests, lengths = arguments[:7]
        if backend.use_sliding_window_kv_pool and options["sliding_window_size"] is not None:
            rows = backend.token_to_kv_pool.translate_loc_from_full_to_swa(rows[requests].long())
            requests = torch.arange(len(requests))
        return run(backend, *tensors, rows, requests, lengths, *arguments[7:], **options)

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
