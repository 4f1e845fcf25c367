from kvconnector.runtime.outgoing import MAX_BATCH_BYTES, Outgoing
from kvconnector.wire import decode_batch, encode
from kvconnector.wire import messages as m


class Sent:
    """What was sent, by link: of each frame its messages."""

    def __init__(self):
        self.frames = []
        self.outgoing = Outgoing(lambda link, payload: self.frames.append((link, payload)))

    def say(self, link, *numbers):
        for number in numbers:
            self.outgoing.add(link, encode(m.HeartbeatReply(number=number)))

    def numbers(self):
        return [(link, [each.number for each in decode_batch(data)]) for link, data in self.frames]


def test_a_turn_sends_one_batch_a_link_in_its_order():
    sent = Sent()
    sent.say(1, 10, 11)
    sent.say(-2, 20)
    sent.say(1, 12)
    assert sent.frames == []
    sent.outgoing.flush()
    assert sent.numbers() == [(1, [10, 11, 12]), (-2, [20])]
    sent.outgoing.flush()
    assert len(sent.frames) == 2


def test_one_message_travels_as_it_is():
    sent = Sent()
    sent.say(1, 10)
    sent.outgoing.flush()
    assert sent.frames == [(1, encode(m.HeartbeatReply(number=10)))]


def test_ten_thousand_messages_make_batches_of_bounded_length_and_lose_nothing():
    sent = Sent()
    sent.say(1, *range(10_000))
    sent.outgoing.flush()
    assert [number for _, numbers in sent.numbers() for number in numbers] == [*range(10_000)]
    assert max(len(payload) for _, payload in sent.frames) < 2 * MAX_BATCH_BYTES


def test_a_long_message_goes_alone_and_in_its_place():
    sent = Sent()
    long = m.Bye(text="x" * 4096)
    sent.say(1, 1)
    for _ in range(9):
        sent.outgoing.add(1, encode(long))
    sent.say(1, 2)
    sent.outgoing.flush()
    messages = [each for _, payload in sent.frames for each in decode_batch(payload)]
    assert messages == [m.HeartbeatReply(number=1), *[long] * 9, m.HeartbeatReply(number=2)]


def test_a_link_that_is_gone_says_nothing_more():
    sent = Sent()
    sent.say(1, 10)
    sent.say(2, 20)
    sent.outgoing.forget(1)
    sent.outgoing.flush_link(2)
    sent.outgoing.flush()
    assert sent.numbers() == [(2, [20])]
