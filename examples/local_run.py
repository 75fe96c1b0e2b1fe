"""What the examples share: a rollout server and Megatron on this machine, without a GPU, and a
clean end of both.
"""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from running import Running

from tools import cpu
from tools.local_server import LocalServer, LocalServerError, free_port, print_wait
from tools.process_group import adopt_orphans, die_with_parent, end_descendants, end_group

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("[rl-corr]", "[rollout]", "megatron_rl_corr")
HIDDEN_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class Example:
    """One example: its name is that of its messages and of its folder in runs/."""

    def __init__(self, name):
        self.name, self.home = name, ROOT / "runs" / name

    def say(self, text):
        print(f"[{self.name}] {text}", flush=True)

    def parser(self, description, *, steps, seed_help=None):
        """Options of all examples: the seed (with a seed_help), steps, the folder, --stop, and the
        launcher's flags.
        """
        layout = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(description=description, formatter_class=layout)
        add = parser.add_argument
        if seed_help is not None:
            add("--seed", type=int, default=0, help=seed_help)
        add("--steps", type=int, default=steps, help=f"optimizer steps (default {steps})")
        add("--out", type=Path, help=f"new folder for the run (default runs/{self.name}/TIME-seedN)")
        add(
            "--stop",
            action="store_true",
            help=f"end every {self.name} that is running, and all it started; with --out that run alone",
        )
        add("launcher_flags", nargs="*", metavar="-- FLAGS", help="appended to the launcher's command")
        return parser

    def main(self, work, options, *, resumes=False):
        """Call work(options, out, running) with a new folder, or end such runs with --stop; the exit status.

        Args:
            work: the example's own; `running` is told the groups of processes that it starts.
            options: of `parser`.
            resumes: the work goes on in a folder that it has begun, which --out names.
        """
        if options.stop:
            return Running(self.home).stop(self.say, self.name, options.out and options.out.resolve())
        out = options.out or self.home / f"{time.strftime('%Y%m%d-%H%M%S')}-seed{options.seed}"
        out = out.resolve()
        if not resumes and out.exists() and any(out.iterdir()):
            self.say(
                f"--out {out} is not empty; name a new folder, so that no other run's files are overwritten"
            )
            return 2
        out.mkdir(parents=True, exist_ok=True)
        with self.alone_in(out) as alone:
            if not alone:
                self.say(
                    f"another {self.name} writes to {out}; wait for it, or end it with --stop --out {out}"
                )
                return 2
            return self._work(work, options, out)

    @contextmanager
    def alone_in(self, out):
        """Whether no other process is within this block for the folder; it ends with the process,
        however that ends.
        """
        with open(out / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _work(self, work, options, out):
        # Ctrl-C and SIGTERM both unwind through the `finally` blocks, which end what was started.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with Running(self.home, out) as running:
            try:
                return work(options, out, running)
            except LocalServerError as error:
                self.say(str(error))
                return 1
            except KeyboardInterrupt:
                self.say("stopped; all its processes have ended")
                return 130
            except SystemExit:
                self.say("stopped by SIGTERM; all its processes have ended")
                raise


def environment(engine):
    """Variables of a process that uses no GPU, since the model is tiny: the same run works everywhere."""
    base = {**os.environ, **HIDDEN_GPU, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    base["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return cpu.environment(engine, base)


def make_model(script, model, *options):
    """Run the script that writes a model into the folder."""
    subprocess.run(
        [sys.executable, str(script), str(model), *map(str, options)],
        env=environment("sglang"),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def local_server(model, *, engine="sglang", dtype, log_path, seed, slots, extra_arguments=()):
    """A server of the model; start it with `start`.

    Args:
        engine: "sglang" or "vllm".
        dtype: the weights' and activations'.
        log_path: file for all that it prints.
        seed: of its sampling.
        slots: requests that it works on at a time.
        extra_arguments: its own flags.
    """
    arguments = {"sglang": cpu.sglang_arguments, "vllm": cpu.vllm_arguments}[engine](HIDDEN_GPU)
    slots_flag, seed_flag = {
        "sglang": ("--max-running-requests", "--random-seed"),
        "vllm": ("--max-num-seqs", "--seed"),
    }[engine]
    try:
        variables = environment(engine)
    except FileNotFoundError as error:
        raise LocalServerError(str(error)) from error
    return LocalServer(
        model,
        engine=engine,
        dtype=dtype,
        log_path=log_path,
        environment=variables,
        extra_arguments=[*arguments, slots_flag, str(slots), seed_flag, str(seed), *extra_arguments],
    )


def wait_ready(server):
    """Wait until the server answers, with a line of progress."""
    started = time.monotonic()
    server.wait_ready(on_wait=print_wait)
    print_wait.done(f"{server.url} is ready after {time.monotonic() - started:.0f} s")


def megatron_flags(model, tensorboard):
    """Flags of the model, of this machine, and of a script whose own data are not used."""
    from megatron_rl_corr.models.megatron_flags import model_flags

    layers = cpu.megatron_arguments()
    # The local spec's attention takes padded rows only.
    te = "transformer_engine" in layers
    return [
        # As `megatron-rl-corr model-flags` prints them.
        *model_flags(json.loads((model / "config.json").read_text())),
        *layers,
        *(["--moe-grouped-gemm", "--moe-permute-fusion"] if te else ["--rollout-pad-sequences"]),
        "--seq-length",
        32,
        "--weight-decay",
        0,
        "--clip-grad",
        1.0,
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        model,
        "--mock-data",
        "--split",
        "100,0,0",
        "--num-workers",
        0,
        "--no-create-attention-mask-in-dataloader",
        "--eval-iters",
        0,
        "--log-interval",
        1000,
        "--tensorboard-dir",
        tensorboard,
        "--rollout-hf-checkpoint",
        model,
    ]


def torchrun(flags, *, processes):
    """The command that trains with the quickstart's Megatron script under the launcher."""
    script = ROOT / "examples/quickstart/pretrain_moe.py"
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(processes),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        "-m",
        "megatron_rl_corr.launch",
        str(script),
        *map(str, flags),
    ]


def train(command, log_path, running, server_group):
    """Run torchrun and return its exit status; the log gets all its output, the screen the table
    and our messages.
    """
    adopt_orphans()
    process = subprocess.Popen(
        command,
        env=environment("megatron"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent(signal.SIGTERM),
    )
    running.add(process.pid)
    output = threading.Thread(target=_show, args=(process.stdout, log_path), daemon=True)
    output.start()
    try:
        return process.wait()
    finally:
        end_group(process.pid, grace_s=5.0, reap=process.poll)
        # torchrun's workers have sessions of their own, and the checkpoint writers they start outlive them.
        end_descendants(keep_group=server_group)
        output.join()


def _show(lines, log_path):
    with log_path.open("w") as log:
        for line in lines:
            log.write(line)
            log.flush()
            if line.startswith(SHOWN) and "FAILED" not in line:
                print(line, end="", flush=True)
