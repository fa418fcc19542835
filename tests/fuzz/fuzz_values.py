"""Values that readers have been hurt by: numbers at limits, paths, markup, and JSON of any shape."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NUMBERS = (
    *(0, 1, 2, 3, 7, 8, 64, 127, 128, 255, 256, 511, 512, 1023, 65535, 65536, 10**6),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
    *(-1, -2, -(2**31), -(2**63)),
)
# Names of members of archives, of files named inside files, of steps.
NAMES = (
    *(
        "../outside",
        "../../outside/secret",
        "/outside/x",
        "a/../../outside",
        "..",
        ".",
        "/",
        "~/x",
    ),
    *("C:\\x", "a\\..\\b", "a\0b", "", " ", "-rf", "\u202egnp.x", "a\nb", "x" * 300, "a/" * 150),
    *("con", "CON.txt", "\udc80".encode("utf-8", "surrogatepass").decode("latin-1"), "\x1b[31mred"),
    *("global_step7", "global_step999999999999999999999", "global_step-1", "../global_step7"),
)
# A page or a figure that lets one of these through would run it; see `fuzz_markup`.
MARKUP = (
    "<fuzzed onload=alert(1)>",
    '"><fuzzed onload=alert(1)>',
    "'><fuzzed>",
    "</script><fuzzed>",
    "</style><fuzzed>",
    "]]><fuzzed/>",
    "--><fuzzed>",
    '" onfuzzed="alert(1)',
    "javascript:alert('fuzzed')",
    "| a | b |",
    "\\input{fuzzed}",
    "$\\fuzzed{$",
    "`<fuzzed>`",
    "&lt;fuzzed&gt;",
    "\x1b]0;fuzzed\x07",
)
TOKENS: tuple[bytes, ...] = (
    *(
        b"\0",
        b"\xff" * 8,
        b"\x7f\xff\xff\xff",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"\r\n",
        b"\x1b[2J",
    ),
    *(
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"-0.0",
        b"null",
        b"true",
        b"[]",
        b"{}",
        b'"',
        b"\\",
        b"1" * 5000,
    ),
    *(
        b"[" * 3000,
        b'{"a":' * 3000,
        b"- " * 3000,
        b"&a [*a, *a]",
        b"*a",
        b"!!python/name:os.system",
    ),
    *(b"!!python/object/apply:os.system ['x']", b"<<: *a", b"---", b"? ", b"\t", b"%TAG ! x:"),
    *(
        b"0x7f",
        b"1_0",
        b"1:30",
        b"2024-01-01",
        b"yes",
        b"~",
        b"__proto__",
        b"__class__",
        b"\xf0\x9f\x98\x80",
    ),
    *(
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"\x1f\x8b\x08",
        b"\x28\xb5\x2f\xfd",
        b"PAR1",
        b"ARROW1",
        b"MMIDIDX",
    ),
    *(name.encode("utf-8", "replace") for name in NAMES),
    *(text.encode() for text in MARKUP),
)

_WORDS = st.sampled_from([*NAMES, *MARKUP, "nan", "1", "ok", "fp16", "fp32", "cuda", "auto"])
_SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from(NUMBERS)
    | st.integers(-5, 5)
    | st.floats()
    | st.sampled_from([1e308, -1e308, 5e-324, 0.1, 1e400])
    | _WORDS
    | st.text(max_size=8)
)
JSON = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_WORDS | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)

_found: list[Any] = []


@settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(JSON)
def _find(value: Any) -> None:
    _found.append(value)


def any_json(draw: random.Random) -> Any:
    """A JSON value of hypothesis's strategy, from bytes of `draw`; NaN and infinities may be in it."""
    _found.clear()
    _find.hypothesis.fuzz_one_input(draw.randbytes(200))  # type: ignore[attr-defined]
    return _found[-1] if _found else draw.choice(NUMBERS)
