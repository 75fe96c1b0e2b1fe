"""A harness with a tool, by Python alone, as a user writes one; it notes what it was given in a file.

A row has `question`, `notes` (the file), `turns` (requests of an episode), `compacts` (the history is
summarised before the last of them) and `pause_s` (what a tool takes).
"""

import json
import os
import random
import time
import urllib.error
import urllib.request
import uuid

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
TOO_LONG = "context_length_exceeded"


def run(task, base_url, api_key):
    """One episode; its reward, by which the test finds its samples."""
    name = uuid.uuid4().hex
    reward = random.SystemRandom().randrange(1 << 24) / (1 << 24)  # exact in float32

    def note(**what):
        line = json.dumps({"episode": name, "row": task["index"], **what}) + "\n"
        file = os.open(task["notes"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

    note(pid=os.getpid(), url=base_url)
    question = {"role": "user", "content": task["question"]}
    messages = [question]
    for turn in range(task["turns"]):
        if task["compacts"] and turn == task["turns"] - 1:
            messages = [question, {"role": "user", "content": f"so far {turn} answers"}]
        try:
            answer, tokens = ask(base_url, api_key, messages)
        except urllib.error.HTTPError as error:
            if TOO_LONG not in (said := error.read().decode()):
                raise ValueError(said) from None
            note(refused=said)
            break
        note(answer=tokens, calls=len(answer.get("tool_calls") or []))
        time.sleep(task["pause_s"])
        messages += [answer, *next_messages(answer)]
    note(reward=reward)
    return {"reward": reward, "turns": turn + 1}


def ask(base_url, api_key, messages):
    """(the answer, [(text, log-prob) of its tokens])."""
    body = {"model": "policy", "messages": messages, "tools": [TOOL], "logprobs": True}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as got:
        choice = json.loads(got.read())["choices"][0]
    tokens = [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]]
    return choice["message"], tokens


def next_messages(answer):
    """What the tool says of each call; the user's word where nothing is called."""
    found = []
    for call in answer.get("tool_calls") or []:
        try:
            given = json.loads(call["function"]["arguments"])
            said = str(given["a"] + given["b"])
        except (KeyError, TypeError, ValueError):
            said = "a and b must be numbers"
        found.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    return found or [{"role": "user", "content": "go on"}]
