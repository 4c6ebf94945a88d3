"""Writes docs/settings.md from the declarations: `python -m tests.settings_docs > docs/settings.md`."""

import dataclasses
from typing import Any

from gpu_runner.config import RunnerConfig
from kvmanager.client import default_pool_directory
from kvmanager.config import ManagerConfig
from kvmanager.pool_tool import PoolConfig
from kvmanager.settings import allowed, env_name, flag_name, parse_bytes
from services.config import FrontendConfig
from services.supervisor.serve_config import ServeConfig
from services.terminal.chat_client import ChatConfig

HEAD = """# Settings

Each process reads a setting from its flag, else from the environment, else takes the default. A value that
is not allowed is refused at start, with the setting's name, the value and what is allowed (exit status 2).
`--help` of each command shows the same. Sizes in bytes may be written `512M`, `2G` (powers of 1024).

`pagekeeper serve` passes its environment on to the processes that it starts, so every setting below can be
given to it as a variable: `PAGEKEEPER_DTYPE=float32 pagekeeper serve`. Its own settings win where they name
the same thing.

`make serve` takes the variables `HOST`, `PORT`, `RUNNERS`, `FRONTENDS`, `MODEL`, `POOL` (`--pool-bytes`) and
`RESET_POOL` (`--reset-pool`): `make serve PORT=9000 RUNNERS=2 POOL=4G`.

This page is written by `python -m tests.settings_docs`; a test compares the two.
"""

PROCESSES: tuple[tuple[str, type[Any]], ...] = (
    ("pagekeeper serve", ServeConfig),
    ("pagekeeper kvmanager", ManagerConfig),
    ("pagekeeper runner", RunnerConfig),
    ("pagekeeper frontend", FrontendConfig),
    ("pagekeeper chat", ChatConfig),
    ("pagekeeper pool", PoolConfig),
)


def default_of(field: "dataclasses.Field[Any]") -> str:
    """The default as a user would write it."""
    if field.default in ("", None):
        return "none"
    if field.default == default_pool_directory():
        return "`/dev/shm/pagekeeper-<uid>/default`"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    if field.metadata["parse"] is parse_bytes:
        size, unit = field.default, 0
        while size % 1024 == 0 and unit < 4:
            size, unit = size // 1024, unit + 1
        return f"`{size}{'KMGT'[unit - 1] if unit else ''}`"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def row(field: "dataclasses.Field[Any]") -> str:
    unit = field.metadata["unit"] or "–"
    cells = (f"`{flag_name(field)}`", f"`{env_name(field)}`", unit, default_of(field), allowed(field))
    return "| " + " | ".join((*cells, field.metadata["help"])) + " |"


def table(config: type[Any]) -> str:
    head = "| flag | environment | unit | default | allowed | what it is |\n|---|---|---|---|---|---|"
    return "\n".join([head, *(row(field) for field in dataclasses.fields(config))])


def render() -> str:
    """The whole page."""
    sections = (f"## {command}\n\n{config.__doc__}\n\n{table(config)}" for command, config in PROCESSES)
    return "\n\n".join([HEAD.rstrip(), *sections]) + "\n"


if __name__ == "__main__":
    print(render(), end="")
