"""How `pagekeeper kv` shows the server's answers: tables, trees and texts for a terminal, without I/O."""

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.terminal.kv_client import Event, Json, one_line, shown

STATES: Final = (
    ("sealed", "in use", "blue"),
    ("reserved", "being written", "yellow"),
    ("cached", "cached", "green"),
    ("quarantined", "quarantined", "red"),
    ("free", "free", "bright_black"),
)
BAR: Final = 40  # characters
TEXT_WIDTH: Final = 60  # least width of a column of text
MAX_STRIP: Final = 2000  # blocks of a prompt that are shown
SIGNS: Final = {
    "stored": ("+", "green"),
    "removed": ("−", "red"),
    "cleared": ("×", "red"),
    "snapshot": ("=", "cyan"),
}
STRIP: Final = {
    "hit": ("█", "green", "hit"),
    "disk": ("▓", "cyan", "from the disk tier"),
    "copied": ("▒", "yellow", "partly copied"),
    "compute": ("░", "bright_black", "to compute"),
}
REASONS: Final = {
    "hit": "all but the last one",
    "never_seen": "what follows was never seen",
    "evicted": "what follows was evicted",
    "partial": "what follows is part of a block",
    "being_computed": "what follows is being computed",
    "other_layout": "what follows was made by another model or layout",
}


def amount(value: float) -> str:
    return f"{value:,.0f}"


def percent(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.1f}%"


def size(value: float) -> str:
    """Bytes, in powers of 1024."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{value:.0f} {units[-1]}" if units[-1] == "B" or value >= 100 else f"{value:.1f} {units[-1]}"


def ago(seconds: float) -> str:
    """A time span, in its largest unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


# --- stats --------------------------------------------------------------------------------------------------


def pool_bar(pool: Json, width: int = BAR) -> Text:
    """The pool's blocks by state, as one line of `width` characters."""
    total, at, done, bar = max(1, pool["num_blocks"]), 0, 0, Text()
    for state, _, colour in STATES:
        at += pool[state] or 0
        end = round(width * at / total)
        bar.append(("░" if state == "free" else "█") * (end - done), colour)
        done = end
    return bar


def pool_legend(pool: Json) -> Text:
    told = [each for each in STATES if pool[each[0]] is not None]  # a tenant is told of its own alone
    parts = [Text(f"{name} {amount(pool[state])}", colour) for state, name, colour in told]
    return Text("  ").join(parts)


def facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Names and what is to be said of each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def stats(answer: Json) -> RenderableType:
    """GET /kv/stats. For a tenant only its own figures are there."""
    pool, requests, pins = answer["pool"], answer["requests"], answer["pins"]
    whole = f"{amount(pool['num_blocks'])} blocks of {pool['block_size']} tokens"
    if pool["block_bytes"]:
        whole += f", {size(pool['num_blocks'] * pool['block_bytes'])}"
    rows: list[tuple[str, RenderableType]] = [("pool", Group(Text(whole), pool_bar(pool), pool_legend(pool)))]
    if pool["waste"] is not None:
        rows.append(("waste", f"{percent(pool['waste'])} of the slots in used blocks hold no token"))
    if cache := answer.get("cache"):
        rows.append(("hit rate", hit_rate(cache)))
        rows.append(("evictions", amount(cache["evictions"])))
    rows.append(("requests", request_counts(requests)))
    if (tier := answer.get("tier")) and tier["num_slots"]:
        rows.append(("disk tier", tier_line(tier)))
    rows.append(("pins", f"{amount(pins['blocks'])} of at most {amount(pins['budget_blocks'])} blocks"))
    if "runners" in answer:
        rows.append(("runners", runners(answer["runners"])))
    return Group(facts(rows), Text(f"event {answer['sequence']} of {answer['boot_id']}", "bright_black"))


def hit_rate(cache: Json) -> str:
    looked = f"{amount(cache['hits'])} of {amount(cache['queries'])} prompt tokens"
    return f"{percent(cache['hit_rate'])}: {looked} were found"


def request_counts(requests: Json) -> str:
    known = (("preemptions", "preempted"), ("rejected", "rejected"))
    more = [f"{amount(requests[field])} {word}" for field, word in known if field in requests]
    return ", ".join([f"{requests['running']} running", f"{requests['waiting']} waiting", *more])


def tier_line(tier: Json) -> str:
    held = f"{amount(tier['blocks'])} of {amount(tier['num_slots'])} blocks, {size(tier['bytes'])}"
    return f"{held}; {amount(tier['demotions'])} written, {amount(tier['promotions'])} read back"


def runners(cards: Sequence[Json]) -> RenderableType:
    if not cards:
        return Text("none", "red")
    return Group(*(runner(card) for card in cards))


def runner(card: Json) -> Text:
    state, colour = "starting", "yellow"
    if card["ready"]:
        state, colour = "ready", "green"
    if card["draining"]:
        state, colour = "draining", "yellow"
    if card["stuck"]:
        state, colour = "stuck", "red"
    text = Text.assemble(("● ", colour), shown(card["name"]), (f" {state}", colour))
    return text.append(f", {card['running']} running, {card['credits']} blocks in credit")


# --- tree ---------------------------------------------------------------------------------------------------


def columns(*names: str) -> Table:
    """A table with text on the left and figures on the right."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1), expand=True)
    table.add_column(names[0], ratio=1, no_wrap=True, overflow="ellipsis", min_width=12)
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def tree(answer: Json, query: str = "") -> RenderableType:
    """GET /kv/prefixes: each prefix under the one that it continues."""
    if not answer["nodes"]:
        return Text("nothing that is cached contains it" if query else "nothing is cached")
    table = columns("text", "tokens", "size", "hits", "in use", "age")
    for node in answer["nodes"]:
        whole = node["subtree"]
        text = Text("  " * node["depth"] + ("▾ " if node["children"] else "· "), "bright_black")
        text.append(one_line(node["text"]) or "∅", "" if node["match"] or not query else "bright_black")
        for word in ("pinned", "partial"):
            text.append(f" [{word}]" if node[word] else "", "cyan")
        table.add_row(
            text,
            amount(whole["tokens"]),
            size(whole["bytes"]),
            amount(whole["hits"]),
            amount(node["references"]),
            ago(node["age"]),
        )
    more = answer["total"] - len(answer["nodes"])
    note = f"and {amount(more)} more: see --limit" if answer["next_cursor"] else ""
    return Group(table, Text(note, "bright_black")) if note else table


# --- explain ------------------------------------------------------------------------------------------------


def explanation(answer: Json) -> RenderableType:
    """POST /kv/explain."""
    total, cached = answer["num_tokens"], answer["cached_tokens"]
    head = Text.assemble(
        (f"{amount(cached)} of {amount(total)} tokens", "bold"),
        f" would be found ({percent(cached / max(1, total))}): ",
        (
            REASONS.get(answer["reason"], str(answer["reason"])),
            "green" if answer["reason"] == "hit" else "yellow",
        ),
    )
    parts: list[RenderableType] = [head, *strip(answer)]
    if answer["advice"]:
        parts += [Text(), Text(shown(answer["advice"]))]
    if eviction := answer["eviction"]:
        whom = f" for {shown(eviction['request_id'])}" if eviction["request_id"] else ""
        parts.append(Text(f"evicted {ago(eviction['seconds_ago'])} ago ({eviction['cause']}){whom}"))
    if answer["computed_by"]:
        parts.append(Text(f"request {shown(answer['computed_by'])} computes the next block now"))
    if answer["difference"]:
        parts += [Text(), difference(answer["difference"])]
    return Group(*parts)


def strip(answer: Json) -> list[Text]:
    """One character per block of the prompt, and what the characters mean."""
    length = answer["block_size"]
    total = -(-answer["num_tokens"] // length)
    kinds = [kind_of(answer, index) for index in range(min(total, MAX_STRIP))]
    line = Text("").join([Text(STRIP[kind][0], STRIP[kind][1]) for kind in kinds])
    legend = Text("  ").join(
        [
            Text(f"{sign} {kinds.count(kind)} {word}", colour)
            for kind, (sign, colour, word) in STRIP.items()
            if kind in kinds
        ]
    )
    return [line, legend]


def kind_of(answer: Json, index: int) -> str:
    """What becomes of block `index` of the prompt; the last token is computed in any case."""
    length = answer["block_size"]
    whole = min(length, answer["num_tokens"] - index * length)
    covered = answer["cached_tokens"] - index * length
    held = answer["blocks"][index] if index < len(answer["blocks"]) else None
    if held is not None and held["tier"] == "disk":
        return "disk"
    if covered >= whole or (held is not None and covered >= whole - 1):
        return "hit"
    return "copied" if covered > 0 else "compute"


def difference(found: Json) -> RenderableType:
    """Both texts beside each other; what differs has a colour, and stands in ⟦ ⟧ for those that see none."""
    where = (
        f"token {found['token']} is the first one not cached: "
        f"{found['offset_in_block']} of block {found['block_index']} of the prompt"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2), expand=True)
    table.add_column("yours", ratio=1)
    table.add_column(f"cached, in block {found['cached']['block']}", ratio=1)
    table.add_row(side(found, "yours", "yellow"), side(found, "cached", "cyan"))
    return Group(Text(where), Text(), table)


def side(found: Json, whose: str, colour: str) -> Text:
    text = Text(shown(found["before"]), "bright_black")
    return text.append(f"⟦{shown(found[whose]['text'])}⟧", f"bold {colour}")


# --- pins, events, requests ---------------------------------------------------------------------------------


def pins(answer: Json) -> RenderableType:
    """GET /kv/pins."""
    note = Text(f"{amount(answer['pinned_blocks'])} of at most {amount(answer['budget_blocks'])} blocks")
    if not answer["data"]:
        return Group(Text("nothing is pinned"), note)
    table = columns("name", "blocks", "tokens", "expires in")
    for pin in answer["data"]:
        name = Text(one_line(pin["name"]))
        table.add_row(name, amount(pin["blocks"]), amount(pin["tokens"]), ago(pin["expires_in"]))
    return Group(table, note)


def event(found: Event, clock: str) -> Text:
    """One line."""
    sign, colour = SIGNS.get(found.name, ("!", "yellow"))
    data = found.data
    line = Text.assemble((clock, "bright_black"), (f" {sign} {found.name:<8}", colour))
    if found.name == "snapshot":
        return line.append(f" {amount(len(data['blocks']))} blocks")
    if found.name == "gap":
        return line.append(f" events after {data['after']} are lost; a snapshot follows")
    if data.get("block") is not None:
        line.append(f" block {data['block']}")
    if data.get("tier", "pool") != "pool":
        line.append(f" {data['tier']}", "cyan")
    if data.get("cause"):
        line.append(f" {data['cause']}")
    if data.get("request_id"):
        line.append(f" for {one_line(data['request_id'])}")
    line.append(f" {data.get('hash', '')[:12]}", "bright_black")
    return line.append(f"  {one_line(data['text'])}" if data.get("text") else "")


def progress(request: Json, width: int = 20) -> Text:
    """Prompt computed and output made, of all that it may become."""
    prompt, choices = request["num_prompt_tokens"], max(1, request["num_choices"])
    total = max(1, prompt + choices * request["max_tokens"])
    sequences = request["sequences"]
    computed = min(prompt, max((sequence["num_computed"] for sequence in sequences), default=0))
    output = sum(max(0, sequence["num_tokens"] - prompt) for sequence in sequences)
    first, last = round(width * computed / total), round(width * (computed + output) / total)
    parts = ((first, "yellow", "█"), (last - first, "blue", "█"), (width - last, "bright_black", "░"))
    return Text.assemble(*((sign * number, colour) for number, colour, sign in parts))


def requests(cards: Sequence[Json], most: int) -> RenderableType:
    """Those that run first."""
    live = sorted(cards, key=lambda card: (card["state"] != "running", -card["age"]))
    if not live:
        return Text("no request is running or waiting", "bright_black")
    table = columns("request", "state", "prompt", "output", "progress", "blocks", "age")
    for card in live[:most]:
        prompt = card["num_prompt_tokens"]
        output = sum(max(0, sequence["num_tokens"] - prompt) for sequence in card["sequences"])
        blocks = sum(sequence["num_blocks"] for sequence in card["sequences"])
        table.add_row(
            Text(one_line(card["request_id"])),
            card["state"].replace("_", " "),
            amount(prompt),
            amount(output),
            progress(card),
            amount(blocks),
            ago(card["age"]),
        )
    more = len(live) - most
    return Group(table, Text(f"and {more} more", "bright_black")) if more > 0 else table
