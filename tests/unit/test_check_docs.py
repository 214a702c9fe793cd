"""The documentation names only what exists, and check_docs sees what doesn't. Touches no network."""

from __future__ import annotations

import pytest

from check_docs import ROOT, anchors_of, external_links, problems_of


def test_our_documentation_names_only_what_exists():
    assert problems_of(ROOT) == []


@pytest.fixture
def repository(tmp_path):
    """A README to write into, beside a page with two headings, a source file and a folder of results."""
    for name in ("docs/page.md", "src/pico_vllm/kernels/linear.py", "benchmarks/results/cpu.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# The `step`, at last\n\n## Twice\n\n## Twice\n")

    def problems(readme: str) -> list[str]:
        (tmp_path / "README.md").write_text(readme)
        return problems_of(tmp_path)

    return problems


@pytest.mark.parametrize(
    "readme",
    [
        "See [the page](docs/page.md), [there](docs/page.md#the-step-at-last) or [here](docs/page.md#twice-1).",
        "# Speed\n\n[below](#speed)",
        "[`linear.py`](src/pico_vllm/kernels/linear.py)",
        "`src/pico_vllm/kernels/`, `kernels/linear.py`, `kernels/lin*.py`, `benchmarks/results/cpu.jsonl`.",
        "```bash\npython -m it --out benchmarks/results/cpu.jsonl\n```",
        "5,000 `tok/s` of `K/V` from `OWNER/NAME`; `--out my-results/new.jsonl`",
        "[elsewhere](https://example.org/docs/gone.md), `https://example.org/docs/gone.md`",
        "``a ` docs/page.md``",
    ],
)
def test_what_exists_may_be_named(repository, readme):
    assert repository(readme) == []


@pytest.mark.parametrize(
    ("readme", "problem"),
    [
        ("[gone](docs/gone.md)", "links to docs/gone.md, which doesn't exist"),
        ("[`gone.py`](src/gone.py#l1)", "links to src/gone.py, which doesn't exist"),
        ("[page](docs/page.md#thrice)", "links to docs/page.md#thrice, which has no such heading"),
        ("[third](docs/page.md#twice-2)", "links to docs/page.md#twice-2, which has no such heading"),
        ("[here](#speed)", "links to #speed, which has no such heading"),
        ("see `kernels/gone.py`", "names kernels/gone.py, which doesn't exist"),
        ("see `src/pico_vllm/gone/`", "names src/pico_vllm/gone/, which doesn't exist"),
        ("all of `kernels/gone*.py`", "names kernels/gone*.py, which doesn't exist"),
        ("made by `run --out benchmarks/results/gpu.jsonl`", "names benchmarks/results/gpu.jsonl, which doesn't exist"),
        ("```bash\npython examples/gone.py\n```", "names examples/gone.py, which doesn't exist"),
    ],
)
def test_what_is_missing_is_named(repository, readme, problem):
    assert repository(readme) == [f"README.md: {problem}"]


def test_a_comment_in_a_block_of_code_is_no_heading():
    assert anchors_of("# Real\n\n```bash\n# not a heading\n```\n") == {"real"}


def test_links_to_other_sites_are_found_once(tmp_path):
    (tmp_path / "README.md").write_text(
        "[a](https://example.org/a), https://example.org/b. [a](https://example.org/a) `http://h`"
    )
    assert external_links(tmp_path) == ["https://example.org/a", "https://example.org/b"]
