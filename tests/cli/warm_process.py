"""Imports everything, then forks one process for each command that standard input asks for.

A request is a line of JSON: args, cwd, stdout and stderr (files), and interrupt: null, or the event of sys.audit, the
end of the path and the count at which the process sends SIGINT to itself. Two lines answer: process id, exit status.
"""

import json
import os
import signal
import sys
import traceback
from typing import Any

import torch

import oasis_cli.calibration
import oasis_cli.pipeline.demo
import oasis_cli.pipeline.inspecting
import oasis_cli.pipeline.verifying  # noqa: F401 - as the others, so that a fork need not
from oasis_cli.cli import main


def interrupt_at(event: str, path: str, count: int) -> None:
    seen = 0

    def hook(name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if name == event and args and str(args[0]).endswith(path):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGINT)

    sys.addaudithook(hook)


def run(request: dict[str, Any]) -> int:
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream.fileno())
    os.chdir(request["cwd"])
    sys.argv = ["oasis", *request["args"]]
    if request["interrupt"]:
        interrupt_at(**request["interrupt"])
    try:
        main()
    except SystemExit as finished:
        return int(finished.code or 0)
    except BaseException:
        traceback.print_exc()
    return 1


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = run(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        answer(child)
        answer(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
