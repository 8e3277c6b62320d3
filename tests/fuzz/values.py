"""Generators that several boundaries share: hostile strings and numbers, and mutations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

LONG_TEXTS: Final = (256, 1_025, 4_301, 20_000, 400_000)
MAX_COPIED_CHARACTERS: Final = 2_000_000
"""A part that is repeated may become about so large: the time limit is not for making inputs."""
HOSTILE_TEXTS: Final = (
    "",
    " ",
    "[/x]",
    "[red]",
    "[link=file:///x]y[/link]",
    ":boom:",
    "\x1b[2J\x1b]0;title\x07",
    "\x9b31m",
    "line\nERROR forged",
    "tab\tcarriage\r",
    "\u2028\u2029\x85",
    "\u202etxt.exe",
    "\ud800",
    "\x00",
    "\\",
    "'\"",
    "%s %d {0} {x}",
    "../../x",
    "/etc/passwd",
    "a:b",
    ":",
    "a:b:c:d",
    "é漢字🎉",
    "\u0661\u0662",
    "²",
)
HOSTILE_NUMBERS: Final = (
    "0",
    "-0",
    "-1",
    "1",
    "00",
    "007",
    "+1",
    "1.0",
    "1.5",
    "1_000",
    " 1",
    "1e3",
    "1E+18",
    "1E+125",
    "1E-130",
    "1E+999999999",
    "-1E+999999999",
    "1E-999999999",
    "NaN",
    "sNaN",
    "Infinity",
    "-Infinity",
    "0x10",
    "",
    "x",
    "\u0661",
    str(2**31 - 1),
    str(2**31),
    str(2**53 + 1),
    str(10**18 - 1),
    str(10**18),
    str(2**62),
    str(2**63 - 2),
    str(2**63 - 1),
    str(2**63),
    str(2**64),
    "9" * 38,
    "9" * 39,
    "9" * 129,
    "9" * 130,
    "9" * 4_301,
    "9" * 100_000,
    "0" * 5_000 + "1",
)


def text(random: Random) -> str:
    """A string: plain, hostile, long, or of random characters."""
    kind = random.randrange(8)
    if kind == 0:
        return random.choice(HOSTILE_TEXTS)
    if kind == 1:
        return random.choice(("a", "1", "é", "\x1b", "[", "\n")) * random.choice(LONG_TEXTS)
    if kind == 2:
        return "".join(chr(random.randrange(0x2FFF)) for _ in range(random.randrange(20)))
    if kind == 3:
        return random.choice(HOSTILE_TEXTS) + random.choice(HOSTILE_TEXTS)
    return "".join(random.choices("abcxyz0123456789-_.:/ ", k=random.randrange(1, 24)))


def number_text(random: Random) -> str:
    """A string where a number is expected: near a limit, malformed, or plain."""
    kind = random.randrange(4)
    if kind == 0:
        return random.choice(HOSTILE_NUMBERS)
    if kind == 1:
        return str(random.randrange(-(10**37), 10**37))
    if kind == 2:
        return str(2 ** random.randrange(200) + random.randrange(-2, 3))
    return str(random.randrange(1_000))


def data(random: Random) -> bytes:
    """A few bytes: empty, random, digits, or text."""
    kind = random.randrange(4)
    if kind == 0:
        return b""
    if kind == 1:
        return random.randbytes(random.randrange(40))
    if kind == 2:
        return number_text(random).encode("utf-8", "replace")
    return text(random).encode("utf-8", "replace")


def tree(random: Random, leaf: Callable[[Random], Any], depth: int = 3) -> Any:
    """Nested lists and dictionaries with leaves of `leaf`."""
    kind = random.randrange(5) if depth else 0
    if kind == 3:
        return [tree(random, leaf, depth - 1) for _ in range(random.randrange(4))]
    if kind == 4:
        return {
            text(random)[:30]: tree(random, leaf, depth - 1) for _ in range(random.randrange(4))
        }
    return leaf(random)


def json_leaf(random: Random) -> Any:
    """A value that JSON has without nesting."""
    kind = random.randrange(8)
    if kind == 0:
        return None
    if kind == 1:
        return random.random() < 0.5
    if kind == 2:
        return random.choice((0, -1, 1, 2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**40))
    if kind == 3:
        return random.choice((0.0, -0.5, 1e308, 1e-308, 1.5))
    return text(random)


def nested(open_: str, close: str, depth: int, inner: str = "") -> str:
    """Brackets inside brackets, such as `[[[]]]`."""
    return open_ * depth + inner + close * depth


def mutated(random: Random, raw: bytes, interesting: Sequence[bytes] = ()) -> bytes:
    """Bytes with one to four edits: flips, cuts, repeats, insertions, overwritten lengths."""
    result = bytearray(raw)
    for _ in range(random.randrange(1, 5)):
        at = random.randrange(len(result) + 1)
        kind = random.randrange(7)
        if kind == 0 and result:
            result[at % len(result)] ^= 1 << random.randrange(8)
        elif kind == 1:
            del result[at : at + random.randrange(1, 9)]
        elif kind == 2:
            result[at:at] = random.randbytes(random.randrange(1, 9))
        elif kind == 3:
            result[at:at] = result[at : at + random.randrange(1, 65)] * random.randrange(1, 4)
        elif kind == 4:
            del result[at:]
        elif kind == 5:
            width = random.choice((1, 2, 4, 8))
            result[at : at + width] = random.choice((b"\xff", b"\x00", b"\x7f")) * width
        elif interesting:
            result[at:at] = random.choice(interesting)
    return bytes(result)


def damaged(random: Random, value: Any, leaf: Callable[[Random], Any]) -> Any:
    """A tree with one place changed: a part is left out, doubled, or replaced."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice(sorted(value))
        kind = random.randrange(6)
        rest = {name: part for name, part in value.items() if name != key}
        if kind == 0:
            return rest
        if kind == 1:
            return {**rest, text(random)[:40]: value[key]}
        if kind == 2:
            return {**value, text(random)[:40]: tree(random, leaf)}
        return {**value, key: damaged(random, value[key], leaf)}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        kind = random.randrange(4)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            times = random.choice((2, 20, 2_000))
            times = min(times, max(MAX_COPIED_CHARACTERS // (len(repr(value[at])) + 1), 2))
            return value[:at] + [value[at]] * times + value[at + 1 :]
        return [*value[:at], damaged(random, value[at], leaf), *value[at + 1 :]]
    return tree(random, leaf, 2)
