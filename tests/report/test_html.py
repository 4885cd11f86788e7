"""The page: what is on it, and that nothing of a bundle acts on it."""

import base64
import hashlib
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.domain.errors import InputError
from harness.domain.verdict import Answer
from harness.evidence.reader import open_bundle
from harness.gate import decide, load_submission
from harness.report import build_view, render_html, write_report
from tests.evidence.example_judge import judge
from tests.evidence.example_run import as_planned, example_plan, example_policy, many_checks, write_example
from tests.report.hostile import write_hostile

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class _Page(HTMLParser):
    """Elements, attributes and visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._skip = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._skip = tag if tag in ("script", "style") else self._skip

    def handle_endtag(self, tag: str) -> None:
        self._skip = "" if tag == self._skip else self._skip

    def handle_data(self, data: str) -> None:
        if not self._skip and data.strip():
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_example(tmp_path_factory.mktemp("html") / "bundle")
    verdict = decide([load_submission(folder, judge, as_planned)], example_policy())
    return render_html(build_view(open_bundle(folder), verdict))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_hostile(tmp_path_factory.mktemp("html") / "hostile")
    submission = load_submission(folder, lambda check, samples: None, as_planned)
    verdict = decide([submission], example_policy())
    return render_html(build_view(open_bundle(folder), verdict, submission.verification))


def test_the_first_screen_says_verdict_missing_matrix_and_numbers_with_conditions(html: str) -> None:
    text = _Page(html).text
    order = [
        "Rejected under policy smoke", "1 of 7 proofs that policy smoke demands are met.",
        "Evidence", "controls that failed",
        "Numbers and their conditions", "verify steps per second, smallest cell", "batch 1, context 64",
        "What is missing", "1 of 4 required checks did not pass (1 FAIL)", "Does the change stay inside",
    ]  # fmt: skip
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_an_admission_says_how_far_it_reaches_and_for_which_policy_the_bundle_was_made(
    tmp_path: Path,
) -> None:
    bundle = open_bundle(write_example(tmp_path / "bundle"))
    verdict = decide([load_submission(tmp_path / "bundle", judge, as_planned)], example_policy())
    rows = tuple(row.model_copy(update={"is_met": True}) for row in verdict.rows)
    admitted = verdict.model_copy(
        update={"answer": Answer.ADMITTED, "policy": "strict", "rows": rows, "missing": ()}
    )
    text = _Page(render_html(build_view(bundle, admitted))).text
    assert "Admitted under policy strict" in text
    assert (
        "7 of 7 proofs that policy strict demands are met. It asks for evidence of tier smoke at most; other "
        "policies ask for other proofs. The bundle was made for policy smoke."
    ) in text


def test_every_check_has_a_place_of_its_own_that_links_reach(html: str) -> None:
    page = _Page(html)
    checks = [a["id"] for a in page.all("details") if a.get("class") == "check"]
    assert len(checks) == len(set(checks)) == 44
    targets = {a["id"] for _, a in page.tags if a.get("id")}
    links = {str(a["href"])[1:] for a in page.all("a") if str(a.get("href")).startswith("#")}
    assert links <= targets


def test_each_stage_shows_its_exhibits(html: str) -> None:
    text = _Page(html).text
    for words in (
        "vllm/v1/core/sched.py:118", "shared core", "not open to the pack",  # isolation
        "Compiled kernels", "48 B",  # audit
        "Error against the float64 oracle, worst cell of each op", "Ops by cells", "8.06e-3",  # kernels
        "Causal matrix: op by eval", "Declines by reason", "batch_above_max", # coverage
        "Where in the envelope",
        "Stock against optimised, paired", "not measured",  # evals
        "Gain over stock: decode", "Where it loses",  # sweep
        "OMP_NUM_THREADS", "Digests",  # environment
        "git clone https://github.com/example/vllm vllm", "--nonce 0123456789abcdef",  # reproduce
    ):  # fmt: skip
        assert words in text, words


def test_a_finding_leads_to_its_line(html: str) -> None:
    links = [a["href"] for a in _Page(html).all("a")]
    assert f"https://github.com/example/vllm/blob/{'a' * 40}/vllm/v1/core/sched.py#L118" in links


def test_the_page_loads_nothing_and_allows_only_its_own_style_and_script(html: str) -> None:
    page = _Page(html)
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)
    assert style is not None
    assert script is not None
    hashes = [
        base64.b64encode(hashlib.sha256(m.group(1).encode()).digest()).decode() for m in (style, script)
    ]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not {"link", "img", "iframe", "object", "embed", "form"} & {tag for tag, _ in page.tags}
    assert not [a for _, a in page.tags if "src" in a or "style" in a]


def test_no_text_of_a_bundle_becomes_an_element_an_attribute_or_a_link_that_acts(
    html: str, hostile: str
) -> None:
    page = _Page(hostile)
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in _Page(html).tags}
    assert len(page.all("script")) == len(page.all("style")) == 1
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on") or name == "style"]
    for attrs in page.all("a"):
        assert str(attrs["href"]).startswith(("#", "https://github.com/")), attrs
    assert "<script>boom()</script>" in page.text
    assert "{{ 7*7 }}" in page.text


def test_text_that_hides_or_reorders_itself_is_shown_as_codes(hostile: str) -> None:
    assert not set(hostile) & set("\u202e\u2066\u2069\x1b")
    assert "\\u202egnp.exe" in hostile


def test_a_page_without_a_verdict_says_so(tmp_path: Path) -> None:
    files = write_report(write_example(tmp_path / "bundle", scene="passing"), tmp_path / "report")
    text = _Page(files.html.read_text()).text
    assert "Not judged" in text
    assert "The gate was not asked." in text


def test_a_run_that_has_not_finished_can_be_looked_at(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "run", example_plan(), stop_after=12)
    (folder / "manifest.json").unlink()
    text = _Page(render_html(build_view(open_bundle(folder)))).text
    assert "this check has no outcome: the run did not finish" in text


def test_a_report_is_never_put_inside_the_bundle(tmp_path: Path) -> None:
    folder = write_example(tmp_path / "bundle", scene="passing")
    with pytest.raises(InputError, match="lies inside the bundle"):
        write_report(folder, folder / "logs")


def test_a_bundle_of_a_thousand_checks_gives_a_page_under_three_megabytes() -> None:
    bundle = many_checks(25)
    assert len(bundle.plan.checks) > 1000
    assert len(render_html(build_view(bundle)).encode()) < 3_000_000


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_runs_the_filter_and_nothing_else(html: str, hostile: str, tmp_path: Path) -> None:
    assert "44 of 44 checks shown" in _Page(_rendered(html, tmp_path / "honest.html")).text
    page = _Page(_rendered(hostile, tmp_path / "hostile.html"))
    assert "44 of 44 checks shown" in page.text
    assert len(page.all("script")) == 1
    assert not page.all("img")


def _rendered(html: str, path: Path) -> str:
    """The document after its script ran."""
    path.write_text(html)
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000",
        "--dump-dom",
        f"--user-data-dir={path.parent / 'profile'}", f"file://{path}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
