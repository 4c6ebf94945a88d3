"""`python -m services.health_check kvmanager|runner|frontend`: is the process well? Exit status 0 or 1.

- kvmanager: it answers a message. (One under a session that does not exist: the answer is `Fenced`.)
- runner: it is attached to the pool, and gets on: a lock whose name begins with `runner-<this host>` is held,
  and was touched within `SILENCE` seconds.
- frontend: its `/ready` answers 200.

Each takes the same settings from the environment as the process itself.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq

from kvmanager.client import default_pool_directory, manager_endpoint
from kvmanager.protocol import Fenced, Session, decode_to_frontend, encode
from services.supervisor.heartbeats import modified
from services.supervisor.lock_files import held
from services.supervisor.ready import fetch

TIMEOUT = 2.0  # seconds
SILENCE = 30.0  # seconds; one that runs touches its lock file several times in each


def pool_directory(environ: Mapping[str, str]) -> str:
    return environ.get("PAGEKEEPER_POOL_DIRECTORY") or default_pool_directory()


def kvmanager(environ: Mapping[str, str]) -> str:
    """What is wrong with the manager; "" if nothing is."""
    endpoint = environ.get("PAGEKEEPER_MANAGER") or manager_endpoint(pool_directory(environ))
    unknown = encode(Session(boot_id="", client_id=0, incarnation=0))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart([unknown, b""])
        if not dealer.poll(int(TIMEOUT * 1000)):
            return f"no answer at {endpoint} within {TIMEOUT:g} s"
        answer = decode_to_frontend(dealer.recv_multipart(zmq.DONTWAIT)[-1])
    return "" if isinstance(answer, Fenced) else f"an answer of another kind: {type(answer).__name__}"


def runner(environ: Mapping[str, str]) -> str:
    """What is wrong with this host's runner; "" if nothing is."""
    locks = Path(pool_directory(environ), "locks")
    name = environ.get("PAGEKEEPER_NAME") or f"runner-{socket.gethostname()}"
    held_ones = [lock for lock in locks.glob(f"{name}*") if held(lock)]
    if not held_ones:
        return f"no lock {name}* is held in {locks}"
    silent = time.time() - max(modified(lock) for lock in held_ones) / 1e9
    return "" if silent < SILENCE else f"{name} has made no progress for {silent:.0f} s"


def frontend(environ: Mapping[str, str]) -> str:
    """What is wrong with this host's frontend; "" if nothing is."""
    port = int(environ.get("PAGEKEEPER_PORT") or 8000)
    status, body = asyncio.run(fetch(environ.get("PAGEKEEPER_HOST") or "127.0.0.1", port, "/ready"))
    return "" if status == 200 else f"/ready answers {status}: {body.decode(errors='replace')}"


CHECKS: dict[str, Callable[[Mapping[str, str]], str]] = {
    "kvmanager": kvmanager,
    "runner": runner,
    "frontend": frontend,
}


def main(argv: list[str]) -> int:
    """Exit status: 0 is well, 1 is not, 2 is wrong usage."""
    if len(argv) != 1 or argv[0] not in CHECKS:
        print(f"usage: python -m services.health_check {'|'.join(CHECKS)}", file=sys.stderr)
        return 2
    wrong = CHECKS[argv[0]](os.environ)
    if wrong:
        print(f"{argv[0]}: {wrong}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
