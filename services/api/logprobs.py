"""Log-probabilities in OpenAI's two forms, and vLLM's `prompt_logprobs`."""

from collections.abc import Sequence
from typing import Final

from kvmanager.protocol import TokenLogprobs
from services.api.generation import ChoiceStream
from services.api.openai_responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from services.text.tokenizer import Tokenizer

LOWEST: Final = -9999.0  # JSON has no -inf


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or `bytes:\\x..` where it is only a part of a character."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def chat_logprobs(tokenizer: Tokenizer, choice: ChoiceStream, start: int, end: int, top: int) -> ChatLogprobs:
    """Of the output tokens [start, end), with `top` alternatives each."""
    ids, entries = choice.output.token_ids[start:end], choice.output.logprobs[start:end]
    return ChatLogprobs(
        [_chat_entry(tokenizer, token, entry, top) for token, entry in zip(ids, entries, strict=False)]
    )


def _chat_entry(tokenizer: Tokenizer, token: int, entry: TokenLogprobs, top: int) -> TokenLogprob:
    alternatives = [
        TopLogprob(token_text(tokenizer, other), finite(logprob), list(tokenizer.token_bytes(other)))
        for other, logprob in entry.top[:top]
    ]
    data = list(tokenizer.token_bytes(token))
    return TokenLogprob(token_text(tokenizer, token), finite(entry.logprob), data, alternatives)


def legacy_entries(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    top: int,
) -> CompletionLogprobs:
    """Parallel lists; a token without an entry (the first of a prompt) has null."""
    logprobs = CompletionLogprobs([], [], [], list(offsets))
    for token, entry in zip(ids, entries, strict=False):
        text = token_text(tokenizer, token)
        logprobs.tokens.append(text)
        if entry is None:
            logprobs.token_logprobs.append(None)
            logprobs.top_logprobs.append(None)
            continue
        alternatives = {token_text(tokenizer, other): finite(logprob) for other, logprob in entry.top[:top]}
        alternatives.setdefault(text, finite(entry.logprob))
        logprobs.token_logprobs.append(finite(entry.logprob))
        logprobs.top_logprobs.append(alternatives)
    del logprobs.text_offset[len(logprobs.tokens) :]
    return logprobs


def prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
) -> PromptLogprobs:
    """vLLM's form: per prompt token null, or token id → entry for the likeliest ones and the token itself."""
    result: PromptLogprobs = []
    for token, entry in zip(ids, entries, strict=False):
        if entry is None:
            result.append(None)
            continue
        found = {
            str(other): PromptLogprob(finite(logprob), rank, token_text(tokenizer, other))
            for rank, (other, logprob) in enumerate(entry.top, 1)
        }
        found[str(token)] = PromptLogprob(finite(entry.logprob), entry.rank, token_text(tokenizer, token))
        result.append(found)
    return result
