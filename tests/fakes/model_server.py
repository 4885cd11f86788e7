"""What looks like vLLM's OpenAI-compatible server, as a program: `serve MODEL --port=N [--behave=WAY]...`.

It answers with the words of the prompt in turn, one token a word. Ways to misbehave: see `WAYS`.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

WAYS = (
    "late", "never", "out_of_memory", "killed", "port_taken", "no_model", "bad_argument", "crash",
    "other_model", "other_root", "answers_as_other", "other_tokens", "key", "warm", "garbage", "refuse",
    "nan", "slow", "bad_trace", "cpu_only",
    "drip", "no_tokens", "deep", "no_models", "infinite", "strayed",
)  # fmt: skip
LAST_WORDS = {
    "out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "port_taken": "OSError: [Errno 98] Address already in use",
    "no_model": "OSError: /no/such/model does not exist",
    "bad_argument": "vllm serve: error: unrecognized arguments: --bogus",
}
KEY = "open sesame"
RUNNING = "vllm:num_requests_running"


def option(name: str, default: str) -> str:
    """Value of `--name=value`, the last one given."""
    found = [word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}=")]
    return found[-1] if found else default


def trace_events() -> list[dict[str, Any]]:
    """As torch's profiler writes them."""
    events: list[dict[str, Any]] = [{"cat": "cpu_op", "name": "aten::mm", "dur": 9}]
    if "cpu_only" in ways_asked():
        return events
    launched = ["marlin", "marlin", *(["k3_experts"] if option("switch", "") == "on" else [])]
    return events + [{"cat": "kernel", "name": name, "dur": 2.5} for name in launched]


def prompt_row(token: int) -> dict[str, dict[str, float]]:
    """As vLLM tells a place of a prompt: the two likeliest tokens, and the one that stands there."""
    return {str(token): {"logprob": -9.0}, "7": {"logprob": -1.0}, "8": {"logprob": -2.0}}


def ways_asked() -> tuple[str, ...]:
    """Ways to misbehave."""
    return tuple(word.partition("=")[2] for word in sys.argv if word.startswith("--behave="))


class Fake(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.0"
    ways: tuple[str, ...] = ()
    model, folder, traces = "", "", ""
    begun = 0.0
    counts: ClassVar[dict[str, int]] = dict.fromkeys(
        ("prompt", "generated", "queries", "hits", "running", "asked"), 0
    )
    lock = threading.Lock()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        age = time.monotonic() - self.begun
        if self.path == "/health":
            is_up = not ("never" in self.ways or ("late" in self.ways and age < 0.6))
            self._say(200 if is_up else 503, "")
        elif self._lacks_key():
            return
        elif self.path == "/v1/models":
            name = "someone-else" if "other_model" in self.ways else self.model
            root = "/another/folder" if "other_root" in self.ways else self.folder
            listed: list[object] = [{"id": name, "root": root, "max_model_len": 128}]
            self._say(200, json.dumps({"data": [["m"]] if "no_models" in self.ways else listed}))
        elif self.path == "/version":
            self._say(200, json.dumps({"version": "0.32.0"}))
        elif self.path == "/metrics":
            self._say(200, self._metrics())
        else:
            self._say(404, "no such path")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self._lacks_key():
            return
        if self.path == "/tokenize":
            shift = 1 if "other_tokens" in self.ways else 0
            tokens = {"tokens": [ord(c) + shift for c in body["prompt"]]}
            self._say(200, json.dumps({} if "no_tokens" in self.ways else tokens))
        elif self.path in ("/v1/completions", "/v1/chat/completions"):
            self._complete(body, is_chat="chat" in self.path)
        elif self.path in ("/start_profile", "/stop_profile") and self.traces:
            if self.path == "/stop_profile":
                self._leave_trace()
            self._say(200, "")
        else:
            self._say(404, "no such path")

    def _leave_trace(self) -> None:
        """Two launches of a kernel that every server has, and one of the switch's."""
        text = "no trace" if "bad_trace" in self.ways else json.dumps({"traceEvents": trace_events()})
        (Path(self.traces) / f"rank0.{time.time_ns()}.pt.trace.json").write_text(text)

    def _complete(self, body: dict[str, Any], *, is_chat: bool) -> None:
        with self.lock:
            self.counts["running"] += 1
            self.counts["asked"] += 1
            asked = self.counts["asked"]
        if "crash" in self.ways and asked >= 2:
            print("CUDA error: an illegal memory access was encountered", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(0.3 if "slow" in self.ways else 0.0)
        if "refuse" in self.ways:
            self._say(400, "This model's maximum context length is 128 tokens")
        elif "garbage" in self.ways:
            self._say(200, "<html>")
        elif "deep" in self.ways:
            self._say(200, '{"model": ' + "[" * 200_000)
        elif "drip" in self.ways:
            self._drip()
        else:
            self._answer(body, is_chat)
        with self.lock:
            self.counts["running"] -= 1

    def _drip(self) -> None:
        """A byte now and then, for ever."""
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        while True:
            time.sleep(0.1)
            self.wfile.write(b" ")

    def _answer(self, body: dict[str, Any], is_chat: bool) -> None:
        text = body["messages"][-1]["content"] if is_chat else body["prompt"]
        words = [str(t) for t in text] if isinstance(text, list) else text.split()
        said = [f" {word}" for word in words[: body["max_tokens"]]]
        ids = [len(word) for word in said]
        value = float("nan") if "nan" in self.ways else -0.25
        finish = "length" if len(said) == body["max_tokens"] else "stop"
        with self.lock:
            self.counts["prompt"] += len(words)
            self.counts["generated"] += len(said)
            self.counts["queries"] += len(words)
        choice: dict[str, Any] = {"finish_reason": finish, "token_ids": ids}
        if is_chat:
            choice["message"] = {"content": "".join(said)}
            rows = [
                {
                    "token": f"token_id:{t}",
                    "logprob": value,
                    "top_logprobs": [{"token": "token_id:0", "logprob": -3.0}],
                }
                for t in ids
            ]
            choice["logprobs"] = {"content": rows}
        else:
            choice["text"] = "".join(said)
            choice["logprobs"] = {
                "tokens": [f"token_id:{t}" for t in ids],
                "token_logprobs": [value] * len(ids),
                "top_logprobs": [{f"token_id:{t}": value, "token_id:0": -3.0} for t in ids],
            }
        if body.get("prompt_logprobs") and isinstance(text, list):
            choice["prompt_logprobs"] = [None, *(prompt_row(token) for token in text[1:])]
        name = "someone-else" if "answers_as_other" in self.ways else body["model"]
        usage = {"prompt_tokens": len(words), "completion_tokens": len(ids)}
        self._say(200, json.dumps({"id": "cmpl-1", "model": name, "choices": [choice], "usage": usage}))

    def _metrics(self) -> str:
        warm = 100 if "warm" in self.ways else 0
        counts = self.counts
        if "infinite" in self.ways:
            return f"{RUNNING} inf\nvllm:prompt_tokens_total nan\nvllm:generation_tokens_total +Inf\n"
        return (
            f'vllm:num_requests_running{{engine="0"}} {counts["running"]}.0\n'
            f'vllm:prompt_tokens_total{{engine="0"}} {counts["prompt"]}.0\n'
            f'vllm:generation_tokens_total{{engine="0"}} {counts["generated"]}.0\n'
            f'vllm:prefix_cache_queries_total{{engine="0"}} {counts["queries"] + warm}.0\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {counts["queries"] if warm else 0}.0\n'
            'vllm:e2e_request_latency_seconds_bucket{le="0.3"} 3.0\n'
        )

    def _lacks_key(self) -> bool:
        if "key" in self.ways and self.headers.get("Authorization") != f"Bearer {KEY}":
            self._say(401, '{"error": "Unauthorized"}')
            return True
        return False

    def _say(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Serve until ended."""
    ways = ways_asked()
    print(f"fake server, {ways or 'well behaved'}", flush=True)
    if sys.argv[1] != "serve":
        sys.exit(1)
    for way in ways:
        if way in LAST_WORDS:
            print(LAST_WORDS[way], flush=True)
            sys.exit(1)
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    Fake.ways, Fake.begun = ways, time.monotonic()
    if "strayed" in ways:
        stray = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(f"strayed {stray.pid}", flush=True)
    Fake.traces = json.loads(option("profiler-config", "{}")).get("torch_profiler_dir", "")
    Fake.folder, Fake.model = sys.argv[2], option("served-model-name", "m")
    ThreadingHTTPServer((option("host", "127.0.0.1"), int(option("port", "0"))), Fake).serve_forever()


if __name__ == "__main__":
    main()
