"""A real Redis for tests, from Debian's package, on a socket file of its own."""

import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.services.fake_stack import wait_until


class RedisServer:
    """`redis-server` without persistence; a context manager. It can be killed, and started again, empty."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pk-redis-", dir="/dev/shm")
        self._socket = Path(self._folder.name) / "redis.sock"
        self.url = f"unix://{self._socket}"

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self) -> None:
        program = shutil.which("redis-server")
        assert program is not None, (
            "redis-server is missing; on Debian and Ubuntu: apt-get install redis-server"
        )
        flags = {"port": "0", "save": "", "appendonly": "no", "dir": self._folder.name, "loglevel": "warning"}
        argv = [word for name, value in flags.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen(
            [program, "--unixsocket", str(self._socket), *argv], stdout=subprocess.DEVNULL
        )
        wait_until(self._accepts, "Redis to accept connections")  # its socket is there a moment before

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self._socket)) == 0

    def freeze(self) -> None:
        """It accepts connections, and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.unlink(missing_ok=True)
