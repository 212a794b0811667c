"""Each private name of torch is there in this version, and what is promised happens where one is not."""

import ast
import re
from pathlib import Path

import pytest
import torch
from tests.probes import described

from rl8x.execution import private
from rl8x.execution.artifacts import Artifacts
from rl8x.execution.compiler import Compiler


def test_few_private_names_are_used_and_this_torch_has_all():
    """Names that begin with `_`, of modules or on the way to them, and those of Inductor."""
    source = ast.parse(Path(private.__file__).read_text())
    attributes = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    texts = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {name for name in attributes | texts if re.fullmatch(r"_[a-zA-Z]\w+", name)} - {"_places", "_C"}
    imported = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom) and "._" in str(node.module)]
    names |= {alias.name for node in imported for alias in node.names} | private._INDUCTOR.keys() | {"check_build"}
    assert len(names | {"_should_skip_dynamo"}) <= 25, sorted(names)
    assert private.inductor()


@pytest.mark.parametrize("name", ["_are_functorch_transforms_active", "_len_torch_dispatch_stack"])
def test_what_sees_operations_is_known_here_and_assumed_elsewhere(name, monkeypatch):
    assert not private.is_traced()
    monkeypatch.delattr(torch._C, name)
    assert private.is_traced()


@pytest.mark.long
def test_a_missing_name_is_one_clear_line_in_the_compilers_process_too(monkeypatch, tmp_path):
    code = "import torch._inductor.codecache as codecache\ndel codecache.AotCodeCompiler\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)  # where the process searches too
    monkeypatch.setattr(Compiler, "start", Compiler.start.__wrapped__)  # a Python of its own
    compiler = Compiler(Artifacts(tmp_path / "cache"))
    missing = rf"not {re.escape(torch.__version__)}: module 'torch\._inductor\.codecache' has no .* 'AotCodeCompiler'$"
    with pytest.raises(RuntimeError, match=rf"^rl8x compiles with torch 2\.13 to 2\.15, {missing}"):
        compiler.library(described(lambda x: [x + 1.0], torch.ones(3))[0])
    compiler.stop()


def test_a_module_is_called_under_other_weights_and_has_its_own_afterwards():
    module, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), torch.randn(2, 3)
    module[1].weight = module[0].weight  # one weight of two layers
    names, weights = ["0.weight", "0.bias"], [torch.randn(3, 3, requires_grad=True), torch.randn(3)]
    own = dict(module.named_parameters(remove_duplicate=False))
    under = private.Substitution(module, names)
    result = under(weights, x)
    torch.testing.assert_close(result, torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (x,)))
    assert torch.autograd.grad(result.sum(), weights[0])[0].any()
    with pytest.raises(TypeError):
        under(weights, "no numbers")
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in own.items())
