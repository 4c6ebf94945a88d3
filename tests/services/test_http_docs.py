"""docs/http.md names every field and error code, so that the page cannot fall behind."""

import re
from pathlib import Path

import msgspec
import pytest

from kvmanager.errors import HTTP_STATUS
from services.api.openai_types import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    TokenizeRequest,
)
from services.config import FrontendConfig
from services.kv.types import (
    ClearRequest,
    EvictRequest,
    PinRequest,
    PlanRequest,
    PromptRequest,
    WarmRequest,
)

PAGE = re.sub(r"```.*?```", "", (Path(__file__).parents[2] / "docs" / "http.md").read_text(), flags=re.DOTALL)
NAMED = set(re.findall(r"`([^`]+)`", PAGE))
WORDS = {word for name in NAMED for word in re.findall(r"[\w:/{}]+", name)}


@pytest.mark.parametrize(
    "struct", [ChatRequest, CompletionRequest, TokenizeRequest, PinRequest, ChatMessage, StreamOptions]
)
def test_fields(struct: type[msgspec.Struct]) -> None:
    implied = {"role", "content", "name", "return_token_strs"}
    assert set(struct.__struct_fields__) - implied <= WORDS | set(re.findall(r"\w+", PAGE))


@pytest.mark.parametrize("struct", [PromptRequest, PlanRequest, WarmRequest, EvictRequest, ClearRequest])
def test_fields_of_questions_and_commands(struct: type[msgspec.Struct]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "introspection.md").read_text()
    assert set(struct.__struct_fields__) <= WORDS | set(re.findall(r"\w+", page))


def test_error_codes_and_settings() -> None:
    ours = {"can_never_fit", "invalid_request"}  # become context_length_exceeded, and a message of its own
    assert set(HTTP_STATUS) - ours <= WORDS
    for name in (
        "keep_alive_seconds",
        "client_timeout_seconds",
        "max_body_bytes",
        "api_keys",
        "cors_origins",
    ):
        assert name in FrontendConfig.__dataclass_fields__
        assert name in WORDS
