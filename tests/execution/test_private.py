"""Each private name of torch is there in this version, and what is promised happens where one is not."""

import pytest
import torch
from tests.probes import described

from rl8x.execution import matmul, private
from rl8x.execution.artifacts import Artifacts
from rl8x.execution.compiler import Compiler
from rl8x.execution.lowering import lower


def test_this_torch_has_all_of_inductors_names():
    assert private.inductor()
    assert private.onednn()


@pytest.mark.parametrize("name", ["_are_functorch_transforms_active", "_len_torch_dispatch_stack"])
def test_what_sees_operations_is_known_here_and_assumed_elsewhere(name, monkeypatch):
    assert not private.is_traced()
    monkeypatch.delattr(torch._C, name)
    assert private.is_traced()


def test_this_torch_calls_onednn():
    x, weight = torch.arange(6.0).view(2, 3), torch.eye(3)
    assert torch.equal(private.onednn_linear(x, weight, torch.ones(3)), x + 1.0)


def test_without_onednn_matmuls_are_torchs_own(monkeypatch):
    monkeypatch.setattr(matmul.Path, "read_text", lambda path: "AuthenticAMD")
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    assert not matmul.has_fast_linear.__wrapped__()
    monkeypatch.setitem(private._ONEDNN, "NoSuchNode", "torch._inductor.mkldnn_ir")
    assert not matmul.lower_linear.__wrapped__()


@pytest.mark.parametrize("module", ["torch._inductor.codecache", "torch._inductor.no_such_module"])
def test_a_missing_name_of_inductors_is_one_clear_line(module, monkeypatch, tmp_path):
    monkeypatch.setitem(private._INDUCTOR, "NoSuchName", module)
    with pytest.raises(RuntimeError) as error:
        lower(described(lambda x: [x + 1.0], torch.ones(3))[0], tmp_path / "program.so")
    missing = module if "no_such" in module else f"{module}.NoSuchName"
    expected = f"torch {torch.__version__} has no {missing}, which rl8x compiles with. Use torch 2.13 or 2.14"
    assert str(error.value) == expected


def test_the_compilers_process_says_which_name_is_missing(monkeypatch, tmp_path):
    code = "import torch._inductor.codecache as codecache\ndel codecache.AotCodeCompiler\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)  # where the process searches too
    monkeypatch.setattr(Compiler, "_start", Compiler._start.__wrapped__)  # a Python of its own
    compiler = Compiler(Artifacts(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match=r"has no torch\._inductor\.codecache\.AotCodeCompiler, which rl8x compiles"):
        compiler.library(described(lambda x: [x + 1.0], torch.ones(3))[0].to_json())
    compiler.stop()


class Tied(torch.nn.Module):
    """Two layers with one weight, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x, fails=False):
        if fails:
            raise ValueError("it fails")
        return self.second(self.first(x)) + self.frozen


def test_a_module_is_called_under_other_weights_and_has_its_own_afterwards():
    module, x = Tied(), torch.randn(2, 3)
    names = ["first.weight", "first.bias"]
    weights = [torch.randn(3, 3, requires_grad=True), torch.randn(3)]
    own = dict(module.named_parameters(remove_duplicate=False))
    under = private.Substitution(module, names)
    result = under(weights, x)
    torch.testing.assert_close(result, torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,)))
    (gradient,) = torch.autograd.grad(result.sum(), weights[0])
    assert gradient.any()
    with pytest.raises(ValueError, match="it fails"):
        under(weights, x, True)
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in own.items())
    assert module.first.weight is module.second.weight
