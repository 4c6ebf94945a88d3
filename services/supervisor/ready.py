"""Is the service up: short, bounded looks at its HTTP side, and what to print once it is."""

import asyncio
import contextlib
import json
import shlex

LOOK_SECONDS = 2.0  # one look may take this long
MAX_ANSWER = 1 << 20  # bytes of an answer that are read


_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


def reachable(host: str) -> str:
    """An address of this machine at which a server listening on `host` is reached."""
    return _EVERY_ADDRESS.get(host, host)


def url_of(host: str, port: int) -> str:
    """The URL of a server on this machine that listens on `host`."""
    address = reachable(host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


async def fetch(host: str, port: int, path: str) -> tuple[int, bytes]:
    """GET `path`: status and body, or status 0 and the reason if no answer came within LOOK_SECONDS."""
    address = reachable(host)
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: {address}:{port}\r\n\r\n".encode())
                answer = await reader.read(MAX_ANSWER)
                while not reader.at_eof() and len(answer) < MAX_ANSWER:
                    answer += await reader.read(MAX_ANSWER)
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        return 0, (str(error) or "no answer").encode()
    head, _, body = answer.partition(b"\r\n\r\n")
    fields = head.split(maxsplit=2)
    return (int(fields[1]), body) if len(fields) > 1 and fields[1].isdigit() else (0, b"no HTTP answer")


def reason(body: bytes) -> str:
    """The message of an error answer, or nothing."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["error"]["message"])
    return ""


def curl_line(url: str, models: tuple[int, bytes]) -> str:
    """A command that streams a chat; `models` is the answer of `/v1/models` (401 where a key is wanted: then
    no model is named, as the server has one only).
    """
    status, body = models
    model, key = {}, ' -H "Authorization: Bearer $API_KEY"' if status == 401 else ""
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        model = {"model": json.loads(body)["data"][0]["id"]}
    message = [{"role": "user", "content": "Tell me a short story."}]
    data = json.dumps({**model, "messages": message, "stream": True}, ensure_ascii=False)
    headers = f"{key} -H 'Content-Type: application/json'"
    return f"curl -N {url}/v1/chat/completions{headers} -d {shlex.quote(data)}"
