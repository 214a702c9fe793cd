"""The verification as a person reads it: a row a layer with its worst point, and every point of the first bad layer."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pico_vllm.oracle.comparison import PointError
    from pico_vllm.oracle.verify import Verification


def render(result: Verification, *, all_points: bool = False) -> RenderableType:
    """Tables and a verdict.

    Args:
        result: of ``verify``.
        all_points: a row for every point instead of one a layer.
    """
    parts: list[RenderableType] = [_settings(result)]
    if all_points:
        parts.append(_table(result.errors, "Every point"))
    else:
        worst = [
            max(group, key=_nearness)
            for _, group in groupby(
                result.errors, key=lambda e: e.point.layer if e.point.layer is not None else e.point.key
            )
        ]
        parts.append(_table(worst, "The point nearest to its bound in each layer"))
        if (failure := result.failure) is not None and failure.point.layer is not None:
            layer = [e for e in result.errors if e.point.layer == failure.point.layer]
            parts.append(_table(layer, f"Every point of layer {failure.point.layer}"))
    parts += [_tokens(result), _verdict(result)]
    return Group(*parts)


def _nearness(e: PointError) -> float:
    """0 … 1 for what passes; a bound of 0 (the truth is 0 everywhere) is met exactly or not at all."""
    if not e.passes:
        return float("inf")
    return max(e.rms / e.bound if e.bound else 0.0, e.worst_row / e.row_bound)


def _settings(result: Verification) -> Text:
    s = result.settings
    return Text(
        f"{s['model']} ({s['architecture']}), {s['dtype']} on {s['device']}, backend {s['backend']}: "
        f"{len(s['prompt_lengths'])} prompts of {min(s['prompt_lengths'])} … {max(s['prompt_lengths'])} tokens, "
        f"{s['num_new_tokens']} new tokens each, at most {s['max_num_batched_tokens']} tokens a step.\n"
        f"Errors against transformers in fp32 at {_num_positions(result)} positions: largest error; RMS error and its "
        "bound; RMS error of the worst position relative to its values, and its bound.\n"
    )


def _num_positions(result: Verification) -> str:
    fewest, most = (f(e.num_rows for e in result.errors) for f in (min, max))
    return str(most) if fewest == most else f"{fewest} to {most}"


def _table(errors: Sequence[PointError], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("point", no_wrap=True)
    for name in ("largest", "RMS", "bound", "worst", "bound", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for e in errors:
        numbers = (f"{x:.1e}" for x in (e.largest, e.rms, e.bound, e.worst_row, e.row_bound))
        verdict = Text("ok", "green") if e.passes else Text("BROKEN", "bold red")
        table.add_row(e.point.key, *numbers, verdict)
    return table


def _tokens(result: Verification) -> Text:
    t = result.tokens
    text = f"greedy tokens: {t.num_equal} of {t.num_tokens} are the true argmax"
    if t.num_equal < t.num_tokens:
        text += f"; the others are at most {t.worst_gap:.2e} below it (rounding explains {t.allowed_gap:.2e})"
    return Text(text, "" if t.passes else "bold red")


def _verdict(result: Verification) -> Text:
    failure = result.failure
    if failure is not None:
        return Text(
            f"FAILED: the first point that differs is {failure.point.key}, made by {failure.point.op}", "bold red"
        )
    if not result.tokens.passes:
        return Text("FAILED: every point is within its bound, but the tokens differ by more than rounding", "bold red")
    return Text(f"PASSED: all {len(result.errors)} points are within their bounds", "bold green")
