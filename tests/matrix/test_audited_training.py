"""A whole training whose every process is watched, with agents and rewards that tell all that they have."""

from pathlib import Path

from megatron_rl_corr.commands.report.page import write_page
from tests.faults.drills import drill
from tests.faults.test_run_audit import (
    HARNESS,
    check_files,
    check_places,
    check_texts,
    noted,
    watched,
)
from tests.forked_torchrun import forking
from tests.matrix.patched import unchanged
from tests.mcore.launched import run_command, run_environment, write_data
from tests.preloaded import run_preloaded
from tests.rollout.agents.model_folder import folder_with_template, write_rows
from tools.local_server import free_port

SCRIPT = Path(__file__).with_name("audited_pretrain.py")
STEPS = 3
FLAGS = [
    *["--global-batch-size", 8, "--seq-length", 256, "--train-iters", STEPS, "--save-interval", 2],
    *["--rollout-agent", f"{HARNESS}:run", "--rollout-input-key", "messages", "--rollout-agent-max-turns", 1],
    *["--rollout-probe-push", "off", "--rollout-max-failed-fraction", 1, "--rollout-reward-workers", 1],
    *["--rollout-api-key-env", "ROLLOUT_KEY", "--rollout-weight-transport", "distributed"],
]


@drill(
    "a training whose agents and rewards tell their environment, the episode's key and terminal escapes",
    promised="no secret in messages, files or command lines; only its folders, only the loopback",
)
def test_training_when_watched_then_it_keeps_to_its_folders_and_the_loopback_and_shows_no_secret(
    sglang_server_fp32, tiny_moe_dir, short_path, seen
):
    (data := short_path / "data").mkdir()
    write_data(data)
    model = folder_with_template(tiny_moe_dir, short_path / "model")
    rows = ({"do": "tells" if n == 5 else "asks", "number": n} for n in range(8))
    write_rows(data / "prompts.jsonl", *rows)
    out = data / "run"
    places = [
        *["--rollout-save-trajectories", out / "samples", "--rollout-trace", out / "traces"],
        *["--rollout-events", out / "events.jsonl", "--rollout-metrics-port", free_port()],
        *["--rollout-save-hf", out / "hf", "--rollout-reward-function", f"{HARNESS}:reward"],
    ]
    url = sglang_server_fp32.url
    command = run_command(data, "run", model, url, SCRIPT, *FLAGS, *places, processes=2, rewarded=False)
    # what torch itself opens between ranks is as the user has it: here on the loopback too
    environment = watched(run_environment(), short_path) | {"GLOO_SOCKET_IFNAME": "lo"}
    with unchanged(sglang_server_fp32, tiny_moe_dir):
        done = run_preloaded(forking(command)[1:], env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "HF_TOKEN" in done.stderr and "taken" in done.stderr
    check_texts(done.stdout, done.stderr)
    write_page(out / "log")
    check_files(out)
    notes = noted(short_path)
    others = ("tmpdir", "home", "xdg_cache_home", "audit.jsonl")
    check_places(notes, [out, *(short_path / name for name in others)])
    listening = {tuple(one["of"].split()) for one in notes if one["what"] == "listen"}
    loopback = {place for place in listening if place[0] in ("127.0.0.1", "::1", "::ffff:127.0.0.1")}
    store = str(command[command.index("--master-port") + 1])  # torch opens it so
    assert loopback and {port for _, port in listening - loopback} <= {store}
    check_texts(*(one["of"] for one in notes if one["what"] in ("begins", "subprocess.Popen", "os.exec")))
    kinds = sorted(path.name for path in out.iterdir())
    assert kinds == ["checkpoints", "events.jsonl", "hf", "log", "samples", "traces"]
    seen(f"{len(notes)} notes of {len({one['pid'] for one in notes})} processes")
