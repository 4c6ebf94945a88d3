"""SIGTERM and SIGINT in a process's life: at first they end it at once, then in good order, and at last they
change nothing any more.

The interpreter gives every handler back to the kernel's default before it ends, but leaves ignored signals
ignored: so a signal that comes late does not make an end in good order look like a violent one.
"""

import os
import signal
from collections.abc import Callable
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def on_stop(handler: Callable[[], object]) -> None:
    """From now on a stop calls `handler`, each time."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: handler())


def ignore_stops() -> None:
    """From now on a stop changes nothing: the end has begun, and its exit status is known."""
    for number in (*STOP_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def run_process(main: Callable[[], int]) -> int:
    """The exit status of `main`, which calls `on_stop` when it has something that others would miss. Until
    then a stop ends the process at once, with status 0; afterwards it is ignored.
    """
    on_stop(lambda: os._exit(0))
    try:
        return main()
    finally:
        ignore_stops()
