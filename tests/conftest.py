"""One torch thread per worker, a fixed seed before every test, and a small heap to search."""

import gc
import importlib.abc
import importlib.util
import itertools
import multiprocessing.util
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The flight recorder of torch 2.9 records nothing unless it is told how much; later ones record 2,000.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
# Processes started by tests load tests/exits/sitecustomize.py.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "exits"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# A job in the background of a shell ignores SIGINT, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from answers import closed, strict_loads


class TorchSettings(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that sets threads and seed where a test imports torch, which takes seconds: many do not."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None:
            self.loader: Any = spec.loader
            spec.loader = self
        return spec

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self.loader  # which also reads the files of the package
        self.loader.exec_module(module)
        module.set_num_threads(1)
        module.manual_seed(0)
        # In a build for GPUs, fake tensors pretend to have some: autograd would start threads for them at its
        # first backward, after which torch runs none in a forked process. The simulated accelerator registers
        # before that.
        if "SIMULATED_ACCELERATOR" not in os.environ:
            module.ones((), requires_grad=True).backward()


sys.meta_path.insert(0, TorchSettings())

SCRIPTS = {"check", "nan", "profile", "why-no-grad"}
"""Commands in which an option behind ``train.py`` belongs to the script."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    check_answer: Callable[[Sequence[object], int, str], None],
) -> Callable[..., tuple[int, str, str]]:
    """Call the command line in this process; return exit code, output and errors."""
    from backlight.cli.app import main

    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        code = int(leaving.value.code or 0)
        check_answer(arguments, code, captured.out)
        return code, captured.out, captured.err

    return call


@pytest.fixture
def console_script(
    check_answer: Callable[[Sequence[object], int, str], None],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the installed console script in a directory, 80 columns wide."""

    def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [Path(sys.executable).with_name("backlight"), *map(str, arguments)],
            cwd=folder, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        check_answer(arguments, done.returncode, done.stdout)
        return done

    return run


@pytest.fixture
def check_answer() -> Callable[[Sequence[object], int, str], None]:
    """Check what ``--json`` printed: strict JSON, with every field in the schema of the command."""

    def check(arguments: Sequence[object], code: int, out: str) -> None:
        words = [str(word) for word in arguments[:2]]
        command = " ".join(words if words[:1] == ["grok"] else words[:1])
        if command == "memory":
            command = "memory predict" if "predict" in words else "memory measure"
        given = [*itertools.takewhile(lambda word: command not in SCRIPTS or word != "train.py", arguments)]
        if "--json" not in given or code > 1:
            return
        answer = strict_loads(out)
        from answer_schemas import ANSWERS, schema_of
        from jsonschema import validate

        if command in ANSWERS:
            validate(answer, closed(schema_of(command)))

    return check


@pytest.fixture(autouse=True, scope="session")
def _launches(tmp_path_factory: pytest.TempPathFactory) -> None:
    # torchrun keeps its logs: without this, in a folder of the system for each launch.
    os.environ["PET_LOG_DIR"] = str(tmp_path_factory.mktemp("torchrun"))


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    # A watch searches all objects of the process for models. Objects that exist before a test file starts are
    # frozen, so that the search does not visit every imported library.
    gc.collect()
    gc.freeze()


@pytest.fixture
def only_new_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the models that earlier tests left behind, on which the names of parameters depend."""
    from backlight.capture.hub import HUB
    from backlight.capture.modules import SeenModules

    gc.collect()
    gc.freeze()  # frozen objects are not found by gc.get_objects()
    monkeypatch.setattr(HUB, "seen", SeenModules())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-processes", action="store_true", help="Fail tests that start a process (`make quick`)."
    )


def pytest_configure(config: pytest.Config) -> None:
    is_controller = not hasattr(config, "workerinput") and config.getoption("numprocesses", None)
    if config.getoption("--no-processes") and not is_controller:
        platform.processor()  # asks a process the first time, as importing h5py does
        sys.addaudithook(_refuse_processes)
        multiprocessing.util.spawnv_passfds = lambda *_: _refuse_processes("os.spawn")  # not audited


def _refuse_processes(event: str, *_: object) -> None:
    # A failure of pytest is no Exception, so that what starts the process does not handle it.
    if event in {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}:
        pytest.fail("starts a process, so it needs the mark `slow`")


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # plugins that are imported for the summary may ask who refers to an object
