"""Independent calls as tasks of a Ray cluster: placement, resources, retries and cancellation are Ray's."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from backlight.text import assignments

CANCEL_TIMEOUT_S = 10.0
"""Seconds in which cancelled tasks end what they have started."""


class RayError(ValueError):
    """Tasks that cannot be run on Ray; the message names the reason and an alternative."""


@dataclass(frozen=True)
class RayOptions:
    """Options of ``--ray``: the cluster, what each task gets of it, and how often a task is repeated.

    Without ``address``, the cluster of RAY_ADDRESS is used, else one that was started on this machine, else
    this machine while the command runs.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    memory_gb: float = 0.0
    retries: int = 0

    @classmethod
    def of(cls, items: Iterable[str], **default: float) -> RayOptions:
        """Return the options of ``key=value`` items; ``default`` holds those that are not given."""
        example = "key=value, such as cpus=4, gpus=1 or address=auto"
        texts = assignments(items, "--ray", example, RayError)
        options = cls.__dataclass_fields__
        for key in texts:
            if key not in options:
                raise RayError(f"--ray {key}: expected one of {', '.join(options)}")
        values: dict[str, Any] = {**default, **{key: _number(key, text) for key, text in texts.items()}}
        if importlib.util.find_spec("ray") is None:
            raise RayError("--ray: Ray is not installed; run: pip install 'backlight[ray]'")
        return cls(**values)


def _number(key: str, text: str) -> Any:
    if key == "address":
        return text
    with contextlib.suppress(ValueError):
        number = int(text) if key == "retries" else float(text)
        if 0 <= number < float("inf"):
            return number
    raise RayError(f"--ray {key}={text}: expected a number that is not negative")


def run_tasks(
    function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], options: RayOptions
) -> Iterator[tuple[int, Any]]:
    """Yield the index of each call with its result, or the exception that it raised, as they end.

    ``function`` is one of a module that the workers can import. A KeyboardInterrupt cancels what runs.

    Raises
    ------
    RayError
        If there is no such cluster, or it has no node with these resources.
    """
    import ray  # noqa: PLC0415 - an optional library, and slow

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # tasks without a GPU see what they saw
    try:
        ray.init(address=options.address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        where = options.address or "RAY_ADDRESS"
        raise RayError(
            f"--ray: no cluster at {where}: {error}; give address=local for this machine"
        ) from error
    try:
        need = {"CPU": options.cpus, "GPU": options.gpus, "memory": options.memory_gb * 1e9}
        nodes: Any = ray.nodes()  # type: ignore[no-untyped-call, unused-ignore]  # as Ray has it
        free = [node["Resources"] for node in nodes if node["Alive"]]
        if not any(all(node.get(name, 0) >= least for name, least in need.items()) for node in free):
            wanted = ", ".join(f"{name}={least:g}" for name, least in need.items() if least)
            raise RayError(f"--ray: no node of the cluster has {wanted}; ask for less with cpus= and gpus=")
        task = ray.remote(
            num_cpus=options.cpus, num_gpus=options.gpus, memory=need["memory"],
            max_retries=options.retries, retry_exceptions=True,
        )(function)  # fmt: skip
        waiting = {task.remote(*call): index for index, call in enumerate(calls)}
        try:
            while waiting:
                (done,), _ = ray.wait(list(waiting), num_returns=1)
                index = waiting.pop(done)
                try:
                    yield index, ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    yield index, error.cause
                except ray.exceptions.RayError as error:
                    yield index, error
        finally:
            for left in waiting:
                ray.cancel(left)
            if waiting:
                ray.wait(list(waiting), num_returns=len(waiting), timeout=CANCEL_TIMEOUT_S)
    finally:
        ray.shutdown()
