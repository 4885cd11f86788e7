"""What looks like the `vllm` program: `serve` is `model_server.py`; `bench sweep serve` starts it, and leaves
a result for each load as vLLM's sweep does. `--fail` among the server's words: the sweep ends with 3.
"""

import json
import os
import runpy
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent


def option(name: str) -> str:
    """Value of `--name=value`."""
    return next(word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}="))


def sweep() -> int:
    """One server, every load."""
    words = shlex.split(option("serve-cmd"))
    if "--fail" in words:
        print("ValueError: no such load", flush=True)
        return 3
    port = words[words.index("--port") + 1]
    own = [word for word in words if word not in ("--host", "127.0.0.1", "--port", port)]
    server = subprocess.Popen([*own, f"--port={port}"], start_new_session=True)
    try:
        _wait(f"http://127.0.0.1:{port}/health")
        for name, load in json.loads(Path(option("bench-params")).read_text()).items():
            _complete(f"http://127.0.0.1:{port}/v1/completions", load["max_concurrency"])
            place = Path(option("output-dir")) / option("experiment-name") / f"BENCH--{name}"
            place.mkdir(parents=True)
            (place / "run=0.json").write_text(json.dumps(_result(load)))
            subprocess.run(shlex.split(option("after-bench-cmd")), check=True)
    finally:
        server.kill()
    return 0


def _result(load: dict[str, int]) -> dict[str, object]:
    count, tokens = load["num_prompts"], load["random_output_len"]
    itls = [[0.002] * (tokens - 1)] * count
    return {
        "completed": count, "failed": 0, "total_output_tokens": count * tokens, "itls": itls,
        "mean_ttft_ms": 3.0, "output_throughput": 9.0,
    }  # fmt: skip


def _complete(url: str, times: int) -> None:
    body = json.dumps({"model": "fake", "prompt": "one two", "max_tokens": 2}).encode()
    for _ in range(times):
        urllib.request.urlopen(urllib.request.Request(url, body), timeout=10).read()


def _wait(url: str) -> None:
    for _ in range(200):
        try:
            urllib.request.urlopen(url, timeout=1).read()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(url)


if __name__ == "__main__":
    if sys.argv[1:4] == ["bench", "sweep", "serve"]:
        sys.exit(sweep())
    os.chdir(HERE)
    runpy.run_path(str(HERE / "model_server.py"), run_name="__main__")
