"""POST /tokenize and /detokenize, in vLLM's shapes."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.api.chat import render_prompt
from services.api.completions import encode_text
from services.api.logprobs import token_text
from services.api.openai_responses import Text, Tokens
from services.api.openai_types import DetokenizeRequest, TokenizeRequest
from services.api.validation import decode_request, token_ids
from services.context import Context
from services.errors import ApiError

_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


class TokensRoute:
    """Both endpoints."""

    def __init__(self, context: Context) -> None:
        self._model = context.model
        self._config = context.config

    async def tokenize(self, request: Request) -> Response:
        body = await decode_request(request, _tokenize, self._config)
        self._model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either `prompt` or `messages`", param="prompt", code="invalid_value")
        if body.prompt is not None:
            ids = await encode_text(self._model, body.prompt, body.add_special_tokens is not False)
        else:
            ids = await render_prompt(self._model, body)
        texts = (
            [token_text(self._model.tokenizer, token) for token in ids] if body.return_token_strs else None
        )
        answer = Tokens(len(ids), self._model.max_model_len, ids, texts)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        body = await decode_request(request, _detokenize, self._config)
        self._model.check_name(body.model)
        ids = token_ids("tokens", body.tokens, self._model.tokenizer.vocab_size)
        text = self._model.tokenizer.decode(ids, skip_special_tokens=False)
        return Response(msgspec.json.encode(Text(text)), media_type="application/json")
