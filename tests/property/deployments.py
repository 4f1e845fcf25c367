"""Random settings of a deployment, and the records that its engines keep of their requests."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

LONG_IDLE_S = 300.0


@st.composite
def settings_of_an_engine(draw):
    """Draw settings in which two engines may differ."""
    timeout_s = draw(st.sampled_from([3.0, 15.0, 60.0]))
    duration_s = draw(st.sampled_from([8.0, 30.0]))
    return {
        "peer": {
            "hello_timeout_s": draw(st.sampled_from([4.0, 10.0])),
            "heartbeat_interval_s": min(
                timeout_s / draw(st.sampled_from([1.5, 3.0])), duration_s / 2
            ),
            "timeout_s": timeout_s,
            "idle_timeout_s": timeout_s + draw(st.sampled_from([1.0, LONG_IDLE_S])),
            "transfer_timeout_s": draw(st.sampled_from([5.0, 30.0])),
            "progress_timeout_s": draw(st.sampled_from([20.0, 60.0])),
        },
        "lease": {"duration_s": duration_s, "early_follow_s": draw(st.sampled_from([6.0, 40.0]))},
        "staging": {
            "chunk_bytes": draw(st.sampled_from([16, 40, 20 * 1024])),
            "budget_bytes": 64 * 1024,
            "window": draw(st.integers(1, 3)),
        },
        "control": {"insecure": True, "over_ucx": draw(st.booleans())},
    }


def longest_wait_s(settings):
    """Return the longest wait of an engine with working links, in seconds: the sum of its deadlines."""
    times = {"hello_timeout_s": 3, "timeout_s": 2, "transfer_timeout_s": 2, "progress_timeout_s": 1}
    times |= {"duration_s": 1, "early_follow_s": 1}
    waits = [each["peer"] | each["lease"] for each in settings]
    return sum(max(wait[name] for wait in waits) * count for name, count in times.items())


def are_apart(engines):
    """Returns True if no worker of two producers and a consumer knows another one."""
    *producers, consumers = [[worker.driver for worker in engine.workers] for engine in engines]
    links = [link for drivers in producers for driver in drivers for link in driver.links]
    return not any(
        [link.peer for link in links] + [driver.consumer._engines._engines for driver in consumers]
    )


@dataclass
class Held:
    """A request that a producer engine holds: its blocks and their bytes. `num_computed` tokens are reported; `is_void`
    means that its blocks were taken before the prompt's end. The step under way computes the tokens up to `step_stop`,
    and its first `num_layers` layers are written.
    """

    engine: object
    name: str
    block_ids: list
    num_tokens: int
    offer: object
    dense: dict
    waiting: set
    num_computed: int = 0
    is_void: bool = False
    step_stop: int = 0
    num_layers: int = 0

    @property
    def is_complete(self):
        return self.num_computed == self.num_tokens

    def step(self, num_tokens):
        """Compute `num_tokens` more tokens, or finish the step under way."""
        stop = self.step_stop or min(self.num_tokens, self.num_computed + num_tokens)
        self.num_computed, self.step_stop, self.num_layers = stop, 0, 0
        self.write()
        self.report()

    def compute_layer(self, num_tokens):
        """Compute the next layer of the step under way, or the first one of a new step."""
        if not self.step_stop:
            self.step_stop = min(self.num_tokens, self.num_computed + num_tokens)
            self.report()
        self.num_layers = min(self.engine.shape.model.num_layers, self.num_layers + 1)
        self.write()
        for worker in self.engine.workers:
            worker.layer_written(self.name, self.num_layers - 1)

    def report(self):
        """Let consumers read the computed tokens, unless the request lost its blocks."""
        stop = max(self.num_computed, self.step_stop)
        ids = self.block_ids[: -(-stop // self.engine.shape.block_sizes[0])]
        if self.is_complete or not self.is_void:
            self.engine.grant(
                self.name,
                [ids],
                self.num_computed,
                grown_from=self.offer,
                is_complete=self.is_complete,
                step_stop=self.step_stop,
            )

    def write(self):
        """Write the drawn bytes of all computed tokens."""
        size = self.engine.shape.block_sizes[0]
        for worker in self.engine.workers:
            for (group, layer, part), array in worker.caches.arrays.items():
                heads = worker.caches.rank.groups[group].parts[part]
                stop = self.step_stop if layer < self.num_layers else self.num_computed
                for token in range(stop):
                    array[self.block_ids[token // size], :, token % size] = self.dense[
                        group, layer, part
                    ][heads.head_start : heads.head_stop, token]


@dataclass
class Wanted:
    """A request that the consumer engine wants; `waiting` are the ranks that still load it."""

    engine: object
    name: str
    held: Held
    block_ids: list = field(default_factory=list)
    tokens: range = range(0)
    waiting: set = field(default_factory=set)
    is_followed: bool = False
    is_failed: bool = False
    producer_started: bool = False
