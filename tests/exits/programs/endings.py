"""Programs that end in unusual ways: by exit codes, exceptions, and what runs at exit."""

import signal

from exits.programs import ANY, Program

FUNCTION = """
def main():
    log = open("log.txt", "w")
    atexit.register(lambda: log.write("at exit"))
    train()
    log.write("trained")
"""

ENDINGS = {
    "end": Program("train()", usual=True),
    "exit with a number above 255": Program("train()\nsys.exit(2**70 + 7)", 255, usual=True),
    "exit with a negative number": Program("train()\nsys.exit(-1)", 255),
    "exit with a list": Program("train()\nsys.exit(['a', 1])", 1, r"^\['a', 1\]$"),
    "exit in finally": Program("train()\ntry:\n    1 / 0\nfinally:\n    sys.exit(5)", 5),
    "exit of a subclass": Program("class Leave(SystemExit): pass\ntrain()\nraise Leave(6)", 6),
    "exit by the builtin": Program("train()\nexit(7)", 7),
    "os._exit": Program("train()\nprint('last', flush=True)\nos._exit(4)", 4, steps=ANY, usual=True),
    "exception": Program("train()\ndef fail():\n    raise ValueError('of the script')\nfail()", 1, "ValueError: of"),
    "exception before training": Program("raise ValueError('early')", 1, "early", steps=None),
    "chained exceptions": Program(
        "train()\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n    try:\n        raise KeyError('a') from error\n"
        "    except KeyError:\n        raise ValueError('b')", 1, "direct cause(.|\n)*During handling", usual=True),
    "exception group": Program(
        "train()\nraise ExceptionGroup('two', [ValueError(1), ExceptionGroup('one', [TypeError(2)])])", 1,
        r"two \(2 sub-exceptions\)"),
    "exception with notes": Program("train()\nerror = ValueError('a')\nerror.add_note('a note')\nraise error", 1, "a note"),
    "exception without text": Program(
        "class Broken(Exception):\n    def __str__(self):\n        raise TypeError\ntrain()\nraise Broken", 1,
        "exception str"),
    "exception that is no Exception": Program("class Other(BaseException): pass\ntrain()\nraise Other('x')", 1, "Other: x"),
    "GeneratorExit": Program("train()\nraise GeneratorExit", 1, "GeneratorExit"),
    "syntax error in code": Program("train()\nexec(compile('x = (', 'other.py', 'exec'))", 1, "SyntaxError"),
    "syntax error with its own file": Program("train()\nraise SyntaxError('odd', ('none.py', 3, 1, 'x = (', 3, 2))", 1, "none.py"),
    "recursion without end": Program("def again(n):\n    return again(n + 1) + 1\ntrain()\nagain(0)", 1, "Previous line repeated"),
    "error in a backward hook": Program(
        "train()\nx = torch.ones(2, requires_grad=True)\nx.register_hook(lambda g: 1 / 0)\nx.sum().backward()", 1, "ZeroDivision"),
    "error in a function of autograd": Program(
        "class F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x * 2\n"
        "    @staticmethod\n    def backward(ctx, g):\n        raise LookupError('in backward')\n"
        "train()\nF.apply(torch.ones(1, requires_grad=True)).sum().backward()", 1, "in backward", usual=True),
    "excepthook": Program("sys.excepthook = lambda *e: print('hook', e[0], len(__import__('traceback').extract_tb(e[2])))\ntrain()\n1 / 0", 1),
    "excepthook that fails": Program(
        "def hook(*_):\n    raise LookupError('of the hook')\nsys.excepthook = hook\ntrain()\nraise ValueError('first')", 1,
        "Error in sys.excepthook(.|\n)*of the hook(.|\n)*Original exception was(.|\n)*first", usual=True),
    "excepthook that leaves": Program("def hook(*_):\n    sys.exit(8)\nsys.excepthook = hook\ntrain()\nraise ValueError('first')", 8),
    "excepthook that is missing": Program("train()\ndel sys.excepthook\nraise ValueError('first')", 1, "sys.excepthook is missing"),
    "excepthook that is None": Program("sys.excepthook = None\ntrain()\nraise ValueError('first')", 1, "Error in sys.excepthook"),
    "traceback limit": Program("def f(n):\n    return f(n - 1) if n else 1 / 0\nsys.tracebacklimit = 2\ntrain()\nf(5)", 1, "ZeroDivision"),
    "unraisable error": Program(
        "sys.unraisablehook = lambda a: print('unraisable', a.exc_type, a.err_msg)\nclass D:\n    def __del__(self): raise ValueError\n"
        "train()\nD()\nlate = D()"),
    "errors of finalizers": Program(
        "class D:\n    def __del__(self): raise ValueError('finalizer')\ntrain()\nD()\nlate = D()", 0,
        "Exception ignored(.|\n)*Exception ignored"),
    "exit in a finalizer": Program("class D:\n    def __del__(self): sys.exit(9)\ntrain()\nD()", 0, "Exception ignored(.|\n)*SystemExit"),
    "finalizers at exit": Program(
        "class D:\n    def __init__(self, n): self.n = n\n    def __del__(self, write=os.write): write(1, self.n)\n"
        "a = D(b'module ')\nmodel.kept = D(b'model ')\ncycle = [D(b'cycle ')]\ncycle.append(cycle)\n"
        "weakref.finalize(model, lambda: print('finalized'))\ntrain()", usual=True),
    "errors at exit": Program(
        "def fail(): raise ValueError('at exit')\ntrain()\natexit.register(lambda: print('first'))\natexit.register(fail)\n"
        "atexit.register(lambda: print('last'))", 0, "Exception ignored in atexit(.|\n)*at exit|Error in atexit", usual=True),
    "exit at exit": Program("train()\natexit.register(lambda: print('first'))\natexit.register(sys.exit, 11)", 0, "SystemExit"),
    "training at exit": Program("train()\natexit.register(lambda: (train(2), save()))"),
    "registration at exit": Program("train()\natexit.register(lambda: atexit.register(print, 'nested'))"),
    "fork at exit": Program(
        "def at_exit():\n    sys.stdout.flush()\n    child = os.fork()\n    if not child:\n        os._exit(3)\n"
        "    print('child', os.waitpid(child, 0)[1])\ntrain()\natexit.register(at_exit)"),
    "exit stack": Program(
        "@contextlib.contextmanager\ndef held(n):\n    print('in', n)\n    try:\n        yield\n    finally:\n        print('out', n)\n"
        "with contextlib.ExitStack() as stack:\n    for n in range(3):\n        stack.enter_context(held(n))\n    stack.callback(save)\n"
        "    train()\n    raise ValueError('inside')", 1, "inside"),
    "generator that is closed late": Program(
        "def batches():\n    try:\n        while True:\n            yield torch.randn(8, 4)\n    finally:\n        print('closed')\n"
        "source = batches()\nfor _ in range(5):\n    next(source)\n    step()"),
    "file that is not closed": Program("log = open('log.txt', 'w')\nlog.write('not flushed')\ntrain()"),
    "files of functions that fail": Program(f"{FUNCTION}    raise ValueError('late')\nmain()", 1, "late"),
    "files of functions that exit": Program(f"{FUNCTION}    sys.exit(3)\nmain()", 3),
    "files of functions that are interrupted": Program(
        f"{FUNCTION}    signal_self(signal.SIGINT)\n    time.sleep(60)\nmain()", -signal.SIGINT, "KeyboardInterrupt", usual=True),
    "files of frames in a cycle": Program(
        f"{FUNCTION}    try:\n        1 / 0\n    except ZeroDivisionError as error:\n        kept = error\n        raise\nmain()", 1, "ZeroDivision"),
    "last value at exit": Program(
        "import traceback\ndef at_exit():\n    print(repr(sys.last_value), [f.name for f in traceback.extract_tb(sys.last_traceback)])\n"
        "atexit.register(at_exit)\ntrain()\ndef fail():\n    raise LookupError('x')\nfail()", 1, "LookupError: x", usual=True),
}  # fmt: skip
