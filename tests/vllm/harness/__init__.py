"""Prefill and decode engines of real vLLM in forked processes, and the cases that compare them with one engine alone."""
