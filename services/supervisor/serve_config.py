"""Settings of the supervisor (`pagekeeper serve`); each process's own come to it through the environment."""

from dataclasses import dataclass

from kvmanager.client import default_pool_directory
from kvmanager.settings import parse_bytes, setting


@dataclass(frozen=True)
class ServeConfig:
    """Start a KV manager, runners and frontends on this machine, restart what dies, stop all on Ctrl-C."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every IPv4 address of this machine")
    port: int = setting(8000, "TCP port to listen on; 0 takes a free one", minimum=0, maximum=65535)
    runners: int = setting(1, "runner processes", unit="processes", minimum=1, maximum=64)
    frontends: int = setting(
        1, "frontend processes; all share the port", unit="processes", minimum=1, maximum=64
    )
    model: str = setting("", "a folder, a GGUF file or a hub id; none: the packaged SmolLM2-135M-Instruct")
    pool_directory: str = setting(default_pool_directory(), "where the pool, its locks and its sockets lie")
    pool_bytes: int = setting(
        1 << 30, "size of a new pool's block data", unit="bytes", parse=parse_bytes, minimum=1
    )
    reset_pool: bool = setting(False, "start with an empty pool, whatever the directory holds")
    drain_seconds: float = setting(
        30.0,
        "how long running requests may go on after SIGTERM",
        unit="seconds",
        minimum=0.0,
        maximum=3600.0,
    )
    kill_stuck_seconds: float = setting(
        60.0,
        "how long a process may live without progress until it is killed and started again; 0: for ever",
        unit="seconds",
        minimum=0.0,
        maximum=86400.0,
    )
    healthy_seconds: float = setting(
        10.0,
        "a process that lived so long did not fail quickly; quick failures in a row end the service",
        unit="seconds",
        minimum=0.0,
        maximum=86400.0,
    )
    ready_seconds: float = setting(
        600.0,
        "how long the first start may take until it is ready",
        unit="seconds",
        minimum=1.0,
        maximum=86400.0,
    )
