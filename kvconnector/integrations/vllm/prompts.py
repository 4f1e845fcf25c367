"""Prompts that consumers read while vLLM computes them, and its calls behind each attention layer of a step."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvconnector.integrations.vllm.caches import RegisteredGroup, layer_number
from kvconnector.integrations.vllm.messages import ConnectorStep
from kvconnector.session.orders import HoldRequest, Order


class Prompts:
    """`said` is the last order of each. Calls of layers are heeded once groups are given.

    vLLM's workers take a step's orders behind its kernels. Where layers call, what it will have computed is said in
    front of the first one, as not computed yet.
    """

    def __init__(self) -> None:
        self.said: dict[str, HoldRequest] = {}
        self._groups: Sequence[RegisteredGroup] = ()
        self._layers: dict[str, int] = {}
        self._step: ConnectorStep | None = None
        self._told: dict[str, HoldRequest] = {}
        self._left: list[int] = []
        self._called: set[int] = set()

    def heed(self, groups: Sequence[RegisteredGroup]) -> None:
        """Heed calls of these groups' layers."""
        self._groups = groups
        self._layers = {name: layer_number(name) for group in groups for name in group.tensors}

    def begin(self, step: ConnectorStep) -> tuple[HoldRequest, ...]:
        """A layer of a step calls: the orders to take before, if it is the first one."""
        if step is self._step or not (step.payload and self._groups):
            return ()
        self._step, self._told, self._called = step, {}, set()
        for order in step.decode().orders:
            if isinstance(order, HoldRequest) and not order.is_complete:
                before = self.said.get(order.request_id)
                num_tokens = before.num_tokens if before is not None else 0
                if order.num_tokens > num_tokens:
                    told = replace(order, num_tokens=num_tokens, ahead_tokens=order.num_tokens)
                    self._told[order.request_id] = told
        written = {
            layer
            for order in self._told.values()
            for group, blocks in zip(self._groups, order.blocks, strict=True)
            if blocks.wire_ids
            for layer in group.cache.geometry.layers
        }
        self._left = sorted(written, reverse=True)
        return tuple(self._told.values())

    def written(self, name: str) -> list[int]:
        """A layer of the step has called: up to which layers all have by now, and had not before."""
        written: list[int] = []
        if self._left and name in self._layers:
            self._called.add(self._layers[name])
            while self._left and self._left[-1] in self._called:
                written.append(self._left.pop())
        return written

    def end(self, step: ConnectorStep, orders: Sequence[Order]) -> list[Order]:
        """The step's kernels are launched: its orders, but for those that were told before it."""
        told, self._told, self._left = self._told, {}, []
        if step is not self._step:
            return list(orders)
        return [order for order in orders if not _is_in(order, told.get(order.request_id))]


def _is_in(order: Order, told: HoldRequest | None) -> bool:
    """Whether another order said as much."""
    if not isinstance(order, HoldRequest) or order.is_complete or told is None:
        return False
    return order.num_tokens <= told.num_tokens
