"""KV-cache transfer between prefill and decode engines that are cut differently."""

from kvconnector._version import __version__

__all__ = ["__version__"]
