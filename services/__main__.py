"""`python -m services`: one frontend process."""

import gc
import logging
import os
import socket
import sys

import uvicorn

from kvmanager.client import on_stop, prepare, run_process, socket_endpoint
from kvmanager.errors import PagekeeperError
from kvmanager.settings import SettingError, load
from services.app import load_model, make_app
from services.config import FrontendConfig, read_keys, redis_url
from services.http_protocol import bounded_head
from services.streams.redis_journal import check_url

CONFIGURATION_ERROR = 2  # exit status: starting again cannot help
BACKLOG = 2048  # connections

log = logging.getLogger("pagekeeper.frontend")


def main() -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    config = load(FrontendConfig, "pagekeeper frontend", sys.argv[1:], os.environ)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    name = config.name or f"frontend-{socket.gethostname()[:32]}-{os.getpid()}"
    try:
        read_keys(config)
        if url := redis_url(config, os.environ):
            check_url(url)
        prepare(config.pool_directory)
        socket_endpoint(config.pool_directory, name)  # whether it is short enough
        model = load_model(config)
        listener = listen(config)
    except (PagekeeperError, SettingError, OSError, ValueError) as error:
        print(f"pagekeeper frontend: {error}", file=sys.stderr)
        return CONFIGURATION_ERROR
    status = 0
    server: uvicorn.Server

    def on_fatal(error: PagekeeperError) -> None:
        nonlocal status
        log.error("stopping: %s", error.message)
        status = CONFIGURATION_ERROR if error.code != "internal" else 1
        server.should_exit = True

    app = make_app(config, model, name, on_fatal)
    app.state.stopping = lambda: server.should_exit
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http=bounded_head(config.client_timeout_seconds),
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
        )
    )
    on_stop(lambda: setattr(server, "should_exit", True))  # until uvicorn's own, and again when it is done
    gc.collect()
    gc.freeze()  # what is here stays; looking through it again would hold up every stream
    with listener:
        log.info("%s serves %s on http://%s:%d", name, model.name, config.host, listener.getsockname()[1])
        try:
            server.run(sockets=[listener])
        except SystemExit:  # the application could not start; uvicorn has logged why
            return CONFIGURATION_ERROR
    return status


def listen(config: FrontendConfig) -> socket.socket:
    """The bound socket. Raises OSError that names the settings."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if config.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(
            f"cannot listen on --host={config.host!r}, --port={config.port}: {error.strerror or error}; "
            "choose others, or give --reuse-port to all frontends that share a port"
        ) from None
    return listener


if __name__ == "__main__":
    sys.exit(run_process(main))
