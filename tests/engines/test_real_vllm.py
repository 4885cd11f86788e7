"""Real vLLM under the engine: runs where FASTTRACK_VLLM names its program and FASTTRACK_VLLM_MODEL a model.

On a machine without a GPU a build of vLLM for processors serves SmolLM2 or a tiny random Llama; a start takes
half a minute on two idle cores.
"""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.engines.served import ServedArm, ServerSettings
from harness.engines.serving import Ask
from harness.engines.vllm_server import ServerArm, VllmServer

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


def settings(model: str = str(MODEL), *common: str, **changed: Any) -> ServerSettings:
    """A small server of the real thing, and the optimised arm told apart by its seed alone."""
    told: dict[str, Any] = {
        "model": model, "served_name": "served", "program": (str(PROGRAM),), "start_limit_s": 1500,
        "common": ("--max-model-len=512", "--max-num-seqs=4", "--enforce-eager", *common),
        "environment": (
            ("HF_HUB_OFFLINE", "1"), ("VLLM_CPU_KVCACHE_SPACE", changed.pop("kv_space", "1")),
            ("OMP_NUM_THREADS", "1"),
        ),
        "optimised": ServedArm(arguments=("--seed=0",)),
    }  # fmt: skip
    return ServerSettings.model_validate(told | changed)


@contextmanager
def opened(folder: Path, given: ServerSettings) -> Iterator[tuple[VllmServer, ServerArm]]:
    engine = VllmServer(given, folder / "logs", folder / "scratch")
    with closing(engine), engine.open("optimised") as server:
        yield engine, server


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (settings("/no/such/model"), "it does not find the model"),
        (settings(str(MODEL), kv_space="100000"), "it ran out of memory"),
        (settings(str(MODEL), "--no-such-option"), "it does not know one of its arguments"),
        (settings(str(MODEL), "--api-key=sesame"), "wants a key (401)"),
        (settings(start_limit_s=2), "was not ready within 2 s"),
    ],
    ids=["no model", "memory", "argument", "key", "slow"],
)
def test_a_real_server_that_does_not_come_up_says_why(
    tmp_path: Path, given: ServerSettings, words: str
) -> None:
    with opened(tmp_path, given) as (_, server):
        assert words in server.failure


def test_a_real_engine_that_is_killed_loses_its_answers_and_says_so(tmp_path: Path) -> None:
    with opened(tmp_path, settings()) as (_, server):
        assert server.answer([Ask(item="a", text="The number is", max_tokens=4)])[0].finish == "length"
        threading.Timer(0.5, kill_engine, [server]).start()
        (reply,) = server.answer([Ask(item="b", text="The number is", max_tokens=500)])
        (later,) = server.answer([Ask(item="c", text="The number is", max_tokens=4)])
    assert reply.finish == later.finish == "transport"
    assert "died in mid-run" in later.detail


def test_a_real_server_with_drafts_is_read_for_its_acceptance(tmp_path: Path) -> None:
    drafts = {"model": MODEL, "method": "draft_model", "num_speculative_tokens": 3}
    given = settings(
        str(MODEL), f"--speculative-config={json.dumps(drafts)}",
        acceptance={"label": "measured", "drafts": 3},
    )  # fmt: skip
    asks = [Ask(item=f"q{n}", text=f"The number {n} is", max_tokens=120) for n in range(4)]
    with opened(tmp_path, given) as (engine, server):
        replies = server.answer(asks)
        counters = server.counters()
    assert [len(reply.tokens) for reply in replies] == [120] * 4
    assert counters["drafted"] == 3 * counters["draft_steps"] > 0
    told = dict(engine.description("optimised"))
    assert told["speculation"] == "draft_model, 3 drafts, greedy drafting, standard rejection"
    assert re.fullmatch(r"(3\.\d{3}|4\.000) \(measured\)", told["acceptance_length"])  # it drafts for itself


def kill_engine(server: ServerArm) -> None:
    """The engine's own process, of this server's group; the server before it stays."""
    assert server._process is not None
    group = server._process._process.pid
    command = ("pgrep", "-g", str(group), "-f", "VLLM::EngineCor")
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    for process in found:
        os.kill(int(process), signal.SIGKILL)


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
