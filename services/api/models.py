"""GET /v1/models and /v1/models/{id}."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.api.openai_responses import ModelCard, ModelList
from services.context import Context


class ModelsRoute:
    """Both endpoints; the name may hold slashes."""

    def __init__(self, context: Context) -> None:
        self._model = context.model
        self._card = ModelCard(context.model.name, context.model.created, context.model.max_model_len)

    async def list(self, request: Request) -> Response:
        return Response(msgspec.json.encode(ModelList([self._card])), media_type="application/json")

    async def one(self, request: Request) -> Response:
        self._model.check_name(request.path_params["model"])
        return Response(msgspec.json.encode(self._card), media_type="application/json")
