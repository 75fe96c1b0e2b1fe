"""Waits until a real server has sampled, by what it says of its load."""

import functools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
WITHIN_S = 30.0


def wait_until_sampling(url: str, requests: int = 1) -> None:
    """Returns once a real server holds 20 tokens of running requests, and so many requests, some
    of which may wait.
    """
    before = None

    def has_sampled() -> bool:
        nonlocal before
        if not has_loads(url):
            running, tokens, waiting = _vllm_load(url)
            before = tokens if before is None else before
            return running > 0 and tokens >= before + 20 and running + waiting >= requests
        load = _load(url)
        return (
            load["num_used_tokens"] >= 20 and load["num_running_reqs"] + load["num_waiting_reqs"] >= requests
        )

    _wait(has_sampled, f"{url} has not sampled 20 tokens")


def wait_for_tokens(urls: Sequence[str], steps: int = 5) -> None:
    """Returns once every server has sampled so many tokens more of each request that runs on it.

    What one server aborted may all be at the other: one of them may have none.
    """
    least = {}

    def have_grown() -> bool:
        grown, running = [], []
        for url in urls:
            if has_loads(url):
                load = _load(url)
                used, requests = load["num_used_tokens"], load["num_running_reqs"]
            else:
                requests, used, _ = _vllm_load(url)
            least[url] = min(used, least.get(url, used))  # after a pause they are computed anew, from none
            running += [url] if requests else []
            grown += [url] if requests and used >= least[url] + steps * requests else []
        return bool(grown) and grown == running

    _wait(have_grown, f"{urls} have not sampled {steps} tokens of each request")


@functools.cache
def has_loads(url: str) -> bool:
    """SGLang tells its load at /v1/loads; vLLM tells of tokens among its metrics."""
    try:
        _load(url)
    except urllib.error.HTTPError:
        return False
    return True


def _vllm_load(url: str) -> tuple[float, float, float]:
    """(running requests, tokens sampled so far, requests that wait)."""
    with OPENER.open(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return tuple(
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))
        for name in ("num_requests_running", "generation_tokens_total", "num_requests_waiting")
    )


def _load(url: str) -> dict:
    with OPENER.open(f"{url}/v1/loads", timeout=10) as answer:
        return json.load(answer)["loads"][0]


def _wait(is_so: Callable[[], bool], else_what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if is_so():
            return
        time.sleep(0.02)
    raise TimeoutError(f"{else_what} in {WITHIN_S:g} s")
