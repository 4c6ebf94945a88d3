"""`python -m gpu_runner`: one runner, until SIGTERM or SIGINT."""

import logging
import os
import sys

from gpu_runner.config import RunnerConfig
from gpu_runner.engine import Engine
from gpu_runner.server import Server
from kvmanager.client import ignore_stops, on_stop, run_process
from kvmanager.errors import PagekeeperError
from kvmanager.settings import load

log = logging.getLogger("gpu_runner")

CONFIGURATION_ERROR = 2  # exit status: starting again cannot help
TRANSIENT = ("manager_absent", "internal")  # codes of errors that starting again may mend


def load_engine(config: RunnerConfig) -> Engine:
    """Torch is imported here, with the number of threads set. Raises ValueError for what cannot be loaded."""
    if not config.model:
        raise ValueError("model='' is not allowed: give the path of a model with --model")
    if config.threads:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
            os.environ[name] = str(config.threads)
    from gpu_runner.torch_engine import TorchEngine

    return TorchEngine(config)


def serve(config: RunnerConfig, engine: Engine) -> None:
    """Until a signal comes. Raises PagekeeperError, whose text says why this runner cannot serve."""
    described = " ".join(f"{name}={value}" for name, value in engine.describe().items())
    log.info("loaded model=%s %s", config.model, described)
    server = Server(config, engine)
    on_stop(server.drain)
    server.run(at_end=ignore_stops)


def main() -> int:
    """Returns the exit status: 0 after a drain; else one line on stderr says why there is nothing to serve,
    and the status whether starting again may help (1) or not (2: the model, the pool or a setting cannot
    work).
    """
    config = load(RunnerConfig, "pagekeeper runner", sys.argv[1:], os.environ)
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s {config.full_name} %(message)s",
    )
    try:
        engine = load_engine(config)
    except ValueError as error:
        return _failed(error, CONFIGURATION_ERROR)
    try:
        serve(config, engine)
    except PagekeeperError as error:
        return _failed(error, 1 if error.code in TRANSIENT else CONFIGURATION_ERROR)
    return 0


def _failed(error: Exception, status: int) -> int:
    print(f"pagekeeper runner: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(run_process(main))
