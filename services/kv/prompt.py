"""The text that a question or command about the cache is about, tokenised as the completion routes do it."""

from services.api.chat import render_prompt
from services.api.completions import encode_text
from services.api.openai_types import TokenizeRequest
from services.api.validation import MAX_SALT_CHARS, token_ids
from services.context import ServedModel
from services.errors import invalid
from services.kv.types import PromptRequest


def check_prompt(body: PromptRequest, *, needed: bool = True) -> None:
    """What can be said without the model; `needed`: a text must be there. Raises ApiError 400."""
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_SALT_CHARS:
        message = f"`cache_salt` has {len(body.cache_salt)} characters; want 1 to {MAX_SALT_CHARS}"
        raise invalid("cache_salt", message)
    given = (body.prompt is not None) + (body.messages is not None)
    if given == 2 or (needed and not given):
        raise invalid("prompt", "give either `prompt` or `messages`")


async def prompt_tokens(model: ServedModel, body: PromptRequest) -> tuple[int, ...]:
    """As the completion routes make them. Raises ApiError 400 or 404."""
    model.check_name(body.model)
    field = "prompt"
    if isinstance(body.prompt, str):
        tokens = tuple(await encode_text(model, body.prompt, body.add_special_tokens is not False))
    elif body.prompt is not None:
        tokens = token_ids("prompt", body.prompt, model.tokenizer.vocab_size)
    else:
        field, chat = "messages", TokenizeRequest(messages=body.messages)
        chat.add_special_tokens = body.add_special_tokens
        chat.add_generation_prompt = body.add_generation_prompt
        chat.continue_final_message = body.continue_final_message
        chat.chat_template_kwargs = body.chat_template_kwargs
        tokens = tuple(await render_prompt(model, chat))
    if not 1 <= len(tokens) <= model.max_model_len:
        message = f"`{field}` has {len(tokens)} tokens; want 1 to {model.max_model_len}"
        raise invalid(field, message, "context_length_exceeded" if tokens else "invalid_value")
    return tokens
