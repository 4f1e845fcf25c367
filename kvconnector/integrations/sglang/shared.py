"""What the package and its backend both need. The package, unlike the backend, is imported before SGLang is."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.metadata import version

from kvconnector.integrations.contract import Sources, admit, differences, policy_of
from kvconnector.integrations.sglang import used

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("0.5.21", "0.5.22", "0.5.23")
NOT_RELEASED = "kvconnector: "
"""The beginning of the `rid` in an answer of SGLang's scheduler that released no memory; the reason follows. Such
answers have no field for an error, and nothing else uses their `rid`.
"""


@cache
def check_release(part: str = "ENTRIES") -> None:
    """Raise ConfigError unless this is a known release of SGLang, or one that has everything in `part` of `used.py`.
    For one that is not known, this warns once.
    """
    warning = admit(
        "SGLang",
        version("sglang"),
        known=KNOWN_VERSIONS,
        policy=policy_of(os.environ),
        find=lambda: differences(getattr(used, part), Sources.of("sglang")),
    )
    if warning:
        logger.warning("%s", warning)
