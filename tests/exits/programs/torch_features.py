"""Programs that use unusual parts of PyTorch, or change its state."""

from exits.programs import ANY, Program

LOOP = """
def loop(m, steps=5, make=None, loss=lambda y: y.square().mean()):
    o = (make or (lambda p: torch.optim.SGD(p, 0.1)))(m.parameters())
    for _ in range(steps):
        o.zero_grad()
        loss(m(torch.randn(8, 4))).backward()
        o.step()
    print(hashed(*(p for p in m.parameters() if not p.is_sparse)))
"""
NET = f"{LOOP}net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))\n"

TORCH = {
    "checkpoint": Program("train(3)\nsave()\ntrain(2)\nstate_ = torch.load('checkpoint.pt')\nmodel.load_state_dict(state_['model'])\noptimizer.load_state_dict(state_['optimizer'])\ntrain(2)\nsave('again.pt')", steps=7, usual=True),
    "whole model as a file": Program("train()\ntorch.save(model, 'model.pt')\ntorch.save(optimizer, 'optimizer.pt')\nprint(torch.load('model.pt', weights_only=False))", usual=True),
    "deterministic algorithms": Program(f"torch.use_deterministic_algorithms(True)\n{NET}loop(net)\ntorch.set_deterministic_debug_mode('error')"),
    "jit.script": Program(f"{NET}net = torch.jit.script(net)\nloop(net)\ntorch.jit.save(net, 'net.pt')\nos.remove('net.pt')\nprint(net.code)"),
    "jit.trace": Program("train()\nt = torch.jit.trace(model, torch.ones(1, 4))\nprint(t(torch.ones(2, 4)), t.graph)", usual=True),
    "export": Program("train()\nprint(torch.export.export(model, (torch.ones(2, 4),)).graph_module.code)"),
    "compile": Program(f"{NET}loop(torch.compile(net, backend='eager'))", usual=True),
    "hooks of the script": Program(
        "warnings.simplefilter('ignore')\nseen = []\nmodel.register_forward_hook(lambda *a: seen.append('forward'))\nmodel.register_full_backward_hook(lambda *a: seen.append('backward'))\n"
        "model[0].weight.register_hook(lambda g: seen.append('weight'))\nmodel[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append('accumulated'))\n"
        "optimizer.register_step_pre_hook(lambda *a: seen.append('before'))\noptimizer.register_step_post_hook(lambda *a: seen.append('after'))\ntrain()\nprint(seen)", usual=True),
    "global hooks of the script": Program(
        "seen = []\nnn.modules.module.register_module_forward_hook(lambda *a: seen.append(type(a[0]).__name__))\nfrom torch.optim import optimizer as module\nmodule.register_optimizer_step_post_hook(lambda *a: seen.append('step'))\ntrain()\nprint(seen)"),
    "functions as torch has them": Program(
        "import inspect, pickle\nfor f in (torch.save, torch.load, torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward, nn.utils.clip_grad_norm_, torch.compile, nn.functional.cross_entropy, nn.functional.dropout, nn.Module.__call__, nn.Module.state_dict, torch.optim.SGD.step):\n"
        "    print(f.__module__, f.__qualname__, inspect.signature(f), hash(f.__doc__ or '') != 1, type(f).__name__)\n    print(len(pickle.dumps(f)))\ntrain()", usual=True),
}  # fmt: skip
