"""Tokens that wait for a frontend, and the sender that never waits for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gpu_runner.token_outbox import TokenOutbox
from gpu_runner.token_sender import TokenSender
from kvmanager.protocol import (
    BeamPath,
    BeamScore,
    SearchState,
    TokenEvent,
    TokenLogprobs,
    decode_token_batch,
)

PROBABILITIES = tuple(TokenLogprobs(-float(index), 1, ()) for index in range(4))


def event(position: int, *token_ids: int, choice: int = 0, **more: object) -> TokenEvent:
    return TokenEvent("r", 0, choice, position, token_ids, 16, **more)


def test_what_a_sequence_adds_is_joined_to_what_waits() -> None:
    outbox = TokenOutbox()
    outbox.add([event(3, 10, logprobs=PROBABILITIES[:1], prompt_logprobs=(None,)), event(0, 7, choice=1)])
    outbox.add([event(4, 11, logprobs=PROBABILITIES[1:2], finish_reason="stop", stop_reason=11)])
    assert outbox.batch().events == (
        event(
            3,
            10,
            11,
            logprobs=PROBABILITIES[:2],
            prompt_logprobs=(None,),
            finish_reason="stop",
            stop_reason=11,
        ),
        event(0, 7, choice=1),
    )
    assert outbox.num_tokens == 3


def test_of_where_a_search_stands_only_the_last_waits_and_nothing_once_it_is_over() -> None:
    first, second = (SearchState((BeamPath((number,), -1.0),), ()) for number in range(2))
    outbox = TokenOutbox()
    outbox.add([event(0, search=first, prompt_logprobs=(None,))])
    outbox.add([event(0, search=second)])
    assert outbox.batch().events == (event(0, search=second, prompt_logprobs=(None,)),)
    outbox.add([event(0, 7, finish_reason="length", beam=BeamScore(-2.0, -1.0))])
    assert outbox.batch().events == (
        event(0, 7, finish_reason="length", beam=BeamScore(-2.0, -1.0), prompt_logprobs=(None,)),
    )


def test_tokens_that_do_not_follow_stay_apart() -> None:
    outbox = TokenOutbox()
    outbox.add([event(3, 10)])
    outbox.add([event(9, 11)])
    outbox.add([event(10, 12)])
    assert outbox.batch().events == (event(3, 10), event(9, 11, 12))


def test_clear_forgets_what_was_sent() -> None:
    outbox = TokenOutbox()
    outbox.add([event(0, 1)])
    outbox.clear()
    assert (len(outbox), outbox.num_tokens) == (0, 0)
    outbox.add([event(1, 2)])
    assert outbox.batch().events == (event(1, 2),)


@pytest.fixture
def pull(tmp_path: Path) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        yield socket


def flush_until(sender: TokenSender, clear: bool) -> None:
    """Turns of the runner's idle loop, each of which waits for the sockets."""
    for _ in range(200):
        if sender.flush() is clear:
            return
        poller = zmq.Poller()
        for socket in sender.blocked_sockets():
            poller.register(socket, zmq.POLLOUT)
        poller.poll(50)
    raise AssertionError("nothing changed in 10 s")


def test_tokens_wait_for_a_frontend_that_comes_late(tmp_path: Path, pull: "zmq.Socket[bytes]") -> None:
    sender, endpoint = TokenSender(60.0, 100), f"ipc://{tmp_path}/late.sock"
    for position in range(5):
        sender.send({endpoint: [event(position, 20 + position)]})
    pull.bind(endpoint)
    flush_until(sender, clear=True)
    assert pull.poll(10_000)
    assert decode_token_batch(pull.recv()).events == (event(0, 20, 21, 22, 23, 24),)
    sender.close()


def test_a_frontend_that_is_gone_is_given_up_and_the_others_do_not_notice(
    tmp_path: Path, pull: "zmq.Socket[bytes]"
) -> None:
    sender, here, gone = TokenSender(0.0, 100), f"ipc://{tmp_path}/here.sock", f"ipc://{tmp_path}/gone.sock"
    pull.bind(here)
    sender.send({gone: [event(0, 1, 2, 3)]})
    flush_until(sender, clear=True)
    assert sender.dropped_tokens == 3
    sender.close()


def test_what_waits_for_a_frontend_is_bounded(tmp_path: Path) -> None:
    sender, endpoint = TokenSender(60.0, 10), f"ipc://{tmp_path}/gone.sock"
    sender.send({endpoint: [event(0, *range(10))]})
    assert sender.dropped_tokens == 0
    sender.send({endpoint: [event(10, 10)]})
    assert sender.dropped_tokens == 11
    assert sender.blocked_sockets() == []
    sender.close()


def test_an_endpoint_that_is_none_costs_only_its_own_tokens() -> None:
    sender = TokenSender(60.0, 10)
    sender.send({"nonsense": [event(0, 1)]})
    assert sender.dropped_tokens == 1
    assert sender.flush()
    sender.close()
