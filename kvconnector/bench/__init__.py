"""Benchmarks: each checks its result before it reports a time, beside a limit measured in the same run."""
