"""GET /openapi.json: OpenAPI 3.1 of every route, made of the types that decode bodies and encode answers."""

import functools
from importlib import metadata
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.api.openai_types import REFUSED, REFUSED_IN_MESSAGE, REFUSED_IN_PART
from services.api.validation import MAX_SALT_CHARS, RANGES
from services.auth import is_open
from services.openapi_operations import ERROR, OPERATIONS, Operation, Parameter, Schema

PATH: Final = "/openapi.json"
JSON: Final = "application/json"
_REFS: Final = "#/components/schemas/{name}"
_REFUSED: Final = {
    "CompletionRequest": REFUSED,
    "ChatRequest": REFUSED,
    "ChatMessage": REFUSED_IN_MESSAGE,
    "ContentPart": REFUSED_IN_PART,
}
"""Fields that are known only to be refused by name."""


def openapi_route() -> Route:
    return Route(PATH, answer)


async def answer(request: Request) -> Response:
    return Response(document(), media_type=JSON)


@functools.cache
def document() -> bytes:
    """As JSON; the same for as long as the process lives."""
    return msgspec.json.encode(describe())


def describe() -> Schema:
    """The whole document."""
    types = [t for o in OPERATIONS for t in (o.body, o.answer, *(t for _, t, _ in o.others)) if t is not None]
    unique = list(dict.fromkeys([*types, ERROR]))
    _, components = msgspec.json.schema_components(unique, ref_template=_REFS)
    for name, schema in components.items():
        narrow(name, schema)
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = describe_operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pagekeeper",
            "version": metadata.version("pagekeeper"),
            "description": "OpenAI's API, and questions and commands about the KV cache behind it.",
        },
        "security": [{}, {"key": []}],
        "tags": [
            {"name": "api", "description": "As OpenAI's."},
            {"name": "cache", "description": "What the KV cache holds, and commands on it."},
            {"name": "server", "description": "For balancers and scrapers."},
        ],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def narrow(name: str, schema: Schema) -> None:
    """What the types do not say: ranges; and no field that is only there to be refused."""
    properties = schema.get("properties", {})
    for refused in _REFUSED.get(name, ()):
        properties.pop(refused, None)
    if not name.endswith("Request"):
        return
    for field, low, high in RANGES:
        for number in _numbers(properties.get(field, {})):
            number |= {"minimum": low, "maximum": high}
    for text in properties.get("cache_salt", {}).get("anyOf", ()):
        if text["type"] == "string":
            text |= {"minLength": 1, "maxLength": MAX_SALT_CHARS}


def _numbers(schema: Schema) -> list[Schema]:
    options = schema.get("anyOf", [schema])
    return [option for option in options if option.get("type") in ("integer", "number")]


def describe_operation(operation: Operation) -> Schema:
    content = {media: {"schema": {"type": "string"}} for media in operation.media if media != JSON}
    if operation.answer is not None:
        content = {JSON: {"schema": _ref(operation.answer)}, **content}
    elif JSON in operation.media:
        content[JSON] = {"schema": {"type": "object"}}
    responses: dict[str, Schema] = {"200": {"description": "As asked.", "content": content}}
    for status, body, what in operation.others:
        responses[status] = {"description": what}
        if body is not None:
            responses[status]["content"] = {JSON: {"schema": _ref(body)}}
    for status, what in (("4XX", "What was wrong with the request."), ("5XX", "What is wrong here.")):
        responses[status] = {"description": what, "content": {JSON: {"schema": _ref(ERROR)}}}
    found: Schema = {
        "operationId": operation_id(operation),
        "tags": [operation.tag],
        "summary": operation.what,
        "responses": responses,
    }
    if operation.parameters:
        found["parameters"] = [describe_parameter(parameter) for parameter in operation.parameters]
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": _ref(operation.body)}}}
    if is_open(operation.path):
        found["security"] = []
    return found


def operation_id(operation: Operation) -> str:
    words = operation.path.replace("{", "").replace("}", "").replace(".", "/").strip("/").split("/")
    return "_".join([operation.method.lower(), *words])


def describe_parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.required,
        "description": parameter.what,
        "schema": parameter.schema,
    }


def _ref(body: type[msgspec.Struct]) -> Schema:
    return {"$ref": _REFS.format(name=body.__name__)}
