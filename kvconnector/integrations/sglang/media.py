"""The names by which two servers of SGLang compare images, videos and audio. Pure.

A server names an item by a hash of its features: what its processor made of an image. These are equal numbers on two
servers only if both run the same code with the same options on the same kind of device. So a name has a namespace, the
digest of all that, and names of different namespaces are not compared. Audio is compared only by its kind: its features
come from products of matrices, whose last bits may differ from one run to the next.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvconnector.integrations.identity import OF_SGLANG, content_digest

FIRST_MEDIA_TOKEN = 1_000_000
"""The least of the numbers that SGLang puts in the places of media, which it derives from an item's hash. It refuses
models with media whose own tokens reach this number.
"""
EXACT = frozenset({"IMAGE", "VIDEO"})
"""Kinds of media whose features are equal numbers on equal servers."""
WITHOUT_EFFECT = frozenset(
    {
        "mm_attention_backend",
        "mm_enable_dp_encoder",
        "enable_broadcast_mm_inputs_process",
        "enable_prefix_mm_cache",
        "enable_mm_global_cache",
        "mm_global_cache_backend",
        "mm_processor_worker_num",
        "mm_io_worker_num",
        "allowed_media_domains",
        "media_url_max_file_size_mb",
        "limit_mm_data_per_request",
    }
)
"""SGLang's options for media that change no features."""
# environment variables that change what a processor makes of an image, a video or audio
_VARIABLES = re.compile(
    r"(SGLANG|SGL|VIDEO|IMAGE|AUDIO|XHS|FORCE_QWENVL)_\w*"
    r"(PIXEL|RESAMPLE|IMAGE|VIDEO|AUDIO|FRAME|FPS|QUALITY|MM_|CPU_ENGINE|RUST_SERVER|CUDA_IPC)"
)
_NAMESPACE_DIGITS = 16


def feature_namespace(
    options: Mapping[str, object], environ: Mapping[str, str], *, made_by: Sequence[object]
) -> str:
    """Return the namespace of a server's names of media; "" if equal media may get different ones.

    Args:
        options: SGLang's options for media, resolved.
        environ: The environment.
        made_by: What else the features depend on: versions, the model and its revision, the device.
    """
    is_random = environ.get("SGLANG_MM_SKIP_COMPUTE_HASH", "").lower() in {"1", "true", "yes", "y"}
    # features in GPU memory have another hash than in host memory, where SGLang keeps them if the GPU has no room
    if is_random or options.get("mm_feature_transport") not in {None, "cpu"}:
        return ""
    own = sorted((name, repr(value)) for name, value in options.items())
    variables = sorted((name, value) for name, value in environ.items() if _VARIABLES.match(name))
    named = repr([[each for each in own if each[0] not in WITHOUT_EFFECT], variables, [*made_by]])
    return content_digest(named.encode(errors="replace"))[:_NAMESPACE_DIGITS]


def media_name(items: Iterable[Any], namespace: str) -> str:
    """Return the name of a prompt's media, as `identity.Identity` has it.

    Args:
        items: SGLang's items, in their order, each with a `modality` and a `hash`.
        namespace: Of the server.
    """
    if not namespace:
        return f"{OF_SGLANG}:"
    kinds = [(getattr(each.modality, "name", ""), each.hash) for each in items]
    named = [(kind, hashed if kind in EXACT else None) for kind, hashed in kinds]
    return f"{OF_SGLANG}{namespace}:{content_digest(repr(named).encode())}"


def without_media(tokens: Sequence[int]) -> array[int]:
    """Return a prompt's tokens with 0 in each place that media take."""
    found = np.array(tokens, np.int64)
    found[found >= FIRST_MEDIA_TOKEN] = 0
    return array("q", found.tobytes())
