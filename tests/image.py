"""Reads the Dockerfile and compose.yaml, and carries their steps out without Docker, in a folder of its own.

`python -m tests.image FOLDER` runs the image's build steps there: what needs another root file system or
another user (FROM, USER, useradd) is said and left out; `/opt/venv` and `/src` become folders of FOLDER.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
OURS = ("kvmanager", "runner", "frontend")


@dataclass(frozen=True)
class Image:
    """The last stage's settings, and all steps as (instruction, text)."""

    steps: tuple[tuple[str, str], ...]
    environ: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    user: str = ""


def read_dockerfile() -> Image:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    steps = tuple((word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines))
    last = steps[max(index for index, (word, _) in enumerate(steps) if word == "FROM") :]
    environ = dict(pair.split("=", 1) for word, rest in last if word == "ENV" for pair in shlex.split(rest))
    (entrypoint,) = (yaml.safe_load(rest) for word, rest in last if word == "ENTRYPOINT")
    (user,) = (rest for word, rest in last if word == "USER")
    return Image(steps, environ, tuple(entrypoint), user)


def interpolated(value: Any, variables: dict[str, str]) -> Any:
    """`${NAME:-default}` as compose fills it in."""
    if isinstance(value, dict):
        return {key: interpolated(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, variables) for item in value]
    if isinstance(value, str):
        return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1]) or found[2], value)
    return value


def read_compose(**variables: str) -> dict[str, Any]:
    """compose.yaml with its anchors merged and its variables filled in."""
    whole: dict[str, Any] = interpolated(yaml.safe_load((ROOT / "compose.yaml").read_text()), variables)
    return whole


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps `path` (of the top folder) out of the image."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    return f"!{path}" not in rules


def build(folder: Path) -> None:
    """Carry the build steps out in `folder`. Raises CalledProcessError for a step that fails."""
    source = folder / "src"
    source.mkdir(parents=True)
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith(("VIRTUAL_ENV", "PYTHON"))
    }
    for word, rest in read_dockerfile().steps:
        print(f"== {word} {rest}", flush=True)
        if word == "COPY" and not rest.startswith("--from"):
            *names, target = rest.split()
            for name in names:
                assert not ignored(name), f"{name} is copied, but .dockerignore leaves it out"
                copy(ROOT / name, source / target)
        elif word == "RUN" and "useradd" not in rest:
            command = rest.replace("/opt/venv", str(folder / "opt/venv"))
            subprocess.run(command, shell=True, check=True, cwd=source, env=environ)
        elif word != "ENV":
            print("   (left out here)", flush=True)


def copy(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.mkdir(exist_ok=True)
        shutil.copy(path, target)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
