"""Programs that change the interpreter or the modules around them, or start in other ways."""

from exits.programs import ANY, Program

INTERPRETER = {
    "arguments that are wrong": Program(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float)\nparser.parse_args(['--lr', 'x'])", 2,
        "usage: train.py(.|\n)*invalid float", steps=None, usual=True),
    "module": Program("import __main__\nprint(__name__, __package__, __spec__.name)\ntrain()", command=("-m", "train"), usual=True),
    "trace function": Program(
        "seen = set()\ndef trace(frame, event, arg):\n    if frame.f_code.co_filename == __file__:\n        seen.add((frame.f_code.co_name, event))\n    return trace\n"
        "def loop():\n    train(5)\nsys.settrace(trace)\nloop()\nprint(sys.gettrace() is trace)\nsys.settrace(None)\nprint(sorted(seen))", usual=True),
    "cycles of the model": Program(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(4, 2)\n        self.own = self.forward\n    def forward(self, x): return self.layer(x)\n"
        "def once():\n    m = Net()\n    o = torch.optim.Adam(m.parameters())\n    m(torch.ones(1, 4)).sum().backward()\n    o.step()\n    return weakref.ref(m), weakref.ref(m.layer.weight), weakref.ref(o)\n"
        "train()\nrefs = once()\ngc.collect()\nprint([r() is None for r in refs])", steps=6, usual=True),
    "deep recursion": Program(
        "sys.setrecursionlimit(5000)\ndef deep(n): return 0 if not n else 1 + deep(n - 1)\ntrain()\nprint(deep(4900))", usual=True),
    "importer": Program(
        "class Finder:\n    def find_spec(self, name, path=None, target=None):\n        if name.startswith('mine'): print('asked', name)\nsys.meta_path.insert(0, Finder())\ntrain()\n"
        "try:\n    import mine\nexcept ImportError as error:\n    print(error)"),
    "print that is replaced": Program("kept = print\nlines = []\nbuiltins.print = lambda *a, **k: lines.append(a)\ntrain()\nbuiltins.print = kept\nprint(lines)"),
    "debugger": Program("import pdb\nfor n in range(5):\n    step()\n    if n == 2:\n        pdb.set_trace()\nprint('end')", input="p n\nc\n", usual=True),
}  # fmt: skip
