"""A small run that goes wrong on demand, and three ways to start it: as a script, under torchrun, or from a warm bench.

python launched.py DEED [WHO] [--world N] [--timeout S]     launch(main); also what torchrun is given
python launched.py bench                                    reads such lines from stdin, answers in JSON
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from meshwright.errors import DataError, MeshwrightError, NonFiniteError, SpecError
from meshwright.train.launch import launch

SCRIPT = Path(__file__)
STEPS = 6
BAD_STEP = 4


def raises(error):
    raise error


def hold_interpreter(seconds):
    """Sleep without releasing the interpreter: the heart thread cannot run meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def abandon_child():
    child = subprocess.Popen(["sleep", "300"])
    print(f"child {child.pid}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


# What one rank does in the middle of step BAD_STEP.
DEEDS = {
    "nothing": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(300),
    "raise": lambda: raises(ValueError("a bad row")),
    "data": lambda: raises(DataError("data.path", "it is empty")),
    "spec": lambda: raises(SpecError("train.seed", "it is odd", "Try 2.")),
    "exit": lambda: sys.exit(3),
    "message": lambda: sys.exit("no data left"),
    "hard-exit": lambda: os._exit(0),
    "orphan": abandon_child,
    "slow": lambda: time.sleep(1.5),
    "hold": lambda: hold_interpreter(1.5),
    "nan": lambda: raises(NonFiniteError("the loss", "it is NaN")),
}


def main(deed="nothing", who=1, pause_s=0.02, mark=""):
    import torch
    import torch.distributed as dist

    from meshwright.train.world import join_world

    rank = int(os.environ.get("RANK", "0"))
    if deed == "late" and rank == who:
        time.sleep(300)
    if deed == "early-error":
        raise SpecError("train.seed", "it is odd", "Try 2.")
    with join_world() as world:
        tensor = torch.ones(2)
        for step in range(1, STEPS + 1):
            world.pulse.beat(step, "forward", 2)
            time.sleep(pause_s)
            if step == BAD_STEP and who in (world.rank, -1):
                if deed == "return":
                    return step
                if deed == "leave":
                    break
                DEEDS.get(deed, DEEDS["nothing"])()
            dist.all_reduce(tensor)
            world.pulse.beat(step, "done")
            if mark and step == 2:
                Path(f"{mark}-{world.rank}").write_text(str(os.getpid()))
    if deed == "leave" and world.rank == who:
        time.sleep(300)
    return {"sum": tensor[0].item(), "launcher": world.launcher, "world_size": world.world_size}


def parse(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("deed")
    parser.add_argument("who", nargs="?", type=int, default=1)
    parser.add_argument("--world", type=int, default=None)
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--start", default="auto")
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--mark", default="")
    parser.add_argument("--log", default=None)
    parser.add_argument("--first-late", type=float, default=0.0, help="how long local rank 0 sleeps before anything")
    return parser.parse_args(words)


def run(options):
    if os.environ.get("LOCAL_RANK") == "0":
        time.sleep(options.first_late)
    task = partial(main, options.deed, options.who, options.pause, options.mark)
    return launch(task, options.world, timeout_s=options.timeout, start=options.start, log_dir=options.log)


def report(line):
    begin = time.perf_counter()
    answer = {"value": None, "error": "", "class": "", "exit_code": 0, "notes": ""}
    try:
        answer["value"] = run(parse(shlex.split(line)))
    except MeshwrightError as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        answer |= {"error": str(error), "class": type(error).__name__, "exit_code": error.exit_code, "notes": notes}
    return answer | {"seconds": time.perf_counter() - begin}


def bench():
    import torch

    # As in a user's notebook: the parent has computed with several threads before it launches.
    torch.set_num_threads(2)
    torch.relu(torch.randn(400, 400) @ torch.randn(400, 400))
    for line in sys.stdin:
        answer = json.dumps(report(line))
        # The ranks write to the same stdout.
        print(f"\nANSWER {answer}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "bench":
        bench()
    else:
        # One write: torchrun starts ranks with `python -u`, where print writes the end of the line by itself.
        sys.stdout.write(f"value {run(parse(sys.argv[1:]))}\n")
        sys.stdout.flush()
