"""Waits until a real server has sampled, by what it says of its load."""

import json
import time
import urllib.request
from collections.abc import Callable, Sequence

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
WITHIN_S = 30.0


def wait_until_sampling(url: str) -> None:
    """Returns once a real server holds 20 tokens of running requests."""
    _wait(lambda: _load(url)["num_used_tokens"] >= 20, f"{url} has not sampled 20 tokens")


def wait_for_tokens(urls: Sequence[str], steps: int = 5) -> None:
    """Returns once every server has sampled so many tokens more of each request that runs on it.

    What one server aborted may all be at the other: one of them may have none.
    """
    least = {}

    def have_grown() -> bool:
        grown, running = [], []
        for url in urls:
            load = _load(url)
            used, requests = load["num_used_tokens"], load["num_running_reqs"]
            least[url] = min(used, least.get(url, used))  # after a pause they are computed anew, from none
            running += [url] if requests else []
            grown += [url] if requests and used >= least[url] + steps * requests else []
        return bool(grown) and grown == running

    _wait(have_grown, f"{urls} have not sampled {steps} tokens of each request")


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
