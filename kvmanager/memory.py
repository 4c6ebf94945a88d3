"""How much memory a pool may take: what the machine, and the control groups that we are in, have left.

A file on a tmpfs is memory: allocating it beyond what is there would have the kernel kill somebody.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")  # file systems

CONTROL_GROUPS = {
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
"""Version 2, and version 1: where they are, and their files for the limit and the use."""


def available_for(directory: Path, top: Path = Path("/")) -> int | None:
    """Bytes that files in this directory may still take of memory; None where they lie elsewhere, or nothing
    is known. `top`: where `proc` and `sys` are.
    """
    try:
        if file_system(directory, (top / "proc/self/mounts").read_text()) not in IN_MEMORY:
            return None
        known = sizes((top / "proc/meminfo").read_text(), 1024)
        machine = known["MemAvailable"] + known.get("SwapFree", 0)
        groups = (top / "proc/self/cgroup").read_text()
        return min([machine, *left_in_groups(top / "sys/fs/cgroup", groups)])
    except (OSError, KeyError, ValueError):  # not there, or in another form than the kernel's
        return None


def file_system(directory: Path, mounts: str) -> str:
    """The type of the one on which the directory lies."""
    path, deepest, kind = os.path.realpath(directory), -1, ""
    for line in mounts.splitlines():
        point, found = line.split()[1:3]
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)
        if os.path.commonpath([path, point]) == point and len(point) >= deepest:  # a later one lies on top
            deepest, kind = len(point), found
    return kind


def sizes(text: str, unit: int) -> dict[str, int]:
    """Lines of a name and a number."""
    found = (re.match(r"(\w+):?\s+(\d+)", line) for line in text.splitlines())
    return {match[1]: int(match[2]) * unit for match in found if match}


def left_in_groups(root: Path, groups: str) -> Iterator[int]:
    """What each control group from ours upwards has left. Files of a disk that it has read give way."""
    for line in groups.splitlines():
        _, kind, own = line.split(":", 2)
        if kind not in CONTROL_GROUPS:
            continue
        folder, limit, usage = CONTROL_GROUPS[kind]
        group = root / folder / own.strip("/")
        for place in (group, *group.parents):
            try:
                most, used = (place / limit).read_text().strip(), (place / usage).read_text()
                held = sizes((place / "memory.stat").read_text(), 1)
            except OSError:  # the root has no limit
                continue
            if most != "max":
                yield int(most) - int(used) + held.get("inactive_file", 0) + held.get("active_file", 0)
