"""The daemon with a disk tier: real bytes go down and come back, over a restart too; what is wrong with the
file or the disk costs hits, never the daemon.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmanager.client import ManagerClient
from kvmanager.errors import PagekeeperError
from kvmanager.protocol import PROTOCOL_VERSION, Directives, Ended, RunnerHello, Start, Stats, StepReport
from tests.kvmanager.fake_clients import BLOCK_SIZE, LAYOUT, submission
from tests.kvmanager.test_server import Daemon, stats_when, wait_for

SIZE = LAYOUT.block_bytes
PROMPTS = [[number] * 40 for number in range(1, 12)]  # 110 full blocks of 128


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(str(tmp_path / "pool"))
    yield daemon
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.process.kill()
        daemon.process.communicate()


def pattern(prompt: list[int], index: int) -> bytes:
    """What the "KV" of a block is."""
    return bytes([prompt[0], index]) * (SIZE // 2)


def ask(
    daemon: Daemon, name: str, prompt: list[int], runner: ManagerClient, frontend: ManagerClient
) -> Start:
    """Run a request; what is a hit must hold the right bytes, and the rest is written."""
    frontend.send(submission(name, prompt))
    start: Start = wait_for(runner, Directives, lambda message: message.starts).starts[0]
    (sequence,) = start.sequences
    with open(Path(daemon.directory) / "kv.bin", "r+b") as data:
        for index, (block, _) in enumerate(sequence.block_table):
            data.seek(block * SIZE)
            if index < sequence.num_cached_tokens // BLOCK_SIZE:
                assert data.read(SIZE) == pattern(prompt, index)
            else:
                data.write(pattern(prompt, index))
    runner.send(StepReport(ended=(Ended(start.start_id, 0, (), len(prompt), "finished"),)))
    return start


def ask_all(daemon: Daemon, runner: ManagerClient, frontend: ManagerClient) -> Stats:
    for number, prompt in enumerate(PROMPTS):
        ask(daemon, f"r{number}", prompt, runner, frontend)
    return stats_when(frontend, lambda stats: stats.running == 0)


def test_blocks_outlive_the_pool_in_the_tier(daemon: Daemon, tmp_path: Path) -> None:
    flags = (f"--disk-tier={tmp_path}/tier", "--disk-bytes=4M", "--resume=promote")
    daemon.start(*flags)
    with daemon.runner() as runner, daemon.frontend() as frontend:
        assert ask_all(daemon, runner, frontend).tier.num_slots > 100
        stats = stats_when(frontend, lambda stats: stats.tier.blocks >= 30)
        assert stats.tier.bytes == stats.tier.blocks * SIZE
        assert stats.tier.failures == 0
    status, _ = daemon.stop()
    assert status == 0
    daemon.start("--reset-pool", *flags)
    with daemon.runner() as runner, daemon.frontend() as frontend:
        start = ask(daemon, "again", PROMPTS[0], runner, frontend)
        assert start.sequences[0].num_cached_tokens == 36
        assert stats_when(frontend, lambda stats: stats.running == 0).tier.promotions == 9


def test_damaged_blocks_in_the_tier_are_misses(daemon: Daemon, tmp_path: Path) -> None:
    flags = (f"--disk-tier={tmp_path}/tier", "--disk-bytes=4M", "--resume=promote")
    daemon.start(*flags)
    with daemon.runner() as runner, daemon.frontend() as frontend:
        ask_all(daemon, runner, frontend)
        stats_when(frontend, lambda stats: stats.tier.blocks >= 30)
    daemon.stop()
    image = bytearray((tmp_path / "tier").read_bytes())
    for place in range(0, len(image), SIZE):
        if image[place : place + SIZE] == pattern(PROMPTS[0], 3):
            image[place] ^= 1
    (tmp_path / "tier").write_bytes(image)
    daemon.start("--reset-pool", *flags)
    with daemon.runner() as runner, daemon.frontend() as frontend:
        start = ask(daemon, "again", PROMPTS[0], runner, frontend)
        assert start.sequences[0].num_cached_tokens == 12
        assert stats_when(frontend, lambda stats: stats.running == 0).tier.failures == 1
    assert "event=tier_promotion_failed" in daemon.stop()[1]


def test_a_full_disk_costs_copies_and_nothing_else(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start(f"--disk-tier={tmp_path}/tier", "--disk-bytes=4M")
    with daemon.runner() as runner, daemon.frontend() as frontend:
        assert daemon.process is not None
        limit = (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, limit)
        ask_all(daemon, runner, frontend)
        stats = stats_when(frontend, lambda stats: stats.tier.failures > 0)
        assert stats.tier.blocks == 0
        assert ask(daemon, "again", PROMPTS[-1], runner, frontend).sequences[0].num_cached_tokens == 39
    status, errors = daemon.stop()
    assert status == 0
    assert errors.count("event=tier_demotion_failed reason='[Errno 27] File too large'") == 1


@pytest.mark.parametrize("path", ["/dev/full", "absent/folder/tier", "thesis.txt"])
def test_a_file_that_cannot_be_used_leaves_the_daemon_without_a_tier(
    daemon: Daemon, tmp_path: Path, path: str
) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    daemon.start(f"--disk-tier={tmp_path / path}")
    with daemon.runner() as runner, daemon.frontend() as frontend:
        assert ask_all(daemon, runner, frontend).tier.num_slots == 0
    assert "event=tier_disabled" in daemon.stop()[1]
    assert (tmp_path / "thesis.txt").read_text() == "ten years of work"


def test_a_runner_whose_blocks_are_elsewhere_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    """A tier that copies from `kv.bin` would keep something else under the names of its blocks."""
    daemon.start(f"--disk-tier={tmp_path}/tier")
    hello = RunnerHello(PROTOCOL_VERSION, "gpu", "gpu", LAYOUT, 4, 100, shared_pool=False)
    with (
        ManagerClient("", hello, daemon.directory) as client,
        pytest.raises(
            PagekeeperError, match=r"start the manager without disk_tier, or the runner with device=cpu"
        ),
    ):
        client.connect(20.0)
