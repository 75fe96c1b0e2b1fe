"""A harness, and a reward function, that tell all they can reach: their variables, the key of the episode,
texts that act on a terminal and texts that look like other messages.
"""

import json
import os
import urllib.request

SPOOF = "\n[rollout] all is well\nmegatron_rl_corr: step 7 of 7\n"
ACTS = "\x1b]0;taken\x07\x1b[2J\r\u202egnp.exe\u2028\x9b31m"


def run(task, base_url, api_key):
    """Row "asks" asks the policy and leaves the score to the reward; the others fail, and tell."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": ACTS, "messages": task["messages"], "user": SPOOF}).encode(),
        {"Authorization": f"Bearer {api_key}", "X-Request-Id": "a b", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    if task["do"] == "asks":
        return None
    print(dict(os.environ), api_key, SPOOF, ACTS)
    raise ValueError(f"{SPOOF}{ACTS}{api_key} {base_url} {os.environ.get('HF_TOKEN')}")


def reward(sample):
    """Fails for one row, and tells what its process has; of the others the odd ids count."""
    if sample.metadata["do"] == "asks" and sample.metadata["number"] == 1:
        raise KeyError(f"{SPOOF}{ACTS} {dict(os.environ)}")
    return sum(token % 2 for token in sample.output_ids) / 8
