"""Stop strings: where a text that arrives in pieces ends, and how much of it a client may see before that is known.

Knows text only, neither tokens nor requests; the output processor has a scanner a sample.

Which stop string ends a text
    The one that is complete first, as if the text were looked at after every character; of several that end at the
    same character, the longest (it begins first). So the answer depends on the text alone, not on how it was cut into
    tokens, and no token is generated to see whether another stop string might still be completed. With the stops "bc"
    and "abcd" the text "abcd" ends at "bc", and the output is "a".

What is held back
    The longest end of the text that is the beginning of a stop string. With ``include_in_output`` nothing is: the
    beginning of a stop string is output whether or not the rest of it comes.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, prepared for search (Knuth-Morris-Pratt); its samples share them."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        assert all(stops), "an empty stop string would end every text"
        self.include_in_output = include_in_output
        self.patterns = tuple((stop, _borders(stop)) for stop in stops)
        self.first_characters = frozenset(stop[0] for stop in stops)


class StopStringScanner:
    """One text on its way through; ``found`` is the stop string that ended it, or None."""

    def __init__(self, stops: StopStrings) -> None:
        self.found: str | None = None
        self._stops = stops
        self._num_matched = [0] * len(stops.patterns)  # characters of each stop that the text ends in now
        self._longest_match = 0
        self._held = ""

    def append(self, piece: str, may_stop: bool = True) -> str:
        """Take the next characters and return those that belong to the output for certain.

        Args:
            piece: text; maybe "".
            may_stop: False = a stop string that ends inside this piece is text like any other. One that only begins
                inside it counts.

        Costs about 0.2 µs a character and stop; nothing where no stop string has begun or begins.
        """
        assert self.found is None, "append after a stop string"
        if not self._longest_match and self._stops.first_characters.isdisjoint(piece):
            return piece
        end = len(piece) + 1
        for index, (stop, borders) in enumerate(self._stops.patterns):
            num_matched, stop_end = _scan(stop, borders, self._num_matched[index], piece, may_stop)
            self._num_matched[index] = num_matched
            if stop_end and (stop_end < end or (stop_end == end and len(stop) > len(self.found or ""))):
                self.found, end = stop, stop_end
        text = self._held + piece
        if self.found is not None:
            cut = len(self._held) + end - (0 if self._stops.include_in_output else len(self.found))
            self._held = ""
            return text[:cut]
        self._longest_match = max(self._num_matched)
        if self._stops.include_in_output:
            return piece
        cut = len(text) - self._longest_match
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """Return what was held back: nothing follows that could make it a stop string."""
        held, self._held = self._held, ""
        return held


def _scan(stop: str, borders: Sequence[int], num_matched: int, piece: str, may_stop: bool) -> tuple[int, int]:
    """Characters of the stop that the text ends in after the piece, and the end in it of the first match (0 = none)."""
    for position, character in enumerate(piece):
        while num_matched and stop[num_matched] != character:
            num_matched = borders[num_matched - 1]
        if stop[num_matched] == character:
            num_matched += 1
            if num_matched == len(stop):
                if may_stop:
                    return 0, position + 1
                num_matched = borders[num_matched - 1]
    return num_matched, 0


def _borders(text: str) -> list[int]:
    """For each of its beginnings text[:i + 1]: the length of the longest shorter beginning that it also ends in."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        if text[index] == text[length]:
            length += 1
        borders[index] = length
    return borders
