"""/openapi.json names every route, and is true: random requests by its word get answers by its word."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from kvmanager.protocol import Pinned, PinsAnswer
from services.app import make_routes
from services.openapi import describe, operation_id
from services.openapi_operations import OPERATIONS, Operation
from tests.services.fake_stack import Stack, says

ROOT = Path(__file__).parents[2]
EXAMPLES = 6  # of each operation
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


def app_operations() -> set[tuple[str, str]]:
    """Starlette's own paths, with `{model:path}` as `{model}`; HEAD goes with GET."""
    routes = [route for route in make_routes(MagicMock(), MagicMock()) if isinstance(route, Route)]
    return {
        (re.sub(r":\w+}", "}", route.path), method)
        for route in routes
        for method in (route.methods or ())
        if method != "HEAD"
    }


def test_every_route_is_described_and_every_description_has_a_route() -> None:
    described = {(path, method.upper()) for path, item in describe()["paths"].items() for method in item}
    assert described == app_operations()


def test_every_question_and_command_has_its_place_in_the_docs() -> None:
    """With a request as one would type it, but for streams of bytes and the page."""
    page = (ROOT / "docs" / "introspection.md").read_text()
    headings = " ".join(re.findall(r"^### (.*)$", page, re.MULTILINE))
    commands = "\n".join(re.findall(r"^\$ curl .*$", page, re.MULTILINE))
    for operation in OPERATIONS:
        if operation.tag == "cache" and not operation.path.startswith("/kv/ui"):
            assert operation.path in headings, operation.path
            assert operation.path.split("{")[0] in commands, operation.path


def test_every_reference_leads_somewhere_and_refused_fields_are_not_offered() -> None:
    document = describe()
    schemas = document["components"]["schemas"]
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references <= set(schemas)
    chat = schemas["ChatRequest"]["properties"]
    assert "tools" not in chat
    assert chat["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    assert schemas["ChatRequest"]["additionalProperties"] is False
    ids = [op["operationId"] for item in document["paths"].values() for op in item.values()]
    assert len(ids) == len({*ids})


def test_it_is_served_without_a_key() -> None:
    with Stack(api_keys="secret", host="0.0.0.0") as stack:
        answer = httpx.get(f"{stack.url}/openapi.json", timeout=20)
        assert answer.json()["openapi"] == "3.1.0"
        assert answer.headers["content-type"] == "application/json"


# --- random requests ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    """The description as a client has it, with a manager behind it whose cache holds something."""
    with Stack() as stack:
        stack.manager.script = says(" a b")
        stack.manager.pins = lambda message: PinsAnswer(
            message.query_id, (Pinned(getattr(message, "name", "p"), 2, 32, 60.0),), 2, 25
        )
        for number in range(4):
            stack.manager.cache.store([number] * 40)
        yield schemathesis.openapi.from_url(f"{stack.url}/openapi.json")


@pytest.mark.parametrize("operation", OPERATIONS, ids=operation_id)
def test_random_requests_get_answers_by_the_description(api: Any, operation: Operation) -> None:
    """Of what is described, and of what is not, where a body or a parameter can be wrong."""
    described = api[operation.path][operation.method]
    ask(operation, described.as_strategy())
    if operation.body is not None or any(p.schema != {"type": "string"} for p in operation.parameters):
        ask(operation, described.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))


def ask(operation: Operation, cases: Any) -> None:
    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases)
    def one(case: schemathesis.Case) -> None:
        if operation.media == ("text/event-stream",):
            check_stream(case)
        else:
            case.validate_response(case.call(timeout=20), checks=CHECKS)

    one()


def check_stream(case: schemathesis.Case) -> None:
    """It begins; nobody waits for its end."""
    given = case.as_transport_kwargs(headers={})
    with httpx.stream(
        "GET", given["url"], params=given["params"], headers=given["headers"], timeout=20
    ) as answer:
        if answer.status_code == 200:
            assert answer.headers["content-type"].startswith("text/event-stream")
        else:
            assert answer.status_code < 500
            assert json.loads(answer.read())["error"]["message"]
