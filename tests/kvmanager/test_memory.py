"""What a pool in memory may take: by the machine, and by the control groups of either version."""

from pathlib import Path

import pytest

from kvmanager import memory

MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/vdb /dev/shm/a\\040disk ext4 rw 0 0
"""


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A machine with 1000 KiB, and 24 KiB to swap, outside all control groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mounts").write_text(MOUNTS)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/own\n0::/\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 2000 kB\nMemAvailable:   1000 kB\nSwapFree: 24 kB\n")
    return tmp_path


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("directory", "left"),
    [("/dev/shm/pool", 1024 << 10), ("/dev/shm/a disk/pool", None), ("/var/pool", None)],
)
def test_what_the_machine_has_is_left_to_files_in_memory(top: Path, directory: str, left: int | None) -> None:
    assert memory.available_for(Path(directory), top) == left


def test_the_narrowest_control_group_decides(top: Path) -> None:
    (top / "proc/self/cgroup").write_text("0::/outer/inner\n")
    stat = "anon 5\nfile 400\ninactive_file 100\nactive_file 50"
    group(top / "sys/fs/cgroup/outer", memory_max=1000, memory_current=600, memory_stat=stat)
    group(top / "sys/fs/cgroup/outer/inner", memory_max="max", memory_current=600, memory_stat=stat)
    assert memory.available_for(Path("/dev/shm"), top) == 1000 - 600 + 150


def test_control_groups_of_version_1(top: Path) -> None:
    (top / "proc/self/cgroup").write_text("4:memory:/own\n0::/\n")
    files = {"memory_limit_in_bytes": 900, "memory_usage_in_bytes": 950, "memory_stat": "cache 7"}
    group(top / "sys/fs/cgroup/memory/own", **files)
    assert memory.available_for(Path("/dev/shm"), top) == -50


def test_where_nothing_is_known_nothing_is_said(top: Path) -> None:
    (top / "proc/meminfo").write_text("MemTotal: 2000 kB\n")
    assert memory.available_for(Path("/dev/shm"), top) is None
    (top / "proc/meminfo").unlink()
    assert memory.available_for(Path("/dev/shm"), top) is None


@pytest.mark.parametrize(
    ("file", "text"),
    [("mounts", "odd"), ("mounts", "none relative tmpfs"), ("cgroup", "odd"), ("cgroup", "0::/g")],
)
def test_what_has_another_form_than_the_kernels_is_not_known(top: Path, file: str, text: str) -> None:
    group(top / "sys/fs/cgroup/g", memory_max="much", memory_current=1, memory_stat="")
    (top / "proc/self" / file).write_text(f"{text}\n")
    assert memory.available_for(Path("/dev/shm"), top) is None
