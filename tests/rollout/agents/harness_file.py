"""A harness that does what its row says; tests name it by its path."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

LOADED_BY = os.getpid()


def ask(base_url, api_key, messages, **fields):
    """The answer of the policy."""
    return completion(base_url, api_key, messages, **fields)["choices"][0]["message"]


def completion(base_url, api_key, messages, **fields):
    """As OpenAI's clients ask for it."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps({"model": "m", "messages": messages, **fields}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def note(row, **what):
    """What the test reads."""
    with open(row["notes"], "a") as file:
        file.write(json.dumps(what) + "\n")


async def run(task, base_url, api_key):
    return DO[task["do"]](task, base_url, api_key)


def plain(task, base_url, api_key):
    return 0.25


async def hang(task, base_url, api_key):
    try:
        await asyncio.sleep(600)
    finally:
        note(task, cleaned=True)


async def wants_two(task, base_url):
    return 1.0


def stubborn(task, *_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(task, began=os.getpid())
    while True:
        time.sleep(1)


def forges(task, *_):
    """Writes a result of its own into whatever is open, as code that a policy wrote may, and ends."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, task["forged"].encode())
        except OSError:
            continue
    os._exit(0)


def crash(task, *_):
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(task, base_url, api_key):
    print("working with", api_key)
    raise KeyError(f"nothing of {api_key}")


def much_memory(task, *_):
    return float(len([bytearray(10**7) for _ in range(1000)]))


def flood(task, *_):
    for number in range(20_000):
        print(number, "x" * 500)
    return 1.0


def children(task, *_):
    """Leaves a process of its group, one of its own session and one whose parent has ended."""
    sleep = ["sleep", "600"]
    own = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    orphan = subprocess.run(
        ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, text=True
    )
    note(task, left=[*(one.pid for one in own), int(orphan.stdout)])
    if "wait" in task:
        time.sleep(600)
    return 1.0


def variables(task, base_url, api_key):
    names = (
        "OPENAI_BASE_URL",
        "OPENAI_API_KEY",
        "ANTHROPIC_BASE_URL",
        "ANTHROPIC_API_KEY",
        "SERVERS_KEY",
        "RANK",
    )
    note(task, **{name: os.environ.get(name) for name in names}, loaded_by=LOADED_BY, pid=os.getpid())
    note(task, task={name: value for name, value in task.items() if name != "notes"})


def turns(task, base_url, api_key):
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(task.get("turns", 2)):
        answer = ask(base_url, api_key, messages)
        messages += [answer, {"role": "user", "content": "go on"}]
    return {"reward": 0.5, "steps": task.get("turns", 2)}


def forks(task, base_url, api_key):
    for word in ("one", "two"):
        ask(base_url, api_key, [{"role": "user", "content": word}], temperature=0.3)


def scored(task, base_url, api_key):
    """Two conversations of a first answer and one or more behind it; rewards by the row."""
    user = {"role": "user", "content": "one"}
    ids = []
    for messages in ([user], [{"role": "user", "content": "two"}]):
        body = completion(base_url, api_key, messages)
        ids.append(body["id"])
        for _ in range(task.get("behind", 1)):
            ask(base_url, api_key, [*messages, body["choices"][0]["message"], user])
    return with_rewards(task, ids)


def choices(task, base_url, api_key):
    """Two requests of three choices each; rewards by the row."""
    requests = [[{"role": "user", "content": word}] for word in ("one", "two")]
    return with_rewards(task, [completion(base_url, api_key, one, n=3)["id"] for one in requests])


def with_rewards(task, ids):
    given = {
        name.replace("FIRST", ids[0]).replace("SECOND", ids[1]): one for name, one in task["rewards"].items()
    }
    return {"reward": 0.5, "rewards": given, "steps": 2}


def mixed(task, base_url, api_key):
    """Two turns, or two branches, by the row; nothing of it is scored."""
    if task["index"] % 2:
        return forks(task, base_url, api_key)
    turns(task, base_url, api_key)


def asks_for_ever(task, base_url, api_key):
    while True:
        try:
            ask(base_url, api_key, [{"role": "user", "content": "again"}])
        except urllib.error.HTTPError as error:
            note(task, status=error.code, body=error.read().decode())
            time.sleep(0.2)


def fork_returns(task, *_):
    """Both processes come back from the harness."""
    return 1.0 if os.fork() else 2.0


DO = {
    "number": lambda task, *_: 1.5,
    "none": lambda task, *_: None,
    "scored": scored,
    "dict": lambda task, *_: {"reward": 1, "steps": 3},
    "text": lambda task, *_: "good",
    "no reward": lambda task, *_: {"steps": 3},
    "nan": lambda task, *_: float("nan"),
    "huge": lambda task, *_: {"reward": 1.0} | {f"k{i}": 0.0 for i in range(10_000)},
    "exit": lambda task, *_: sys.exit(3),
    "end": lambda task, *_: os._exit(4),
    **{
        one.__name__: one
        for one in (
            stubborn,
            forges,
            crash,
            raises,
            much_memory,
            flood,
            children,
            variables,
            turns,
            forks,
            mixed,
            asks_for_ever,
            fork_returns,
            choices,
        )
    },
}
