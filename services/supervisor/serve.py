"""`pagekeeper serve`: a KV manager, runners and frontends on this machine, as one service."""

import asyncio
import contextlib
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from kvmanager.client import ignore_stops, leftovers, named
from kvmanager.errors import PagekeeperError
from services.supervisor.lock_files import held
from services.supervisor.processes import Command, Supervisor, say
from services.supervisor.ready import curl_line, fetch, reason, url_of
from services.supervisor.serve_config import ServeConfig
from services.supervisor.supervision import CONFIGURATION_ERROR, Child, Policy
from services.text import model_source

FRONTEND, RUNNER, MANAGER = range(3)
"""Stages of a stop: no process goes before those that need it."""

RUNNER_LOCK = f"runner-{platform.node()}-{{pid}}"  # as a runner without a name of its own calls itself
POLL_SECONDS = 0.1  # between two looks at /ready
PROGRESS_SECONDS = 5.0  # between two lines that say that the start goes on


def commands(config: ServeConfig, model: str, port: int, environ: Mapping[str, str]) -> list[Command]:
    """The processes of `config`; `model` is a local path, `port` the one that was bound."""
    own = ("PAGEKEEPER_NAME", "PAGEKEEPER_RESET_POOL")  # a name is one process's; a reset happens once
    shared = {key: value for key, value in environ.items() if key not in own}
    shared |= {
        "PAGEKEEPER_MODEL": model,
        "PAGEKEEPER_POOL_DIRECTORY": config.pool_directory,
        "PAGEKEEPER_POOL_BYTES": str(config.pool_bytes),
        "PAGEKEEPER_HOST": config.host,
        "PAGEKEEPER_PORT": str(port),
        "PAGEKEEPER_REUSE_PORT": "true",
        "PAGEKEEPER_DRAIN_SECONDS": str(config.drain_seconds),
        "PYTHONUNBUFFERED": "1",
    }
    if config.runners > 1:
        cores = len(os.sched_getaffinity(0))
        shared.setdefault("PAGEKEEPER_THREADS", str(max(1, cores // config.runners)))

    locks = os.path.join(config.pool_directory.replace("{", "{{").replace("}", "}}"), "locks")

    def command(child: Child, module: str, lock: str, first: Mapping[str, str], **own: str) -> Command:
        argv = (sys.executable, "-m", module)
        return Command(child, argv, {**shared, **own}, first, os.path.join(locks, lock))

    reset = {"PAGEKEEPER_RESET_POOL": str(config.reset_pool).lower()}
    runners = [f"runner-{number}" for number in range(config.runners)]
    frontends = [f"frontend-{number}" for number in range(config.frontends)]
    return [
        command(Child("kvmanager", MANAGER), "kvmanager", "manager", reset),
        *(
            command(Child(name, RUNNER, config.drain_seconds), "gpu_runner", RUNNER_LOCK, {})
            for name in runners
        ),
        # A frontend keeps its name over restarts, so that its counters go on.
        *(
            command(Child(name, FRONTEND, config.drain_seconds), "services", name, {}, PAGEKEEPER_NAME=name)
            for name in frontends
        ),
    ]


def bind(host: str, port: int) -> socket.socket:
    """Take the port, without listening: the frontends share it, and it stays ours while one is restarted.

    Raises OSError, in words, if it is in use or not ours to take.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as alone:
            # Without SO_REUSEPORT, so that another server's port is seen; one just closed may be had again.
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            address = alone.getsockname()
        shared = socket.socket(family, kind, protocol)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(address)
    except OSError as error:
        raise OSError(
            f"cannot listen on host {host!r}, port {port}: {error}; choose others with --host, --port"
        ) from None
    return shared


def refuse_used(pool_directory: str) -> None:
    """Raises OSError, in words, if another KV manager has the pool directory; PagekeeperError if it has no
    name.
    """
    if held(named(pool_directory) / "locks/manager"):
        raise OSError(
            f"the pool directory {pool_directory} is in use by another KV manager; "
            "stop that one, or choose another with --pool-directory"
        )


def sweep(pool_directory: str) -> None:
    """Remove what killed processes left beside the pool, unless somebody still uses it."""
    pool = Path(pool_directory)
    if not any(held(lock) for lock in pool.glob("locks/*")):
        for path in leftovers(pool, ("locks", "sockets", "metrics")):
            path.unlink(missing_ok=True)


async def watch(config: ServeConfig, port: int, supervisor: Supervisor) -> None:
    """Show progress until the service is ready, then how to use it; stop it if that takes too long."""
    began = time.monotonic()
    shown, show_at = "", began + PROGRESS_SECONDS
    while not supervisor.stopping:
        status, body = await fetch(config.host, port, "/ready")
        now = time.monotonic()
        if status == 200:
            await announce(config, port, now - began)
            return
        if now - began > config.ready_seconds:
            say(
                "supervisor",
                f"not ready after ready_seconds={config.ready_seconds:g}: {shown or 'no answer'}",
            )
            supervisor.stop(status=1)
            return
        why = reason(body) if status else "the frontend is starting"
        if now >= show_at or (status and why != shown):
            say("supervisor", f"{now - began:.0f} s: {why or f'/ready answers {status}'}")
            shown, show_at = why, now + PROGRESS_SECONDS
        await asyncio.sleep(POLL_SECONDS)


async def announce(config: ServeConfig, port: int, seconds: float) -> None:
    """The lines that a user waits for."""
    url = url_of(config.host, port)
    models = await fetch(config.host, port, "/v1/models")
    say("supervisor", f"ready in {seconds:.1f} s: {url}  (Ctrl-C stops)")
    say("supervisor", "try:")
    with contextlib.suppress(OSError):
        print(f"\n{curl_line(url, models)}\n", flush=True)


async def _serve(config: ServeConfig, model: str, port: int) -> int:
    supervisor = Supervisor(
        commands(config, model, port, os.environ),
        Policy(healthy_after=config.healthy_seconds),
        stuck_seconds=config.kill_stuck_seconds,
    )
    ignore_stops()  # as it will be again when the supervisor is done
    watching = asyncio.create_task(watch(config, port, supervisor))
    try:
        return await supervisor.run()
    finally:
        watching.cancel()


def serve(config: ServeConfig) -> int:
    """Run the service until a stop; returns the exit status."""
    say("supervisor", f"looking for the model {config.model or '(packaged)'}")
    model = model_source.resolve(config.model)
    say("supervisor", f"model {model}, pool {config.pool_directory}")
    try:
        refuse_used(config.pool_directory)
        reserved = bind(config.host, config.port)
    except (OSError, PagekeeperError) as error:
        print(f"pagekeeper serve: {error}", file=sys.stderr)
        return CONFIGURATION_ERROR
    sweep(config.pool_directory)  # of an earlier start that was killed
    with reserved:
        status = asyncio.run(_serve(config, str(model), reserved.getsockname()[1]))
    sweep(config.pool_directory)
    say("supervisor", "stopped")
    return status
