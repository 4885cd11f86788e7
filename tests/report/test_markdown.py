"""The comment: short, complete, and inert."""

import re

import pytest
from markdown_it import MarkdownIt

from harness.evidence.reader import open_bundle
from harness.gate import decide, load_submission
from harness.report import build_view
from harness.report.markdown import COMMENT_LIMIT, MARKER, Disclosure, render_markdown
from harness.report.view import ReportView
from tests.evidence.example_judge import judge
from tests.evidence.example_run import as_planned, example_policy, many_checks, write_example
from tests.report.hostile import TEXT, write_hostile


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> ReportView:
    folder = write_example(tmp_path_factory.mktemp("md") / "bundle")
    return build_view(
        open_bundle(folder), decide([load_submission(folder, judge, as_planned)], example_policy())
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> ReportView:
    folder = write_hostile(tmp_path_factory.mktemp("md") / "hostile")
    submission = load_submission(folder, lambda check, samples: None, as_planned)
    return build_view(open_bundle(folder), decide([submission], example_policy()), submission.verification)


def test_the_comment_says_verdict_missing_evidence_and_numbers(view: ReportView) -> None:
    lines = render_markdown(view).splitlines()
    assert lines[0] == MARKER
    assert lines[2] == "## fasttrack: rejected under policy `smoke`"
    headings = [line for line in lines if line.startswith("### ")]
    assert headings == ["### What is missing", "### Evidence", "### Numbers", "### AI-assisted contribution"]
    assert "| sweep `cpu` | 5 | 1 |  |  |  | 6/6 | smoke | **no** |" in lines
    assert any(
        line.startswith("  - make it on `any machine, no GPU needed`: `fasttrack validate") for line in lines
    )


def test_the_block_for_ai_assisted_changes_has_every_line_that_vllm_asks_for(view: ReportView) -> None:
    said = Disclosure(
        duplicates="searched for KDA decode: none open", ai_use="wrote the kernel", reviewer="Ada"
    )
    text = render_markdown(view, said)
    block = text[text.index("### AI-assisted contribution") :]
    assert "- Duplicate search: `searched for KDA decode: none open`" in block
    assert "- Test command: `fasttrack validate --pack k3_decode --policy smoke" in block
    assert "  - `kernels`: 13 PASS, 2 FAIL" in block
    assert "  - `evals/mrcr_canary/canary`: INCONCLUSIVE, `0.906 against" in block
    assert "- AI use: `wrote the kernel`" in block
    assert "- Human who reviewed every line: `Ada`" in block


def test_what_nobody_stated_is_asked_for_and_not_made_up(view: ReportView) -> None:
    assert render_markdown(view).count("**not stated; the submitter must say**") == 3


def test_text_of_a_bundle_stands_in_code_spans_alone(hostile: ReportView) -> None:
    text = render_markdown(hostile, Disclosure(TEXT, TEXT, TEXT))
    outside = _outside_code(text)
    for active in (MARKER, "boom", "@alice", "#1", "evil", "javascript", "cmd", "gnp", "7*7"):
        assert active not in outside, active


def test_a_renderer_finds_no_link_image_html_or_heading_of_the_bundle(
    view: ReportView, hostile: ReportView
) -> None:
    honest, forged = (_rendered(render_markdown(v)) for v in (view, hostile))
    assert forged["tags"] <= honest["tags"]
    assert not forged["links"]
    assert forged["headings"] <= honest["headings"] | {
        "fasttrack: could not judge under policy `smoke`",
        "Why",
    }


def test_the_comment_fits_whatever_the_bundle_holds(hostile: ReportView) -> None:
    assert len(render_markdown(hostile, Disclosure("x" * 50_000, "y" * 50_000, "z" * 50_000))) < COMMENT_LIMIT
    text = render_markdown(build_view(many_checks(25, subject="long" * 200)))
    assert len(text) < COMMENT_LIMIT
    assert "more" in text


def _outside_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", text.split("\n", 1)[1])


def _rendered(text: str) -> dict[str, set[str]]:
    """Raw HTML, links and images, and headings, as CommonMark with tables and autolinks sees them."""
    found: dict[str, set[str]] = {"tags": set(), "links": set(), "headings": set()}
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for place, token in enumerate(tokens):
        if token.type == "heading_open":
            found["headings"].add(tokens[place + 1].content)
        for part in [token, *(token.children or [])]:
            if part.type in ("html_block", "html_inline"):
                found["tags"] |= set(re.findall(r"<[a-z!/]+", part.content))
            if part.type in ("link_open", "image"):
                found["links"].add(str(part.attrs))
    return found
