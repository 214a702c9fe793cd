"""Arithmetic of intervals [start, end) on a line. Knows nothing of traces; called by ``analysis``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The union of intervals within a window: sorted, disjoint, touching ones joined, empty ones left out."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, window[0]), min(end, window[1])
        if end <= start:
            continue
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def gaps_between(union: Sequence[Interval], window: Interval) -> list[Interval]:
    """What a ``merged`` union leaves of its window."""
    gaps, free_since = [], window[0]
    for start, end in union:
        if start > free_since:
            gaps.append((free_since, start))
        free_since = end
    if window[1] > free_since:
        gaps.append((free_since, window[1]))
    return gaps


def total(intervals: Iterable[Interval]) -> float:
    """Their lengths added up."""
    return sum(end - start for start, end in intervals)


def overlaps(interval: Interval, sorted_disjoint: Sequence[Interval]) -> Iterator[tuple[int, float]]:
    """(index, length) of each overlap with a sorted sequence of disjoint intervals."""
    start, end = interval
    first = max(0, bisect_right(sorted_disjoint, start, key=lambda other: other[0]) - 1)
    for index in range(first, len(sorted_disjoint)):
        other_start, other_end = sorted_disjoint[index]
        if other_start >= end:
            return
        length = min(end, other_end) - max(start, other_start)
        if length > 0:
            yield index, length
