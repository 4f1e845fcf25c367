"""Prefill and decode engines of real vLLM in forked processes, and the cases they are compared in."""
