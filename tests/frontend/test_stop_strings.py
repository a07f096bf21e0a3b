"""Stop strings on streamed text: the same result as on the whole text, and nothing of them is ever sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.stop_strings import StopStrings


def feed(text: str, stops: list[str], sizes: list[int]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    sent, at = "", 0
    for size in [*sizes, len(text)]:
        sent += matcher.push(text[at : at + size])
        at += size
    return sent + matcher.flush(), matcher.matched


def whole(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, said slowly: after each character, does a stop string end here? The longest one does."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


_LETTERS = st.text(alphabet="ab", min_size=1, max_size=4)


@given(text=st.text(alphabet="ab", max_size=30), stops=st.lists(_LETTERS, max_size=3), sizes=st.lists(st.integers(0, 5), max_size=12))
def test_any_chunking_gives_what_the_whole_text_gives(text: str, stops: list[str], sizes: list[int]):
    assert feed(text, stops, sizes) == whole(text, stops)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("stops", "sent", "matched"),
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["DEFGHIJX"], "ABCDEFGHIJKLM", None),
        (["EFG", "DEFG"], "ABC", "DEFG"),
        (["M"], "ABCDEFGHIJKL", "M"),
        (["A"], "", "A"),
        ([], "ABCDEFGHIJKLM", None),
    ],
)
def test_alphabet(stops: list[str], sent: str, matched: str | None, size: int):
    assert feed("ABCDEFGHIJKLM", stops, [size] * 13) == (sent, matched)


def test_text_is_held_only_while_it_may_become_a_stop_string():
    matcher = StopStrings(["###"])
    assert [matcher.push(piece) for piece in ("a", "#", "#", "b", "#", "#", "#", "c")] == ["a", "", "", "##b", "", "", "", ""]
    assert matcher.flush() == ""
