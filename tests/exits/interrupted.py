"""Training that is interrupted: each round trains anew, until a signal ends it; the last one ends the script.

python interrupted.py ROUNDS
"""

import atexit
import pathlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator

import torch
from torch import nn

progress = {"step": 0}


class StopError(Exception):
    """Raised by the handler of SIGTERM."""


def handle(*_: object) -> None:
    raise StopError


def save(steps: queue.SimpleQueue[int | None], path: str) -> None:
    with pathlib.Path(path).open("w") as file:
        while (number := steps.get()) is not None:
            file.write(f"{number}")
            time.sleep(0.05)
            file.write(" complete\n")


def build() -> nn.Module:
    progress["step"] = 0
    torch.manual_seed(0)
    torch.set_grad_enabled(True)  # PyTorch itself leaves it off where a signal meets the end of a step
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def lines(model: nn.Module) -> Iterator[str]:
    """Train without an end; yield step and loss after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    while True:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        progress["step"] += 1
        yield f"{progress['step']} {loss.item()}\n"


def train(number: int) -> None:
    steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    threading.Thread(target=save, args=(steps, f"saved-{number}.txt")).start()
    model = build()
    try:
        with pathlib.Path(f"losses-{number}.txt").open("w") as losses:
            for line in lines(model):
                losses.write(line)
                sys.stdout.write(line)
                sys.stdout.flush()
    finally:
        torch.save({**progress, "model": model.state_dict()}, f"checkpoint-{number}.pt")
        steps.put(progress["step"])
        steps.put(None)


def main() -> None:
    log = pathlib.Path("log.txt").open("w")  # noqa: SIM115 - Python closes it
    atexit.register(lambda: log.write(f"at exit {progress['step']}\n"))
    signal.signal(signal.SIGTERM, handle)
    rounds = int(sys.argv[1])
    for number in range(rounds):
        try:
            train(number)
        except (KeyboardInterrupt, StopError) as error:
            if number + 1 == rounds:
                raise
            print("caught", type(error).__name__, flush=True)


if __name__ == "__main__":
    main()
