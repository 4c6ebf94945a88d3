"""Every wait has a bound: calls that wait until something happens name a time, or are listed here with what
else ends them.
"""

import ast
from collections.abc import Iterator
from typing import Final

from tests.test_tidy import ROOT, SOURCES

WAITS: Final = {"join", "wait", "acquire", "result", "communicate", "get", "poll", "select"}
"""Methods that wait unless they are called with a time (`"".join` and `dict.get` have arguments, too)."""
RECEIVES: Final = {"recv", "recv_multipart", "recv_string"}
"""Methods of sockets that wait unless they are called with flags."""
READS: Final = {"open_connection", "read", "readline", "readexactly", "readuntil", "drain"}
"""Of asyncio's streams."""
RUNS: Final = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}
LOCKS: Final = {"fcntl.flock", "fcntl.lockf"}
HTTP: Final = {f"httpx.{name}" for name in ("Client", "AsyncClient", "get", "post", "stream", "request")}
BOUNDS: Final = {"asyncio.wait_for", "asyncio.timeout", "asyncio.timeout_at"}
"""What is awaited inside has a bound."""

ENDED_BY_OTHERS: Final = {
    "services/api/generation.py wait: await waiter": "a timer sets it",
    "services/api/sse.py _answer: await call.signal.wait()": "a disconnect, or a refusal",
    "services/kv/control.py _wait: await self._call.signal.wait()": "as above, for a prompt that is warmed",
    "services/streams/run.py _generate: await self._call.signal.wait()": "as above, or a stop",
    "services/streams/run.py stopped: await self._task": "a stop wakes it, and each write has a bound",
    "services/backend.py stop: await asyncio.gather(*self._tasks, return_exceptions=True)": "a cancellation",
    "services/backend.py _send_loop: await self._outbox_filled.wait()": "the loop of the process",
    "services/backend.py _token_loop: await self._tokens.recv_multipart()": "the loop of the process",
    "services/supervisor/processes.py _run_process: await process.wait()": "a child may live for ever",
    "services/supervisor/processes.py _pass_on: await stream.read(1 << 16)": "its end, and OUTPUT_WAIT",
    "services/kv/collect.py _done: task.result()": "it is done: this is called when it is",
    "kvmanager/tier/disk_tier.py _next: "
    "self._condition.wait_for(lambda: self._closing or self._promotions or self._demotions)": "a thread",
    "gpu_runner/model.py load_model: digest.result()": "reading the model's files",
}


def name(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def unbounded(call: ast.Call, awaited: bool) -> bool:
    """Whether this call waits for as long as it takes."""
    words = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    whole, method = name(call), getattr(call.func, "attr", "")
    if whole in RUNS | HTTP:
        return words.get("timeout", "None") == "None"
    if whole in LOCKS:
        return "LOCK_NB" not in ast.unparse(call) and "LOCK_UN" not in ast.unparse(call)
    if whole in BOUNDS | {"asyncio.wait"}:
        return "timeout" not in words and len(call.args) < (1 if "wait" not in whole else 2)
    if whole == "asyncio.gather":  # of calls: those are looked at themselves
        parts = [part.value for part in call.args if isinstance(part, ast.Starred)]
        return any(isinstance(part, ast.Name | ast.Attribute) for part in parts)
    if method == "wait_for":  # a condition's
        return len(call.args) < 2 and "timeout" not in words
    nothing = not (call.args or call.keywords)
    return (method in WAITS | RECEIVES and nothing) or (awaited and method in READS)


def waits(node: ast.AST, function: str = "", bounded: bool = False) -> Iterator[str]:
    """`function: expression` of each wait without a bound in the tree."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function, bounded = node.name, False
    awaited = node.value if isinstance(node, ast.Await) else node
    if isinstance(awaited, ast.Call):
        if not bounded and unbounded(awaited, awaited is not node):
            yield f"{function}: {ast.unparse(node)}"
        bounded |= name(awaited) in BOUNDS
    elif isinstance(node, ast.Await) and isinstance(awaited, ast.Name | ast.Attribute) and not bounded:
        yield f"{function}: {ast.unparse(node)}"
    if isinstance(node, ast.AsyncWith):
        bounded |= any(name(item.context_expr) in BOUNDS for item in node.items)
    for child in ast.iter_child_nodes(awaited):
        yield from waits(child, function, bounded)


def test_waits_are_seen() -> None:
    source = """
async def f(x, d):
    d.get("key"), ",".join(x), d.wait(1), x.recv(NOBLOCK), await x.wait(2.0)
    await asyncio.wait_for(x.wait(), 3)
    async with asyncio.timeout(3):
        await x.read(5)
    subprocess.run(x, timeout=3)
    await asyncio.gather(*(g(each) for each in x))
    x.wait()
    await x.wait()
    await x.read(5)
    await x.future
    await asyncio.gather(*x)
    await asyncio.wait(x)
    fcntl.flock(x, fcntl.LOCK_EX)
    subprocess.run(x)
    httpx.get(x, timeout=None)
    for thread in x:
        thread.join()
    x.recv()
    async with asyncio.timeout(3):
        def g():
            x.condition.wait_for(d)
"""
    found = list(waits(ast.parse(source)))
    assert found == [
        "f: x.wait()",
        "f: await x.wait()",
        "f: await x.read(5)",
        "f: await x.future",
        "f: await asyncio.gather(*x)",
        "f: await asyncio.wait(x)",
        "f: fcntl.flock(x, fcntl.LOCK_EX)",
        "f: subprocess.run(x)",
        "f: httpx.get(x, timeout=None)",
        "f: thread.join()",
        "f: x.recv()",
        "g: x.condition.wait_for(d)",
    ]


def test_every_wait_has_a_bound() -> None:
    found = {
        f"{path.relative_to(ROOT)} {wait}" for path in SOURCES for wait in waits(ast.parse(path.read_text()))
    }
    assert found == set(ENDED_BY_OTHERS)


def test_closed_sockets_do_not_keep_a_process_from_ending() -> None:
    """ZeroMQ's own default is to wait for ever for a peer that takes what was sent."""
    opened = [
        path for path in SOURCES if ".socket(zmq." in (text := path.read_text()) and "zmq.LINGER," not in text
    ]
    assert opened == []


def test_redis_answers_within_a_bound() -> None:
    opened = [
        path
        for path in SOURCES
        if ".from_url(" in (text := path.read_text()) and "socket_timeout=" not in text
    ]
    assert opened == []
