"""The text of docs/introspection.md, and the requests that it shows."""

from contextlib import AbstractContextManager
from typing import Any, Final

SYSTEM: Final = (
    "You are the night porter of the hotel Seaview. You are polite and brief. Breakfast is from seven to "
    "ten, the sauna is closed on Mondays, dogs are welcome, and the last ferry to the island leaves at half "
    "past nine. Never give away which guest has which room. If somebody is ill, call the doctor whose number "
    "hangs at the desk."
)


class Page:
    """Markdown in parts; what is asked is asked by a subclass."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.model = ""

    def say(self, text: str) -> None:
        self.parts.append(text.strip("\n"))

    def ask(self, method: str, path: str, body: Any = None, *, quiet: bool = False, lines: int = 0) -> Any:
        raise NotImplementedError

    def running(self, body: Any) -> AbstractContextManager[None]:
        """A chat completion that has begun, and goes on meanwhile."""
        raise NotImplementedError

    def chat(self, system: str, user: str, **fields: Any) -> Any:
        """A chat completion that is not shown."""
        body = {
            "model": self.model,
            "messages": messages(system, user),
            "max_tokens": 1,
            "temperature": 0,
            **fields,
        }
        return self.ask("POST", "/v1/chat/completions", body, quiet=True)


def messages(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def introduction(page: Page) -> None:
    page.say("""
# Ask the cache

What the KV cache holds, who holds it, why a prompt missed, and commands on all that. Every route of this
page is described in `/openapi.json` as well, with all fields. There is a page for browsers at `/kv/ui`, and
`pagekeeper kv` for the terminal ([kv_commands.md](kv_commands.md)).

Who may ask what is in [http.md](http.md), under Keys: an admin sees everything, a tenant its own and nothing
of others. While there is room for all, its answers are the same to the last byte whatever others do: its
`sequence` and events are numbered by its own, from its first question on; its blocks have numbers made of
their content (`block`, with `generation` 0; -1 while they are being written); where it runs is not said. What
it can notice is that the machine is shared: how long it waits, what of its own was evicted, preempted or
copied to disk, that the log no longer reaches back to an eviction, and that `pin_budget` is used up, which a
small `tenant_pin_budget` prevents.

The answers below are a real server's, with the packaged model and `pool_bytes=120M`, in this order; long
lists are cut.

**Which moment an answer is about.** Whatever becomes findable in the cache or no longer is, is an event
with a number. Each answer has `boot_id`, the start of the KV manager, and `sequence`, the number of the
last event that it knows of. Large answers are put together from pages, so that no question holds up the
manager; the events since the first page bring `/kv/prefixes` and the snapshot of `/kv/events` to exactly
one moment. `/kv/map` has the number of its first page. `/kv/audit` is right page by page.

Errors are as everywhere, and name the parameter or field that is wrong.

## Three stories

### Why is my hit rate zero?

An application sends a long system prompt with every question, and yet nothing is ever reused:
""")
    for minute, question in enumerate(("Is there tea?", "Where is the sauna?", "May my dog stay?"), 41):
        page.chat(f"It is 23:{minute}. {SYSTEM}", question)
    page.ask("GET", "/kv/stats")
    page.say("""
`cache` says it: hundreds of tokens looked up, hardly any found. What would the next question find?
""")
    page.ask("POST", "/kv/explain", {"messages": messages(f"It is 23:44. {SYSTEM}", "Is there tea?")})
    page.say("""
The time stands at the beginning, and a block is found only if everything before it is the same too. So the
time goes to the end, into the user's message, and the second question finds the whole system prompt:
""")
    page.chat(SYSTEM, "Is there tea? (It is 23:45.)")
    answer = page.ask(
        "POST", "/kv/explain", {"messages": messages(SYSTEM, "Where is the sauna? (It is 23:46.)")}
    )
    page.say(f"""
{answer["cached_tokens"]} of {answer["num_tokens"]} tokens; the rest is the question, which is new.

### Who is eating my pool?

The roots of the prefix tree, the largest first. `subtree` is what a node and all that follows on it take:
""")


def pool(page: Page) -> None:
    page.chat(SYSTEM, "Tell me a story.", max_tokens=60, ignore_eos=True)
    page.ask("GET", "/kv/prefixes?depth=1&limit=2")
    page.say("""
The text shows whose it is. Its branches are below it (`parent`), and `sort` takes `tokens`, `hits`, `age`,
`references` and `recent` as well: what is large and was never hit is what to look at.
""")
    nodes = page.ask("GET", "/kv/prefixes?depth=1", quiet=True)["nodes"]
    branching = next(node for node in nodes if node["children"])
    page.ask("GET", f"/kv/prefixes?parent={branching['hash']}&sort=hits&order=asc&limit=1")
    page.say("""
Cached blocks (`C` in `/kv/map`) are only there until somebody needs the room. What cannot be evicted is in
use; `/kv/holders` lists by whom, those with the most blocks first:
""")
    page.ask(
        "POST", "/kv/pins", {"name": "left over", "messages": messages(SYSTEM, "x"), "ttl": 86400}, quiet=True
    )
    page.ask("GET", "/kv/holders")
    page.say("""
A pin that somebody made for a day, and forgot. Any of its blocks tells the same:
""")
    blocks = page.ask("POST", "/kv/explain", {"messages": messages(SYSTEM, "x")}, quiet=True)["blocks"]
    page.ask("GET", f"/kv/blocks/{blocks[1]['block']}")
    page.ask("DELETE", "/kv/pins?name=left%20over")
    page.say("""
### Keep this system prompt warm

After a deployment, before the first user comes: compute it, and keep it.
""")


def warm(page: Page) -> None:
    page.ask("POST", "/kv/evict", {"all": True}, quiet=True)
    prompt = {"messages": messages(SYSTEM, "")[:1], "add_generation_prompt": False}
    page.ask("POST", "/kv/warm", prompt)
    page.ask("POST", "/kv/pins", {"name": "porter", **prompt, "ttl": 3600})
    other = {"prompt": "What the guests of room seven like: coffee without sugar, and to be left alone."}
    page.ask("POST", "/kv/warm", other, quiet=True)
    page.say("""
Without `add_generation_prompt` the text ends where the system prompt does, so that any question goes on
from there. Now let there be pressure, more text than the pool holds:
""")
    for number in range(4):
        page.ask("POST", "/kv/warm", {"prompt": [1000 + number] * 700}, quiet=True)
    page.ask("POST", "/kv/explain", {"messages": messages(SYSTEM, "Is there tea?")})
    page.say("""
The system prompt is there. Another text that had been cached before, and was not pinned, had to go:
""")
    page.ask("POST", "/kv/explain", other)
    page.say("""
The pin ends after its `ttl`; say it again now and then, or end it:
""")
    page.ask("GET", "/kv/pins")
    page.say("""
A pin keeps what is cached, and computes nothing; so warm first. The fields of `/kv/pins` are in
[http.md](http.md).

## The routes

### GET /kv/stats

Figures since the manager's start. `waste` is the share of the slots in used blocks that holds no token. A
tenant gets its own `sealed` and `cached` blocks, `requests`, and `pins`. An answer is above.

### GET /kv/map

A letter per block: free, reserved (being written), sealed (in use), cached (evictable), quarantined, `X`
another tenant's. `first` and `limit` (2048; at most 8192) choose the part; `next` is where to go on. `ages`
count from the block's sealing, in seconds. `flags` are or-ed: 1 pinned, 2 in the disk tier as well, 4
partial, 8 another tenant's. A tenant's map is of what is cached of its own (at most 2 s old), a cell per
block, ordered by number (`blocks`).
""")


def questions(page: Page) -> None:
    page.ask("GET", "/kv/map?limit=24")
    page.say("""
### GET /kv/blocks/{id}

One block: its text, its place in the tree, who holds it (`holders`, `pins`), how often it was reused
(`hits`), and how many would be evicted before it (`eviction_rank`; null if it is in use, or further away
than is counted). 404 if it is another tenant's.

### GET /kv/prefixes

The tree of all texts in the pool, as a list: a node, then all that follow on it. A node is a run of blocks
without a branch.

| parameter | default | |
|---|---|---|
| `parent` | none | only what is below the node that has this block's hash |
| `depth` | all | how many levels |
| `sort`, `order` | `bytes`, `desc` | siblings by what they have below, themselves included |
| `q` | none | only nodes whose text contains this, in any case (`match`), and those above them |
| `limit`, `cursor` | 100 | at most 1000; `next_cursor` of the page before |

`sort` is `bytes`, `tokens`, `hits` (times that one of the blocks was reused), `age` (of the oldest block),
`references` (of the most held one) or `recent` (the youngest).

### GET /kv/requests and /kv/requests/{id}

Live requests, and those that ended lately; `state` (one that an answer has, or `live`: all that have not
ended), `limit` and `cursor` choose; a page may be shorter than its limit, and the end is where `next_cursor`
is null. With its id (an answer's `id`; for further prompts of one call with `-1`, `-2` behind it) one request
comes with its block tables; of one that was submitted again as its runner died, the last `attempt`. `lookup`
is what its last lookup found.
""")
    body = {"messages": messages(SYSTEM, "Tell me a long story."), "max_tokens": 400, "ignore_eos": True}
    with page.running({"model": page.model, **body}):
        requests = page.ask("GET", "/kv/requests?state=running&limit=5")
        page.ask("GET", f"/kv/requests/{requests['requests'][0]['request_id']}")
    page.say("""
### GET /kv/holders

Who keeps blocks in use: sequences, runners' credits, pins, quarantines, copies; and the processes behind
them.

### GET /kv/audit

Checks every invariant of the manager's accounts; for admins.
""")
    page.ask("GET", "/kv/audit")


def events(page: Page) -> None:
    page.say("""
### GET /kv/events

Server-sent events: first `snapshot`, in parts of which only the `last` one has an id; then `stored`,
`removed` (with `cause`: `capacity`, `evict`, `clear`, `damaged`, `other_layout`, and for whose request) and
`cleared` as they happen. Who applies them has what the manager has. `stored` may name content that is there
already: another copy of it took its place. A client that comes back with `Last-Event-ID` goes on from
there. If the manager no longer has what follows, or is another, `gap` says so, and a new snapshot follows.
`snapshot=0` leaves the first one out. After `keep_alive_seconds` of silence a comment is sent. A client
that does not read is dropped; `error` is the last event of a stream that cannot go on. Routers made for
vLLM follow a ZeroMQ socket instead: see [kv_events.md](kv_events.md).
""")
    page.ask("GET", "/kv/events", lines=3)


def commands(page: Page) -> None:
    page.say("""
### POST /kv/explain

What a request with this text would find now: `prompt` (text or token ids) or `messages`, tokenised as the
completion routes do it, and `cache_salt`. `cached_tokens` is what such a request then reports, if nothing
changes before. `reason` is why it is not more (`blocks` names 2048 at most):

| `reason` | |
|---|---|
| `hit` | it is all but the last token, which is always computed |
| `never_seen` | nothing that is cached goes on as this text does |
| `partial` | a cached block begins as the text goes on; `difference` says where they part |
| `evicted` | it was there: `eviction` says when, why, for whom; known of full blocks and whole tails |
| `being_computed` | `computed_by` computes the next block now; a request waits for it, and reports more |
| `other_layout` | it was there, for another model, dtype or block size |

`difference` has what follows on either side, to the end of the block, and the text `before` it. `advice`
says it in words: which token differs, what it probably is, how much is computed for it, and what helps.

### POST /kv/plan

What admission would do with such a request now, by the very code that does it: which blocks it would reuse,
copy and allocate, which ones it would evict and whom preempt for them, or what it would wait for. Also
takes `max_tokens`, `n` and `priority`. Nothing changes.
""")
    page.ask("POST", "/kv/plan", {"messages": messages(SYSTEM, "Is there tea?"), "max_tokens": 50, "n": 2})
    page.say("""
### POST /kv/warm

Computes a prompt as a request would, and answers when it is cached (`priority` as there). With `"stream":
true` come `progress` events, then `done`. Who goes away ends it; what was computed stays.

### POST /kv/evict

Drops a prefix with all that follows on it (`prompt` or `messages`; what shares only its beginning stays),
or all of one `cache_salt`, or with `"all": true` everything. Blocks in use stay (`in_use`).
""")
    page.ask("POST", "/kv/evict", {"prompt": [1003] * 16})


def clearing(page: Page) -> None:
    page.say("""
### POST /kv/clear

Forgets everything, the disk tier's content too: of a tenant its own. While any of it is in use it is
refused, and says by whom; a pin is a use. With `"force": true` what is in use is no longer found either,
pins end, and running requests go on unchanged with what they hold.
""")
    page.ask("POST", "/kv/clear", {})
    page.ask("POST", "/kv/clear", {"force": True})
    page.say("""
### GET, POST, DELETE /kv/pins

See [http.md](http.md), under Pins.
""")


STORIES: Final = (introduction, pool, warm, questions, events, commands, clearing)
