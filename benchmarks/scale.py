"""What a push of weights and a batch's way to its ranks cost with thousands of ranks, counted on this
package's own code.

python benchmarks/scale.py [--users U1 U2 U3] [--beside FOLDER ...]

Each user is a published model, a layout of training ranks and a number of servers. One process plays one
rank of the job (benchmarks/fake_rank.py): the first rank, the senders of a middle and of the last stage, and
a rank that sends nothing. What they ask of process groups and servers is counted; the rest of the job
follows from it, as all middle stages are alike. Seconds are those counts over what is stated: one network
card for each GPU, a sender that sends through one, a core for each process that announces buckets, servers
that take what comes, and the processor's time of a request and of converting names, both measured here. Not
counted: a server's own time to load, to hash and to answer, and what a run does once, as making the
groups, and the launches of a sender's operations on its GPU.

--beside names folders with other versions of this package, whose counts go into the same table.

A second table has `--rollout-push delta`, from the same counts by the law that
tests/weight_sync/test_changes_real_server.py holds on real servers: 6 bytes for each changed value, made
before the pause, in as many buckets as they fill, and one more of each stage.

Two more have a batch, from the leaders' samples with their routed experts (R3) to the ranks
(benchmarks/scale_batch_worker.py), and what a correction and its metrics exchange. Samples have lengths by
a lognormal law around half of the longest; those of a large user are played a part as long, and bytes and
seconds multiplied, as they are linear in tokens.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.quiet import only_tables  # noqa: E402
from megatron_rl_corr.weight_sync.export import default_bucket_mib  # noqa: E402

WORKER = ROOT / "benchmarks/scale_worker.py"
BATCH_WORKER = ROOT / "benchmarks/scale_batch_worker.py"
USERS = {
    "U1": {
        "model": "QWEN3_30B_A3B",
        "parallel": {"world": 64, "tensor": 2, "pipeline": 1, "context": 1, "expert": 8},
        "servers": 16,
        "gpus": 4,
        "elements": 30_532_122_624,
        "samples": 64,
        "tokens": 8192,
    },
    "U2": {
        "model": "QWEN3_235B_A22B",
        "parallel": {"world": 512, "tensor": 4, "pipeline": 4, "context": 2, "expert": 32},
        "servers": 64,
        "gpus": 8,
        "elements": 235_093_634_560,
        "samples": 256,
        "tokens": 32768,
    },
    "DeepSeek-V3": {
        "model": "DEEPSEEK_V3",
        "parallel": {"world": 1024, "tensor": 4, "pipeline": 8, "context": 2, "expert": 64},
        "servers": 128,
        "gpus": 16,
        "elements": 671_026_419_200,
        "samples": 256,
        "tokens": 32768,
    },
    "U3": {
        "model": "KIMI_K2",
        "parallel": {"world": 2048, "tensor": 4, "pipeline": 16, "context": 2, "expert": 64},
        "servers": 256,
        "gpus": 16,
        "elements": 1_026_408_232_448,
        "samples": 256,
        "tokens": 65536,
    },
}
"""Training ranks and servers; a server has so many GPUs. Samples of a replica, and the longest one's
tokens.
"""
PLAYED_TOKENS = 8192
"""Of the longest sample that is played, of users with 256 samples; of others, as many as they have."""
GBITS = (400, 100, 25)
"""Speeds of one network card."""
SHARES = (0.005, 0.02)
"""Changed values of all, in a push of changes."""
PLACE_BYTES, VALUE_BYTES = 4, 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", nargs="+", choices=USERS, default=list(USERS))
    parser.add_argument(
        "--beside", nargs="*", type=Path, default=[], help="folders that hold another megatron_rl_corr"
    )
    options = parser.parse_args()
    columns = ["user", "package", "training ranks", "servers", "GB", "buckets", "requests"]
    columns += ["sender holds MiB", "other ranks MiB", "CPU ms a request", "processes"]
    columns += ["CPU ms of the sender a bucket", "sender's interpreter s"]
    columns += [f"paused s at {speed} Gb/s" for speed in GBITS]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    pushes = {}
    for user in options.users:
        for folder in [*options.beside, ROOT]:
            pushes[user] = counted_push(USERS[user], folder)
            name = "this" if folder == ROOT else folder.name
            cells = [user, name, USERS[user]["parallel"]["world"], USERS[user]["servers"], *row(pushes[user])]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print_changes(pushes)
    print_batches(options.users, [*options.beside, ROOT])


def print_changes(pushes: dict[str, dict]) -> None:
    """The table of pushes of changes."""
    columns = ["user", "values that changed", "GB", "requests"]
    columns += [f"paused s at {speed} Gb/s" for speed in GBITS]
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    for user, push in pushes.items():
        for share in SHARES:
            changes = push_of_changes(push, USERS[user], share)
            cells = [user, f"{share:.1%}", f"{changes['bytes'] / 1e9:.1f}", f"{changes['requests']:,}"]
            cells += [f"{paused_s(changes, speed):.1f}" for speed in GBITS]
            print("| " + " | ".join(cells) + " |", flush=True)


def print_batches(users: list[str], folders: list[Path]) -> None:
    """The table of a batch's way, and that of what a correction exchanges."""
    columns = [
        "user",
        "package",
        "rank",
        "samples that moved",
        "GB sent in dealing",
        "GB sent to the replica",
    ]
    columns += ["MB of the batch received", "MB of routes received", "holds MiB", "keeps MiB", "CPU s"]
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    corrections = {}
    for user in users:
        for folder in folders:
            name = "this" if folder == ROOT else folder.name
            for role, found in counted_batch(USERS[user], folder).items():
                cells = [user, name, role, *batch_row(found)]
                print("| " + " | ".join(cells) + " |", flush=True)
                corrections[user] = found["correction"]
    columns = ["user", "metrics", "all-reduces over context", "bytes", "over data x context", "bytes"]
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    for user, found in corrections.items():
        for one in found.values():
            groups = [one["groups"].get(f"all-reduce over {name}") for name in ("context", "data x context")]
            cells = [user, f"{one['metrics']:,}"]
            cells += [f"{group[of]:,}" if group else "0" for group in groups for of in ("calls", "bytes")]
            print("| " + " | ".join(cells) + " |", flush=True)


def batch_row(found: dict) -> list[str]:
    """The cells of a rank's batch."""
    leads = found["is_leader"]
    dealt, replica = sent_bytes(found)
    return [
        f"{found['samples_moved']:.1%}" if leads else "",
        f"{dealt / 1e9:.2f}" if leads else "",
        f"{replica / 1e9:.2f}" if leads else "",
        "" if leads else f"{received_bytes(found['without_routes']) / 1e6:,.1f}",
        ""
        if leads
        else f"{(received_bytes(found['groups']) - received_bytes(found['without_routes'])) / 1e6:,.0f}",
        f"{found['held'] / 2**20:,.0f}",
        f"{found['kept'] / 2**20:,.0f}",
        f"{found['interpreter_s']:.1f}" if leads else "",
    ]


def sent_bytes(found: dict) -> tuple[int, int]:
    """Bytes that a leader sends (to other leaders, to its replica)."""
    dealt = found["groups"].get("send over data x context", {"sent": 0})["sent"]
    others = ("stage of a replica", "stages", "tensor", "world")
    return dealt, sum(
        one["sent"]
        for name, one in found["groups"].items()
        if name.split(" over ")[1] in others and not name.startswith("all-reduce")
    )


def received_bytes(groups: dict[str, dict[str, int]]) -> int:
    """Bytes of the batch that come to a rank."""
    return sum(
        one["received"]
        for name, one in groups.items()
        if not name.startswith(("all-reduce", "all-gather")) and "data x context" not in name
    )


def counted_batch(user: dict, package: Path) -> dict[str, dict]:
    """What a batch asks of the leader and of ranks of other stages, by role, in the job's own size."""
    stages = user["parallel"]["pipeline"]
    stage_ranks = user["parallel"]["world"] // stages
    played = {"leader": 0}
    if stages > 2:
        played["middle stage"] = stage_ranks
    played["last stage" if stages > 1 else "tensor rank 1"] = (stages - 1) * stage_ranks + (stages == 1)
    return {role: counted_slices(user, rank, package) for role, rank in played.items()}


def counted_slices(user: dict, rank: int, package: Path) -> dict:
    """What a batch asks of one rank, in the job's own size."""
    part = 1 if user["samples"] < 256 else user["tokens"] // PLAYED_TOKENS
    found = counted_rank(user | {"tokens": user["tokens"] // part}, rank, package, BATCH_WORKER)
    for groups in (found["groups"], found["without_routes"]):
        for one in groups.values():
            one |= {name: value * part for name, value in one.items() if name != "calls"}
    return found | {name: found[name] * part for name in ("held", "kept", "interpreter_s")}


def row(push: dict) -> list[str]:
    """The cells of a push from its bytes on."""
    announced = push["announced"]
    return [
        f"{push['bytes'] / 1e9:,.0f}",
        f"{push['buckets']:,}",
        f"{push['requests']:,}",
        f"{push['held'] / 2**20:,.0f}",
        f"{push['held_by_others'] / 2**20:,.0f}",
        f"{1e3 * (announced or push)['request_s']:.2f}",
        str(announced["processes"]) if announced else "0",
        f"{1e3 * announced['bucket_s']:.1f}"
        if announced
        else f"{1e3 * push['request_s'] * push['servers']:.1f}",
        f"{push['interpreter_s']:.1f}",
        *(f"{paused_s(push, speed):.1f}" for speed in GBITS),
    ]


def paused_s(push: dict, gbits: float) -> float:
    """Seconds from the first server's pause to the last one's resumption, but for the servers' own work."""
    card = gbits / 8 * 1e9
    gather, send = push["gathered"] / card + push["interpreter_s"], push["bytes"] / card
    return asking_s(push) + (max(gather, send) if push["overlaps"] else gather + send)


def asking_s(push: dict) -> float:
    """Seconds of the requests: one after the other, but those of a bucket from all processes at once."""
    announced = push.get("announced")
    if not announced:
        return push["requests"] * push["request_s"]
    others = push["requests"] - push["buckets"] * push["servers"]
    share = math.ceil(push["servers"] / announced["processes"])
    bucket_s = announced["bucket_s"] + share * announced["request_s"]
    return others * push["request_s"] + push["buckets"] * bucket_s


def push_of_changes(push: dict, user: dict, share: float) -> dict:
    """What a push of changes asks for while servers are paused.

    Args:
        push: as `counted_push` counted one of everything.
        user: one of USERS.
        share: changed values of all.
    """
    size = push["bytes"] / VALUE_BYTES * share * (PLACE_BYTES + VALUE_BYTES)
    stages = user["parallel"]["pipeline"]
    buckets = stages * math.ceil(size / stages / (default_bucket_mib(user["servers"]) * 2**20))
    other_requests = push["requests"] - push["buckets"] * user["servers"]
    begin = 2  # the servers are asked what they are, and told which changes come
    return (
        push
        | push.get("changes", {})
        | {
            "bytes": size,
            "buckets": buckets + stages,
            "requests": other_requests + user["servers"] * (buckets + stages + begin),
            "gathered": 0,
            "interpreter_s": 0.0,
        }
    )


def counted_push(user: dict, package: Path) -> dict:
    """What a whole push asks for, of all stages.

    Args:
        user: one of USERS.
        package: folder that holds the megatron_rl_corr to count.
    """
    stages = user["parallel"]["pipeline"]
    stage_ranks = user["parallel"]["world"] // stages
    alike = {0: 1}  # number of a stage that is played -> stages that are like it
    if stages > 2:
        alike[1] = stages - 2
    if stages > 1:
        alike[stages - 1] = 1
    played = [(counted_rank(user, stage * stage_ranks, package), many) for stage, many in alike.items()]
    first, other = played[0][0], counted_rank(user, user["parallel"]["expert"] - 1, package)

    def over_stages(value) -> int | float:
        return sum(many * value(rank) for rank, many in played)

    buckets = over_stages(lambda rank: rank["requests"].get(BUCKET, 0)) // user["servers"]
    return {
        "bytes": over_stages(lambda rank: rank["sent_to_servers"]),
        "buckets": buckets,
        "requests": over_stages(lambda rank: sum(rank["requests"].values())),
        "gathered": over_stages(gathered),
        "held": max(rank["held"] for rank, _ in played),
        "held_by_others": other["held"],
        "servers": user["servers"],
        **{name: first[name] for name in ("request_s", "announced", "changes")},
        "interpreter_s": over_stages(lambda rank: rank["interpreter_s"]),
        "overlaps": first["overlaps"],
    }


BUCKET = "/update_weights_from_distributed"


def gathered(rank: dict) -> int:
    """Bytes that came to a sender from its stage."""
    return sum(
        one["received"]
        for name, one in rank["groups"].items()
        if name.endswith((" expert", " tensor")) and "objects" not in name
    )


def counted_rank(user: dict, rank: int, package: Path, worker: Path = WORKER) -> dict:
    """What one rank's push asks for, or with BATCH_WORKER its batch, by a process that plays it."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", worker, json.dumps(user | {"rank": rank})],
        env=os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if run.returncode != 0:
        raise SystemExit(f"{worker.name} ended with status {run.returncode}:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    with only_tables():
        main()
