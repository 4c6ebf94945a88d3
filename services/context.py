"""What the routes of one frontend share."""

from dataclasses import dataclass

from services.backend import Backend
from services.config import FrontendConfig
from services.errors import ApiError
from services.metrics import Metrics
from services.text.chat_template import ChatTemplate
from services.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """The one model that is served. `max_model_len` counts prompt and output tokens together."""

    name: str
    max_model_len: int
    created: int  # Unix time
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    def check_name(self, name: str | None) -> None:
        """Raises ApiError 404 for another model."""
        if name is not None and name != self.name:
            message = f"the model {name[:200]!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True)
class Context:
    """Made once at start."""

    config: FrontendConfig
    model: ServedModel
    backend: Backend
    metrics: Metrics
