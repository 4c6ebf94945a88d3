"""A Hello may come late, when its sender or a successor of the same name has a session already: it frees no
block that is still written. Only a message under the new session proves that nothing older is used.
"""

from msgspec.structs import replace

from kvmanager.core import Core
from kvmanager.pool.block_pool import CACHED, FREE, QUARANTINED, SEALED, BlockPool
from kvmanager.pool.hashing import content
from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Choice,
    FrontendHello,
    Layout,
    Ready,
    Refused,
    RunnerHello,
    RunnerLost,
    SamplingParams,
    Submit,
    Welcome,
)
from kvmanager.restore import restore_pool
from kvmanager.scheduling.clients import Quarantine
from kvmanager.state import Policy

LAYOUT = Layout("fingerprint", "float32", 4, 1, 1, 2)
RUNNER_HELLO = RunnerHello(PROTOCOL_VERSION, "runner", "runner", LAYOUT, 4, 100)
FRONTEND, RUNNER, NEXT_RUNNER = 1, 2, 3


def running_core() -> tuple[Core, BlockPool]:
    """A runner that writes blocks 0 and 1."""
    core = Core("boot", "/pool", Policy(), 0.0)
    pool = BlockPool(4, LAYOUT)
    core.attach(pool)
    core.hello(0.0, FrontendHello(PROTOCOL_VERSION, "frontend", "frontend", "ipc://tokens"))
    core.hello(0.0, RUNNER_HELLO)
    core.handle(0.0, RUNNER, Ready())
    choices = (Choice(0),)
    core.handle(0.0, FRONTEND, Submit("request", 0, 0.0, (1, 2, 3, 4, 5), choices, SamplingParams(9, 1)))
    return core, pool


def test_blocks_of_the_session_before_are_kept_until_the_new_one_is_used() -> None:
    core, pool = running_core()
    effects = core.hello(1.0, RUNNER_HELLO)[1]
    assert (FRONTEND, RunnerLost((("request", 0),))) in effects.messages
    assert pool.state == [QUARANTINED, QUARANTINED, FREE, FREE]
    core.handle(1.0, NEXT_RUNNER, Ready())
    assert pool.state == [FREE] * 4


def test_or_until_the_process_dies() -> None:
    core, pool = running_core()
    core.hello(1.0, RUNNER_HELLO)
    core.process_died(1.0, "runner")
    assert pool.state == [FREE] * 4


def test_a_hello_at_the_next_managers_start_frees_nothing_yet() -> None:
    core, pool = running_core()
    reserved = [pool.record(block) for block in range(3)]
    pool.seal(0, content(pool.root, bytes(16), b""), 0.0)
    core = Core("next boot", "/pool", Policy(), 1.0)
    pool, quarantines = restore_pool(LAYOUT, [pool.record(0), *reserved[1:]], ("runner",))
    core.attach(pool, quarantines, ("runner",))
    welcome = core.hello(1.0, RUNNER_HELLO)[0]
    assert isinstance(welcome, Welcome)
    assert pool.state == [CACHED, QUARANTINED, FREE]
    assert not pool.may_evict
    core.handle(1.0, welcome.session.client_id, None)  # a probe
    assert pool.state == [CACHED, FREE, FREE]
    assert pool.may_evict


def test_a_runner_with_memory_of_its_own_begins_with_nothing_and_alone() -> None:
    core = Core("boot", "/pool", Policy(), 0.0)
    pool = BlockPool(4, LAYOUT)
    core.attach(pool)
    own = replace(RUNNER_HELLO, shared_pool=False)
    core.hello(0.0, own)
    for block, text in enumerate((bytes(16), b"1234" * 4)):
        holder = Quarantine("some holder")
        pool.grant(holder)
        pool.seal(block, content(pool.root, text, b""), 0.0)
        if block:
            pool.release(block, holder)
    assert pool.state == [SEALED, CACHED, FREE, FREE]
    refused = core.hello(1.0, replace(RUNNER_HELLO, name="other", lock="other"))[0]
    assert isinstance(refused, Refused)
    assert "cannot share a pool" in refused.message
    core.hello(2.0, replace(own, max_num_seqs=5))
    assert pool.state == [SEALED, FREE, FREE, FREE]
    assert pool.unfound == {0}
    assert pool.find(content(pool.root, bytes(16), b"")) is None
