"""Moving a read's chunks: kernels plus transport, with one submit-and-step interface."""

from kvconnector.datapath.pools import CacheGroup, Pools

__all__ = ["CacheGroup", "Pools"]
