"""Time one cell: four sessions on the same work, in ABBA blocks.

Arms: `stock`, `optimised`, `null` (stock again, for the noise floor) and `slow` (stock with a known delay,
the control). Tables: `timings` (arm, block, us), `steps` (ledger totals by arm), and those of `likeness`.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from harness.domain.check import Check, Outcome, Samples, SampleTable
from harness.domain.pack import Session, SessionRequest
from harness.domain.stage import StageContext
from harness.executors.marks import Marks
from harness.measure.interleaved import TimedUnit, cpu_unit
from harness.measure.known_times import KnownTime, known_cpu_times, spin
from harness.stages.sweep.judging import judge
from harness.stages.sweep.layers import sample_layers
from harness.stages.sweep.likeness import PROMPT_TOKENS, WARM_STEPS, expert_rows, marked, prefix_rows
from harness.stages.sweep.stopping import time_blocks
from harness.stages.sweep.tables import ARMS

__all__ = ["run", "sample", "slowed_step", "step_of"]

DISTINCT_PROMPTS = 4
"""Requests of a cell share this many prompts: a step's time depends on lengths and the tokens' experts, and
every request decodes a token of its own."""


def run(check: Check, context: StageContext) -> Outcome:
    """`sample` and `judge` in sequence, with this process's clock as the one outside."""
    marks = Marks()
    return judge(check, marks.attach(sample(check, replace(context, mark=marks.add))))


def sample(check: Check, context: StageContext) -> Samples:
    """Samples of one cell."""
    if dict(check.parameters).get("kind") is not None:
        return sample_layers(check, context)
    steps: Counter[tuple[str, str, str]] = Counter()
    known = known_cpu_times(cpu_unit)
    with ExitStack() as stack:
        sessions = {arm: _opened(check, context, arm, steps, stack) for arm in ARMS}
        work = {arm: _step_work(check, context, arm, session) for arm, session in sessions.items()}
        units: dict[str, TimedUnit] = {arm: cpu_unit(step) for arm, step in work.items() if arm != "slow"}
        units["slow"] = cpu_unit(slowed_step(work["slow"], check.number("planted_slowdown")))
        units = {arm: marked(arm, unit, context.mark) for arm, unit in units.items()}
        rows = time_blocks(check, units)
        prefixes = prefix_rows(sessions, partial(_control_session, check, context), _control_prompt(sessions))
        experts = tuple(expert_rows(sessions))
    return Samples(
        check=check.id,
        tier=context.tier,
        tables=(
            SampleTable(name="timings", columns=("arm", "block", "us"), rows=rows),
            SampleTable(
                name="steps",
                columns=("arm", "phase", "path", "tokens"),
                rows=tuple((*key, count) for key, count in sorted(steps.items())),
            ),
            SampleTable(name="prefixes", columns=("arm", "queries", "hits", "reused_tokens"), rows=prefixes),
            SampleTable(name="experts", columns=("arm", "experts", "expert", "rows"), rows=experts),
            SampleTable(name="known", columns=KnownTime._fields, rows=known),
        ),
    )


def _opened(
    check: Check, context: StageContext, arm: str, steps: Counter[tuple[str, str, str]], stack: ExitStack
) -> Session:
    """An arm's own session."""
    from harness.engines.in_process import open_session

    def observe(d: Any) -> None:
        steps[(arm, d.phase, d.path)] += d.tokens

    request = _request(check, "optimised" if arm == "optimised" else "stock")
    return stack.enter_context(open_session(context.pack, request, observe))


def _request(check: Check, arm: str, **more: int) -> SessionRequest:
    cell = check.cell
    if cell is None:
        raise AssertionError(f"{check.id} was planned without a cell")
    units = int(check.number("blocks")) + WARM_STEPS
    implementation = check.parameter("implementation")
    is_gpu = implementation == "cute"
    return SessionRequest.model_validate(
        {
            "model": check.parameter("model"), "arm": arm, "implementation": implementation,
            "max_requests": cell.batch, "max_context": cell.context + units + cell.drafts + 8, "tp": cell.tp,
            "drafts": cell.drafts, "kv_dtype": cell.kv_dtype, "is_graph": is_gpu,
            "seed": check.parameter("seed"), **more,
        }
    )  # fmt: skip


def _control_session(check: Check, context: StageContext) -> Session:
    """A session that keeps prefixes, for the control of its counters."""
    request = _request(check, "stock", kept_prefixes=2, max_requests=1, max_context=2 * PROMPT_TOKENS)
    return context.pack.open_session(request, None)


def _control_prompt(sessions: Mapping[str, Session]) -> Sequence[int]:
    from harness.engines.in_process import random_texts

    prompt: Sequence[int] = random_texts(sessions["stock"].vocab_size, 1, PROMPT_TOKENS, 1)[0]
    return prompt


def _step_work(check: Check, context: StageContext, arm: str, session: Session) -> Callable[[], object]:
    """One step of a session, after a prefill to the cell's context; one token a request is kept. It is done
    when the device is: a step that is only launched has taken no time yet.
    """
    from harness.engines.in_process import finished, random_texts

    cell = check.cell
    if cell is None:
        raise AssertionError(f"{check.id} was planned without a cell")
    context.progress(f"{check.id}: {arm} arm")
    seed = int(check.parameter("seed") or 0)
    prompts = random_texts(session.vocab_size, min(cell.batch, DISTINCT_PROMPTS), cell.context - 1, seed)
    requests, _ = session.prefill([prompts[i % len(prompts)] for i in range(cell.batch)])
    rows = random_texts(session.vocab_size, cell.batch, cell.drafts + 1, seed + 1)
    if cell.drafts:
        return lambda: finished(session.verify(requests, rows, [1] * cell.batch))
    tokens = [row[0] for row in rows]
    return lambda: finished(session.decode(requests, tokens))


def step_of(check: Check, context: StageContext, arm: str, stack: ExitStack) -> Callable[[], object]:
    """One decode step of a session of its own, which the stack closes."""
    return _step_work(check, context, arm, _opened(check, context, arm, Counter(), stack))


def slowed_step(step: Callable[[], object], share: float) -> Callable[[], object]:
    """The step and a busy wait as long as a share of it."""
    spent = []
    for _ in range(WARM_STEPS):
        begun = time.perf_counter()
        step()
        spent.append(time.perf_counter() - begun)
    delay_s = min(spent) * share

    def slowed() -> None:
        step()
        spin(delay_s)

    return slowed
