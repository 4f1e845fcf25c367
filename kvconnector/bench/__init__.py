"""Benchmarks, beside the limits of the same machine."""
