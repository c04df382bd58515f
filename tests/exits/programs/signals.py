"""Programs that are interrupted, or have handlers of signals."""

import signal

from exits.programs import ANY, SIGINT, SIGTERM, Program

HANDLER = """
def handle(number, frame):
    print("handled", number, frame is not None)
"""
LEAVE = f"{HANDLER}    sys.exit(9)\n"
FILES = """
log = open("log.txt", "w")
log.write("not flushed")
atexit.register(lambda: open("checkpoint", "w").write("saved"))
def late():
    time.sleep(0.2)
    open("late", "w").write("saved")
threading.Thread(target=late).start()
train()
"""
INTERRUPTED = "KeyboardInterrupt"

SIGNALS = {
    "interrupt that is raised": Program(f"{FILES}raise KeyboardInterrupt", -SIGINT, INTERRUPTED),
    "interrupt": Program(f"{FILES}signal_self(signal.SIGINT)\ntime.sleep(60)", -SIGINT, INTERRUPTED, usual=True),
    "interrupt that is caught": Program(
        "train()\ntry:\n    signal_self(signal.SIGINT)\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('caught')\nsave()", usual=True),
    "interrupts, one after the other": Program(
        "try:\n    train()\n    signal_self(signal.SIGINT)\n    time.sleep(60)\nfinally:\n    save()\n    signal_self(signal.SIGINT)\n    time.sleep(60)",
        -SIGINT, "KeyboardInterrupt(.|\n)*During handling(.|\n)*KeyboardInterrupt", usual=True),
    "interrupt that is ignored": Program("signal.signal(signal.SIGINT, signal.SIG_IGN)\ntrain()\nsignal_self(signal.SIGINT)\nprint('on')"),
    "interrupt with a handler": Program(f"{LEAVE}{FILES}signal.signal(signal.SIGINT, handle)\nsignal_self(signal.SIGINT)", 9),
    "termination with a handler": Program(f"{LEAVE}{FILES}signal.signal(signal.SIGTERM, handle)\nsignal_self(signal.SIGTERM)", 9, usual=True),
    "termination that is blocked": Program(
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\ntrain()\nsignal_self(signal.SIGTERM)\nsave()\n"
        "print('pending', signal.sigpending())\nsignal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})", -SIGTERM, steps=ANY, usual=True),
    "alarm that raises": Program(
        "class TimeUp(Exception): pass\ndef up(*_): raise TimeUp\nsignal.signal(signal.SIGALRM, up)\ntrain(5)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.2)\ntry:\n    while True:\n        x = torch.randn(4, 4).requires_grad_()\n"
        "        x.sum().backward()\nexcept TimeUp:\n    print('up')\ntorch.manual_seed(1)\ntorch.set_grad_enabled(True)", usual=True),
    "real-time signals": Program(
        f"{HANDLER}train()\nfor n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):\n    signal.signal(n, handle)\n    signal_self(n)", usual=True),
    "SIGCHLD with a handler": Program(
        "died = []\nsignal.signal(signal.SIGCHLD, lambda *_: died.append(1))\ntrain()\nsubprocess.run(['true'])\n"
        "while not died:\n    time.sleep(0.01)\ntime.sleep(0.3)\nprint(len(died))", usual=True),
    "SIGCHLD that is ignored": Program(
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\ntrain()\nprint(subprocess.run(['false']).returncode)"),
    "wait for any child": Program(
        "train()\ntry:\n    os.waitpid(-1, os.WNOHANG)\n    print('a child')\nexcept ChildProcessError:\n    print('no child')\n"
        "child = os.fork()\nif not child:\n    os._exit(7)\nprint(os.wait()[0] == child)", usual=True),
    "fault handler": Program(
        "import faulthandler\nfaulthandler.enable()\nfaulthandler.register(signal.SIGUSR1, file=open('stack', 'w'), all_threads=False)\ntrain()\n"
        "signal_self(signal.SIGUSR1)\nprint(open('stack').read().splitlines()[:3], faulthandler.is_enabled())\nos.remove('stack')"),
    "asyncio": Program(
        "async def main():\n    for _ in range(5):\n        step()\n        await asyncio.sleep(0)\n    return len(asyncio.all_tasks())\nprint(asyncio.run(main()))"),
    "asyncio with handlers of signals": Program(
        "async def main():\n    got = asyncio.Event()\n    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, got.set)\n    train()\n"
        "    signal_self(signal.SIGTERM)\n    await got.wait()\n    print('got')\nasyncio.run(main())", usual=True),
}  # fmt: skip
