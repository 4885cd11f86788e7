"""Real vLLM under the engine: runs where FASTTRACK_VLLM names its program and FASTTRACK_VLLM_MODEL a model.

On a machine without a GPU a build of vLLM for processors serves SmolLM2 or a tiny random Llama; a start takes
half a minute on two idle cores.
"""

import json
import os
import re
from contextlib import closing
from pathlib import Path

import pytest

from harness.engines.served import ServedArm, ServerSettings
from harness.engines.serving import Ask
from harness.engines.vllm_server import VllmServer

PROGRAM, MODEL = os.environ.get("FASTTRACK_VLLM"), os.environ.get("FASTTRACK_VLLM_MODEL")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not PROGRAM or not MODEL, reason="FASTTRACK_VLLM and FASTTRACK_VLLM_MODEL name no vLLM and no model"
    ),
]
SCHEMA = (
    '{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], '
    '"additionalProperties": false}'
)


def test_a_real_server_answers_is_observed_and_is_gone_afterwards(tmp_path: Path) -> None:
    settings = ServerSettings(
        model=str(MODEL), served_name="served", program=(str(PROGRAM),), start_limit_s=1500,
        common=("--max-model-len=1024", "--max-num-seqs=8"),
        environment=(("HF_HUB_OFFLINE", "1"), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("OMP_NUM_THREADS", "1")),
        optimised=ServedArm(arguments=("--enforce-eager",)), observed=(("eager", "True"),), has_profiler=True,
    )  # fmt: skip
    asks = [
        *(Ask(item=f"q{n}", text=f"The number {n} is", max_tokens=12) for n in range(3)),
        Ask(item="json", text="Answer:", max_tokens=40, temperature=1, seed=1, answer_schema=SCHEMA),
    ]
    with closing(VllmServer(settings, tmp_path / "logs", tmp_path / "scratch")) as engine:
        with engine.open("optimised") as server:
            replies = server.answer(asks)
            ledger, counters = server.ledger(), server.counters()
            tokens = server.tokens_of("The number 1 is")
            stated = server.stated([asks[1].model_copy(update={"tokens": tokens})], [replies[1]])
        facts = dict(engine.description("optimised"))
    assert [reply.finish in ("stop", "length") for reply in replies] == [True] * 4
    assert json.loads(replies[3].text) in ({"a": "x"}, {"a": "y"})
    assert counters["generated_tokens"] == sum(len(reply.tokens) for reply in replies)
    assert max(kind.requests for kind in ledger if kind.phase == "decode") >= 2
    assert {kind.path for kind in ledger} == {"optimised"}
    assert len(stated[0]) == len(replies[1].tokens)
    assert facts["observer"].startswith("on, vLLM 0.3")
    assert facts["observed.eager"] == "True"
    assert re.fullmatch(
        r"12 tokens, (\d+ operators of the CPU, no device kernel|\d+ launches .*)", facts["profile"]
    )
