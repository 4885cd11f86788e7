"""What servers are asked to show their features: plain English that any model continues, in the server's own
tokens. The words are ours and say nothing.
"""

from typing import NamedTuple

from harness.domain.check import Check
from harness.engines.serving import Ask
from harness.engines.vllm_server import ServerArm

__all__ = ["Needle", "needle_asks", "served_asks"]

PROMPTS = (
    "The three largest rivers of the country meet in a town that",
    "To measure how long a program takes, one should first",
    "The old clock in the station had stopped, and so the travellers",
    "A good test is one that can fail. For example,",
    "Copper conducts heat well, which is why",
    "The recipe begins with flour, water and salt. Then",
    "In the morning the harbour was full of boats, and the market",
    "The number of ways to order four cards is",
)
LINE = "Entry {n}: the sky over the harbour was clear and every train left on time."
NEEDLE = "Entry {n}: the code of the green door is {code}."
QUESTION = "\nQuestion: What is the code of the green door?\nAnswer: The code of the green door is"
DEPTHS = (0, 50, 99)
ANSWER_TOKENS = 12
PREFIX_SHARE = 0.6
MOST_PREFIX_TOKENS = 700


class Needle(NamedTuple):
    """A long prompt, what it asks for, and the same prompt with another code."""

    ask: Ask
    expected: str
    without: Ask


def served_asks(check: Check, server: ServerArm) -> list[Ask]:
    """Questions of a feature other than the full context."""
    asked = dict(check.parameters)
    name, count, seed = str(check.subject), int(asked["items"] or 0), int(asked["seed"] or 0)
    most, temperature = int(asked["max_tokens"] or 0), float(asked["temperature"] or 0)
    if name == "prefix_caching":
        limit = min(MOST_PREFIX_TOKENS, int(server.max_context() * PREFIX_SHARE))
        text = "\n".join(LINE.format(n=seed % 1000 + n) for n in range(limit // 8))
        return [Ask(item="long", tokens=server.tokens_of(text)[:limit], max_tokens=most)]
    texts = (PROMPTS[n % len(PROMPTS)] for n in range(count))
    return [
        Ask(
            item=f"{name}-{n}",
            tokens=server.tokens_of(text),
            max_tokens=most,
            temperature=temperature,
            seed=seed,
        )
        for n, text in enumerate(texts)
    ]


def needle_asks(check: Check, server: ServerArm) -> list[Needle]:
    """Prompts of the longest length with the needle at 0, 50 and 99 % of it."""
    seed = int(check.parameter("seed") or 0)
    room = server.max_context() - ANSWER_TOKENS - len(server.tokens_of(QUESTION)) - 32
    lines = max(2, room // (len(server.tokens_of(LINE.format(n=1000))) + 2))
    return [_needle(server, depth, lines, seed) for depth in DEPTHS]


def _needle(server: ServerArm, depth: int, lines: int, seed: int) -> Needle:
    code, other = str(1000 + (seed + depth * 37) % 9000), str(1000 + (seed + depth * 37 + 4321) % 9000)
    place = min(lines - 1, lines * depth // 100)

    def ask(named: str) -> Ask:
        told = [LINE.format(n=n) for n in range(lines)]
        told[place] = NEEDLE.format(n=place, code=named)
        text = "\n".join(told) + QUESTION
        return Ask(item=f"depth-{depth}", tokens=server.tokens_of(text), max_tokens=ANSWER_TOKENS)

    return Needle(ask(code), code, ask(other))
