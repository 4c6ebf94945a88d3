"""The command `pagekeeper`: the supervisor, each process alone, and a small terminal chat."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from kvmanager.settings import load
from services.supervisor.serve import serve
from services.supervisor.serve_config import ServeConfig
from services.text import model_source
from services.text.model_files import ModelError

USAGE = """usage: pagekeeper COMMAND [OPTION ...]

commands:
  serve      start a KV manager, runners and frontends on this machine, and keep them running
  kvmanager  one KV manager: the block pool, the prefix index, the queue
  runner     one runner: the model
  frontend   one frontend: the HTTP API
  chat       talk with a running server in the terminal
  kv         ask a running server about its cache
  pool       status, check or remove: what lies in a pool directory, without a server

Each has --help. An option may also be given in the environment: --pool-bytes is PAGEKEEPER_POOL_BYTES.
"""

MODULES = {"kvmanager": "kvmanager", "runner": "gpu_runner", "frontend": "services"}
"""Command → the module that is the process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status, 2 for wrong usage or settings."""
    name, *rest = (list(argv) if argv is not None else sys.argv[1:]) or [""]
    if name in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if name not in COMMANDS:
        wrong = f"unknown command {name!r}" if name else "a command is wanted"
        print(f"pagekeeper: {wrong}; one of {', '.join(COMMANDS)}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name](rest)
    except ModelError as error:
        print(f"pagekeeper {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def serve_command(argv: Sequence[str]) -> int:
    return serve(load(ServeConfig, "pagekeeper serve", argv, os.environ))


def chat_command(argv: Sequence[str]) -> int:
    from services.terminal.chat_client import main as chat

    return chat(argv)


def kv_command(argv: Sequence[str]) -> int:
    from services.terminal.kv import main as kv

    return kv(argv)


def process_argv(name: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command line of the process `name`, in which MODEL has become a path. Raises ModelError."""
    command = [sys.executable, "-m", MODULES[name]]
    if name == "kvmanager" or {"-h", "--help"} & set(argv):
        return [*command, *argv]
    parser = argparse.ArgumentParser(prog=f"pagekeeper {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default=environ.get("PAGEKEEPER_MODEL", ""))
    known, others = parser.parse_known_args(argv)
    return [*command, *others, f"--model={model_source.resolve(known.model)}"]


def pool_command(argv: Sequence[str]) -> int:
    """It reads the manager's files, so it is a program of the manager's."""
    os.execv(sys.executable, [sys.executable, "-m", "kvmanager.pool_tool", *argv])


def _become(name: str) -> Callable[[Sequence[str]], int]:
    """A command that turns this process into the one named: signals and process id stay the same."""

    def command(argv: Sequence[str]) -> int:
        replacement = process_argv(name, argv, os.environ)
        os.execv(replacement[0], replacement)

    return command


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": serve_command,
    **{name: _become(name) for name in MODULES},
    "chat": chat_command,
    "kv": kv_command,
    "pool": pool_command,
}

if __name__ == "__main__":
    sys.exit(main())
