"""`python -m kvmanager`: run the KV manager until SIGTERM or SIGINT."""

import gc
import logging
import os
import sys
from typing import Final

from kvmanager.config import ManagerConfig
from kvmanager.errors import PagekeeperError
from kvmanager.server import Server
from kvmanager.settings import load
from kvmanager.stop_signals import on_stop, run_process

COLLECT_AFTER: Final = (
    50_000  # allocations; the core leaves next to no cycles, and a collection takes its time
)


def main() -> int:
    """0 after a clean end; 1 with one line that says why it cannot run."""
    config = load(ManagerConfig, "pagekeeper kvmanager", sys.argv[1:], os.environ)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    gc.disable()  # a pool of many records is many objects, and none of them is garbage
    try:
        server = Server(config)
    except (PagekeeperError, OSError) as error:
        print(f"kvmanager: {error}", file=sys.stderr)
        return 1
    on_stop(server.stop)
    try:
        gc.freeze()  # what is there now stays: the collector need not look at it again
        gc.set_threshold(COLLECT_AFTER)
        gc.enable()
        server.run()
    except PagekeeperError as error:
        print(f"kvmanager: {error}", file=sys.stderr)
        return 1
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_process(main))
