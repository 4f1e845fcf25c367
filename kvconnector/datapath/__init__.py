"""Moving a read's chunks: kernels plus transport, behind one submit-and-step interface."""

from kvconnector.datapath.pools import CacheGroup, Pools

__all__ = ["CacheGroup", "Pools"]
