"""An agent of benchmarks/agents.py in a process of its own: some turns, the whole conversation each time."""

import http.client
import json
from urllib.parse import urlsplit


def run(task, base_url, api_key):
    """Ends as the environment beside it: after task["turns"] turns, or with an answer that was cut."""
    address = urlsplit(base_url)
    gateway = http.client.HTTPConnection(address.hostname, address.port)
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    messages = list(task["messages"])
    for _ in range(task["turns"]):
        body = json.dumps({"model": "policy", "messages": messages})
        gateway.request("POST", f"{address.path}/chat/completions", body, headers)
        answer = gateway.getresponse()
        told = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {told}")
        choice = told["choices"][0]
        if choice["finish_reason"] != "stop":
            break
        messages += [{"role": "assistant", "content": choice["message"]["content"]}]
        messages += [{"role": "user", "content": task["reply"]}]
    gateway.close()
    return 1.0
