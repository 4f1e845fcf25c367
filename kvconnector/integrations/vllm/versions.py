"""Which releases of vLLM this integration is written against, checked before anything of vLLM is used."""

from __future__ import annotations

import re

from kvconnector.errors import ConfigError

SUPPORTED_VLLM = ((0, 32), (0, 33))
"""Major and minor numbers. vLLM changes its connector interface between minor releases.

What differs between these: 0.33 has sleep mode with connectors, and calls `supports_sleep_mode`,
`unregister_kv_caches`, `restore_kv_caches` and, after each wake-up, `set_xfer_handshake_metadata_pp_aware` again.
"""


def check_version(found: str | None = None) -> None:
    """Accept the supported releases, and development builds (which say 0.0.0 or dev). Raises ConfigError: another
    release is installed.
    """
    if found is None:
        import vllm

        found = str(vllm.__version__)
    release = re.match(r"(\d+)\.(\d+)", found)
    if release is None or release.group() in ("0.0", "0.1"):
        return
    if (int(release[1]), int(release[2])) not in SUPPORTED_VLLM:
        wanted = " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED_VLLM)
        raise ConfigError(
            f"kvconnector's vLLM integration works with vLLM {wanted}: install one of these, or a release of"
            " kvconnector for yours",
            found=found,
        )
