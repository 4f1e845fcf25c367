"""Which releases of vLLM this integration is written against, checked before anything of vLLM is used."""

from __future__ import annotations

import re

from kvconnector.errors import ConfigError

SUPPORTED_VLLM = (0, 32)
"""Major and minor number. vLLM changes its connector interface between minor releases."""


def check_version(found: str | None = None) -> None:
    """Accept the supported releases, and development builds (which say 0.0.0 or dev).

    Raises:
        ConfigError: another release is installed.
    """
    if found is None:
        import vllm

        found = str(vllm.__version__)
    release = re.match(r"(\d+)\.(\d+)", found)
    if release is None or release.group() in ("0.0", "0.1"):
        return
    if (int(release[1]), int(release[2])) != SUPPORTED_VLLM:
        wanted = ".".join(map(str, SUPPORTED_VLLM))
        raise ConfigError(
            f"kvconnector's vLLM integration works with vLLM {wanted}.x: install vllm=={wanted}.*, or a release of"
            " kvconnector for yours",
            found=found,
        )
