"""Programs with unusual streams, files, limits and logs."""

import signal

from exits.programs import ANY, Program

UNUSUAL = "ABC \\udc80 \\u2713 \\U0001f600 \\x00 \\x1b[31m"

STREAMS = {
    "errors that are closed": Program("sys.stderr.close()\ntrain()", usual=True),
    "logging to memory until exit": Program(
        "from logging import handlers\nlogging.getLogger().addHandler(handlers.MemoryHandler(1000, target=logging.FileHandler('log.txt')))\nlogging.warning('kept')\ntrain()"),
    "warnings as errors": Program("warnings.simplefilter('error')\ntrain()\nwarnings.warn('raised')", 1, "UserWarning: raised", usual=True),
    "developer mode": Program("train()\nopen(__file__)", 0, "ResourceWarning", environment={"PYTHONDEVMODE": "1"}, usual=True),
    "working directory that is removed": Program("os.mkdir('gone')\nos.chdir('gone')\ntrain(2)\nos.rmdir('../gone')\ntrain(3)\nprint('on')\nos.chdir(folder)", usual=True),
    "locked file": Program("import fcntl\nf = open('lock', 'w')\nfcntl.flock(f, fcntl.LOCK_EX)\ntrain()\nprint(subprocess.run(['flock', '-n', 'lock', 'true']).returncode)"),
    "few descriptors": Program(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\ntrain()\nfiles = [open(__file__) for _ in range(20)]\nprint(len(files))"),
}  # fmt: skip
