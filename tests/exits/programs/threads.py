"""Programs with threads and with processes of their own."""

from exits.programs import Program

MAIN = "if __name__ == '__main__':\n"

THREADS = {
    "thread pool that is shut down at exit": Program(
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\ntrain()\n"
        "for n in range(3):\n    pool.submit(lambda n=n: (time.sleep(0.1), open(f'part{n}', 'w').write('x')))", usual=True),
}  # fmt: skip

WORK = """
def work(x):
    torch.manual_seed(x)
    return torch.rand(2).tolist(), threading.active_count(), [s.name for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, i): return torch.full((4,), float(i))
"""


def pool(method: str, *, usual: bool = False) -> Program:
    return Program(
        f"{WORK}{MAIN}    from concurrent.futures import ProcessPoolExecutor\n    train()\n"
        f"    with ProcessPoolExecutor(1, multiprocessing.get_context('{method}')) as pool:\n"
        "        print(list(pool.map(work, [1, 2])))\n        save()\n        print(sorted(pool.submit(torch.load, 'checkpoint.pt').result()))",
        usual=usual,
    )  # fmt: skip


def loader(options: str, *, usual: bool = False) -> Program:
    return Program(
        f"{WORK}{MAIN}    for _ in range(2):\n        for x in torch.utils.data.DataLoader(Rows(), batch_size=4, shuffle=True, {options}):\n"
        "            optimizer.zero_grad()\n            model(x).square().mean().backward()\n            optimizer.step()\n    while threading.active_count() > 1:\n        time.sleep(0.01)", steps=8, usual=usual,
    )  # fmt: skip


PROCESSES = {
    "process pool (spawn)": pool("spawn"),
    "process pool (forkserver)": pool("forkserver"),
    "fork": Program(
        "train(3)\nsys.stdout.flush()\nchild = os.fork()\nif not child:\n    train(2)\n    save('child.pt')\n    os._exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\ntrain(2)", usual=True),
    "fork that goes on as the script": Program(
        "train(3)\nsys.stdout.flush()\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\ntrain(2)\nprint('child' if not child else 'parent')", usual=True),
    "fork that fails": Program(
        "train()\nsys.stdout.flush()\nchild = os.fork()\nif not child:\n    raise ValueError('in the child')\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))", 0, "in the child", usual=True),
    "functions at fork": Program(
        "os.register_at_fork(before=lambda: print('before'), after_in_parent=lambda: print('parent'))\ntrain()\nsys.stdout.flush()\nchild = os.fork()\nif not child:\n    os._exit(0)\n"
        "os.waitpid(child, 0)"),
    "a process of itself": Program(
        "if sys.argv[1:]:\n    print('inner', sys.argv[1:])\n    train(2)\n    sys.exit(3)\ntrain()\nsys.stdout.flush()\n"
        "done = subprocess.run([sys.executable, __file__, 'x'], capture_output=True, text=True)\nprint(done.returncode, done.stdout.splitlines()[0], done.stderr)", usual=True),
    "loader with forked workers": loader("num_workers=2, multiprocessing_context='fork'", usual=True),
    "two ranks": Program(
        "import torch.distributed as dist\ndef rank(n, path):\n    dist.init_process_group('gloo', init_method=f'file://{path}', rank=n, world_size=2)\n"
        "    m = nn.parallel.DistributedDataParallel(model)\n    for _ in range(3):\n        optimizer.zero_grad()\n        m(torch.randn(8, 4)).square().mean().backward()\n"
        f"        optimizer.step()\n    save(f'rank{{n}}.pt')\n    dist.destroy_process_group()\n{MAIN}    train()\n"
        "    import tempfile\n    with tempfile.TemporaryDirectory() as place:\n        torch.multiprocessing.spawn(rank, (place + '/store',), nprocs=2)"),
}  # fmt: skip
