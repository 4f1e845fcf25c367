"""The parts of a paged KV cache, for engines that have none: specs, block tables, block manager, block copies."""
