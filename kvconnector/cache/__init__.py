"""How caches lie in memory, and who owns which block: addressing, specs, block tables, the block manager."""
