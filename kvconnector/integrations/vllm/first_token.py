"""First tokens: the decode engine emits the token that the prefill engine sampled, instead of computing it again.

The prefill engine (P) sends the token with its offer, as `remote_first_token`, with a digest of the sampling
parameters. The decode engine (D) loads the whole prompt. When the load has ended, D emits the token and appends it to
the request's prompt. Then only that token is left to compute, as after any load, and nothing else in vLLM has to
change. Before that vLLM's own check applies stop tokens and length limits. If the load fails, D emits nothing, computes
the prompt and samples the token itself.

A streamed prompt is loaded before P has sampled. Its token comes with P's last report on the prompt. No load ends
before that report, so D never waits for the token alone. If the report has no token, or one that D cannot use, vLLM
computes the prompt's last token, as for any prompt that is cached as a whole.

vLLM's interface lets no connector emit tokens: `outputs.py` adds them. If it cannot, D computes first tokens.

D can use P's token only if it would have drawn it from the same distribution, and if no later token depends on it being
sampled rather than given. Requests with parameters for which that is not known, such as new ones in a later release,
are left alone.
"""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from kvconnector.errors import ConfigError, RemoteProtocolError
from kvconnector.integrations.identity import PromptEnd, drawing_digest
from kvconnector.integrations.vllm.params import FIRST_TOKEN, RequestParams
from kvconnector.integrations.vllm.settings import FirstTokenPolicy

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

GREEDY_TEMPERATURE = 1e-5

# parameters that affect the first token (penalties on output tokens do not)
_COMPARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
)
# parameters that affect neither the first token nor, through it, later ones; or that have a rule of their own below
_FREE = {
    *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "_eos_token_id"),
    *("_all_stop_token_ids", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone"),
    *("output_text_buffer_length", "flat_logprobs", "skip_reading_prefix_cache", "seed"),
    *("watermarking", "_watermarking_skipped", "extra_args"),
}
_PLAIN = SamplingParams()
_CHECKED = tuple(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if field.name not in _FREE.union(_COMPARED)
)
_EXTRA_ARGS = {"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"}


def request_obstacle(request: Request) -> str:
    """Return the reason why the decode engine must compute a request's first token; "" if it need not."""
    params = request.sampling_params
    if params is None:
        return "pooling"
    if request.prompt_embeds is not None or request.mm_features or request.resumable:
        return "a prompt that is not text alone"
    if params.seed is not None and params.temperature >= GREEDY_TEMPERATURE:
        return "a seed"
    for name in _CHECKED:
        if getattr(params, name) != getattr(_PLAIN, name):
            return name.strip("_")
    # clients choose the names (`vllm_xargs`), and each obstacle is logged and kept
    return "extra_args" if set(params.extra_args or ()) - _EXTRA_ARGS else ""


def engine_obstacle(vllm_config: VllmConfig) -> str:
    """Return the reason why an engine can neither send nor use first tokens; "" if it can."""
    model = vllm_config.model_config
    plugins = importlib.metadata.entry_points(group="vllm.logits_processors")
    obstacles = {
        "custom logits processors": bool(model.logits_processors or plugins),
        "watermarks": vllm_config.watermark_config is not None,
        "sampling masks": model.return_sampling_mask,
        "auxiliary outputs": vllm_config.aux_output_config.enabled,
        "several draft modules": vllm_config.num_prefill_lookahead_tokens > 1,
    }
    return ", ".join(name for name, is_there in obstacles.items() if is_there)


def sampling_digest(request: Request) -> str:
    """Return a digest that is equal for two requests if their first tokens are drawn from the same distribution."""
    params = request.sampling_params
    stops = sorted(params.all_stop_token_ids) if params.min_tokens else None
    lora = request.lora_request.lora_name if request.lora_request else None
    return drawing_digest([*(getattr(params, name) for name in _COMPARED), stops, lora])


class FirstTokens:
    """The first tokens that an engine sends with its offers, and those that it has received but not yet emitted.

    Args:
        vllm_config: The engine's configuration.
        policy: The option `first_token`.
        obstacle: The reason why nothing can be added to the scheduler's outputs; "" if it can, or if the engine does
            not load prompts.

    Raises:
        ConfigError: the policy is "always", and the engine cannot send or use first tokens.
    """

    def __init__(
        self, vllm_config: VllmConfig, policy: FirstTokenPolicy, *, obstacle: str = ""
    ) -> None:
        self._policy = policy
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        self._expected: dict[str, tuple[Request, int | None]] = {}
        self._loaded: list[tuple[Request, int]] = []
        self._logged: set[str] = set()
        if policy == "never":
            return
        obstacle = engine_obstacle(vllm_config) or obstacle
        if obstacle and policy == "always":
            raise ConfigError("first_token=always cannot be used with this engine", has=obstacle)
        if obstacle:
            self._policy = "never"
            logger.warning(
                "decode engines compute the first tokens, because this engine has %s", obstacle
            )

    def __repr__(self) -> str:
        return f"<FirstTokens {sorted(self._expected)}, {len(self._loaded)} loaded>"

    def is_sent(self, request: Request, *, is_streamed: bool) -> bool:
        """Return True if the prompt is computed to its end although its model has windows or states."""
        return self._policy == "always" and not is_streamed and not request_obstacle(request)

    def of(self, request: Request) -> list[Any] | None:
        """Return a computed prompt's token and digest, for `kv_transfer_params`; None if there is no usable token."""
        if self._policy == "never" or request.num_output_tokens != 1:
            return None
        if not self._is_free(request_obstacle(request)):
            return None
        return [request.output_token_ids[0], sampling_digest(request)]

    def expect(self, request: Request, asked: RequestParams) -> None:
        """Expect a queued request's token, which came with its offer or, for a streamed prompt, will come with
        `sampled`.
        """
        if self._policy == "never" or not self._is_free(request_obstacle(request)):
            return
        self._expected[request.request_id] = request, None
        if asked.offer is not None and not asked.offer.is_followed:
            self._take(request, asked.first_token, asked.offer.remote_num_tokens)

    def sampled(self, request_id: str, extra: bytes) -> None:
        """Take the token that the producer of a streamed prompt has reported. Unknown requests are ignored."""
        if request_id not in self._expected:
            return
        try:
            end = PromptEnd.decode(extra)
        except RemoteProtocolError:
            end = PromptEnd(-1)
        came = None if end.token is None else [end.token, end.sampling_digest]
        self._take(self._expected[request_id][0], came, end.num_tokens)

    def _take(self, request: Request, came: Any, num_tokens: Any) -> None:
        if self._is_free(self._mismatch(request, came, num_tokens)):
            self._expected[request.request_id] = request, came[0]
        else:
            self.forget(request.request_id)

    def _is_free(self, obstacle: str) -> bool:
        if obstacle and obstacle not in self._logged:
            self._logged.add(obstacle)
            logger.info("decode engines compute first tokens for requests with %s", obstacle)
        return not obstacle

    def _mismatch(self, request: Request, came: Any, num_tokens: Any) -> str:
        match came:
            case None:
                return "a producer that sends none"
            case [int(token), str(digest)] if (
                type(token) is not bool and 0 <= token < self._vocabulary
            ):
                if digest != sampling_digest(request):
                    return "sampling parameters that the producer did not have"
                if num_tokens != request.num_prompt_tokens:
                    return "prompts of another length than the producer's"
                return ""
        return f"a malformed {FIRST_TOKEN}"

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._expected

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or whose prompt is not loaded whole. Unknown ones are ignored."""
        self._expected.pop(request_id, None)

    def loaded(self, request_ids: set[str]) -> None:
        """Take requests whose whole prompts are loaded. `emit` adds their tokens to the step's outputs."""
        for name in self._expected.keys() & request_ids:
            request, token = self._expected[name]
            if token is None:
                self._take(request, None, None)  # forgets the token, and logs the reason
            else:
                self._loaded.append((request, token))
                self.forget(name)

    def emit(self, scheduler: Scheduler, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the tokens of loaded requests to a step's outputs, by client.

        Args:
            scheduler: vLLM's scheduler, for which these loads are still under way. A stop token ends its request here.
            outputs: The outputs that its `update_from_output` returns; changed.
        """
        loaded, self._loaded = self._loaded, []
        for request, token in loaded:
            is_whole = request.num_computed_tokens == request.num_prompt_tokens
            if not is_whole or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                continue
            of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            of_client.outputs.append(_emitted(scheduler, request, token))


def _emitted(scheduler: Scheduler, request: Request, token: int) -> EngineCoreOutput:
    waiting = request.status
    request.append_output_token_ids(token)
    if scheduler.log_stats:  # ends the request's time in the queue
        request.record_event(EngineCoreEventType.SCHEDULED, time.monotonic())
    if check_stop(request, scheduler.max_model_len):
        end, request.status = request.status, waiting
        request.kv_transfer_params = None  # no reader would get an offer of these blocks
        scheduler.finish_requests(request.request_id, end)
    else:
        _make_prompt(request, token)
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[token],
        finish_reason=request.get_finished_reason(),
        stop_reason=request.stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
        prefill_stats=request.take_prefill_stats(),
    )


def _make_prompt(request: Request, token: int) -> None:
    """Turn a request's only output token into the last one of its prompt. The client's prompt stays as it is."""
    request._output_token_ids.clear()
    request.prompt_token_ids = [*request.prompt_token_ids, token]
    request.num_prompt_tokens += 1
    request.max_tokens -= 1
    params = request.sampling_params = copy.copy(request.sampling_params)
    params.max_tokens = request.max_tokens
    params.min_tokens = max(0, params.min_tokens - 1)
