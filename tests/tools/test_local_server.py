"""A local server of either engine: its log-probs are the model's, failures are told, it never
outlives its owner.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import pytest
import torch

from tests.preloaded import PreloadedServer
from tools.cpu import environment, gpu_available, sglang_arguments, vllm_arguments
from tools.local_server import LocalServer, LocalServerError, WaitLine
from tools.process_group import group_members, shared_memory

PROMPT = [3, 67, 4, 71]  # "3+4="


def generate(engine: str, url: str, tokens: int) -> tuple[list[int], list[float]]:
    """Sampled token ids at temperature 1, and their log-probs."""
    if engine == "sglang":
        path, sampling = "generate", {"ignore_eos": True, "temperature": 1.0, "max_new_tokens": tokens}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    else:
        path, sampling = (
            "inference/v1/generate",
            {"ignore_eos": True, "temperature": 1.0, "max_tokens": tokens},
        )
        body = {"token_ids": PROMPT, "sampling_params": {**sampling, "logprobs": 0}}
    request = urllib.request.Request(
        f"{url}/{path}", data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    if engine == "sglang":
        return answer["output_ids"], [
            logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]
        ]
    [choice] = answer["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def wait_until(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_generate_when_served_in_float32_then_logprobs_are_the_models(engine_server, tiny_moe_dir):
    from transformers import AutoModelForCausalLM

    engine, server = engine_server
    output, logprobs = generate(engine, server.url, 24)
    assert len(output) == len(logprobs) == 24

    model = AutoModelForCausalLM.from_pretrained(tiny_moe_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + output])).logits[0]
    # The logits at position p predict token p + 1: the prompt's last position predicts the first output.
    predicted = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
    expected = predicted.gather(1, torch.tensor(output)[:, None]).squeeze(1)
    assert (torch.tensor(logprobs) - expected).abs().max() < 1e-4


def test_server_when_running_then_its_children_are_in_its_group(engine_server):
    engine, server = engine_server
    assert server.is_running()
    # SGLang: the HTTP front, the scheduler and the detokenizer at least. vLLM: the HTTP front and the engine.
    assert len(group_members(server.pid)) >= {"sglang": 3, "vllm": 2}[engine]


@pytest.mark.skipif(gpu_available(), reason="make setup-vllm installs vLLM without a GPU only")
def test_vllm_when_either_of_its_processes_is_killed_then_none_of_them_is_left(tiny_moe_dir, tmp_path):
    server = PreloadedServer(
        tiny_moe_dir,
        engine="vllm",
        log_path=tmp_path / "server.log",
        extra_arguments=vllm_arguments(),
        environment=environment("vllm"),
    )
    with server:
        [engine] = set(group_members(server.pid)) - {server.pid}
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until(lambda: not group_members(server.pid), 5), "the engine lives on without its server"
    with server:
        [engine] = set(group_members(server.pid)) - {server.pid}
        os.kill(engine, signal.SIGKILL)
        group = server.pid
    assert group_members(group) == []


def test_start_when_model_path_is_wrong_then_error_has_the_logs_tail(tmp_path):
    server = PreloadedServer(
        tmp_path / "no_such_model",
        dtype="float32",
        log_path=tmp_path / "server.log",
        extra_arguments=sglang_arguments(),
        environment=environment("sglang"),
    )
    with pytest.raises(LocalServerError) as error, server:
        pass
    assert "no_such_model" in str(error.value) and str(tmp_path / "server.log") in str(error.value)
    assert "Traceback" in (tmp_path / "server.log").read_text()
    assert str(error.value).strip().endswith(server.last_log_line().strip())
    assert not server.is_running()


OWNER = """
import sys, time
from tests.preloaded import PreloadedServer
from tools.cpu import environment, sglang_arguments
from tools.local_server import LocalServer
server = LocalServer(sys.argv[1], dtype="float32", log_path=sys.argv[2], extra_arguments=sglang_arguments(),
                     environment=environment("sglang"))
with server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


def test_owner_when_killed_then_no_process_of_its_server_is_left(tiny_moe_dir, tmp_path):
    scratch = tempfile.mkdtemp(prefix="owner-")  # what a killed owner cannot remove
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tiny_moe_dir), str(tmp_path / "server.log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": scratch},
    )
    try:
        line = owner.stdout.readline()
        assert line, "the owner ended before its server was ready"
        group = int(line)
        assert len(group_members(group)) >= 3
        left_behind = shared_memory(group)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert wait_until(lambda: not group_members(group), 10), group_members(group)
    shutil.rmtree(scratch)
    for path in left_behind:
        path.unlink(missing_ok=True)


STAND_IN = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    do_POST = do_GET
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path):
    """A server that answers and does nothing, has a child, and, like that child, ignores SIGTERM."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(STAND_IN)
    return LocalServer(
        "model",
        log_path=tmp_path / "logs" / "server.log",
        environment={**os.environ, "PYTHONPATH": str(tmp_path)},
    )


def test_stop_when_nobody_heeds_sigterm_then_the_whole_group_is_killed(stand_in):
    with stand_in:
        group = stand_in.pid
        assert len(group_members(group)) == 2
        scratch = stand_in._scratch
        assert scratch.is_dir()
    assert group_members(group) == []
    assert not scratch.exists()
    stand_in.stop()  # harmless


def test_start_when_stopped_before_then_it_starts_again(stand_in):
    with stand_in:
        first = stand_in.pid
    with stand_in:
        assert stand_in.pid != first and stand_in.is_running()


def test_start_when_not_in_the_main_thread_then_it_is_refused(stand_in):
    errors = []

    def start():
        try:
            stand_in.start()
        except LocalServerError as error:
            errors.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "main thread" in errors[0]


def test_wait_ready_when_time_is_up_then_the_server_is_stopped(stand_in, tmp_path):
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import time; print('loading', flush=True); time.sleep(600)"
    )
    seen = []
    stand_in.start()
    group = stand_in.pid
    with pytest.raises(LocalServerError, match="within 2 s.*\n.*loading"):
        stand_in.wait_ready(timeout_s=2, on_wait=lambda elapsed, line: seen.append(line))
    assert group_members(group) == []
    assert seen[-1] == "loading"


def test_wait_line_when_output_is_no_terminal_then_one_line_every_five_seconds(capsys):
    line = WaitLine("server")
    for elapsed in (0.0, 1.0, 4.9, 5.0, 9.0, 10.1):
        line(elapsed, "loading\n")
    line(0.5, "again")  # another wait begins
    assert capsys.readouterr().err.splitlines() == [
        "server:   0 s  loading",
        "server:   5 s  loading",
        "server:  10 s  loading",
        "server:   0 s  again",
    ]
