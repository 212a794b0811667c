"""Private names of torch: the one file that uses them.

Any version may change them. torch 2.13.0 and 2.14.1, with which the tests are run, have all of them, and so has 2.10.0,
whose compiled programs are wrong. What happens where one is gone is said at each.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

# How trees of tensors are taken apart, with what tensordict registered. Without them rl8x cannot be imported.
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

# Options of make_fx for shapes alone, beside tensors that the function itself holds. Without the private one, make_fx
# refuses it by name, and nothing can be compiled.
FAKE_TRACING: Final[Mapping[str, Any]] = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}

# Names of Inductor's without which nothing can be compiled, each with its module.
_INDUCTOR: Final = {
    "aot_compile": "torch._inductor",  # has C++ written of a graph, and built by AotCodeCompiler
    "standalone_compile": "torch._inductor",  # compiles a graph for an accelerator
    "AotCodeCompiler": "torch._inductor.codecache",  # a builder of our own takes the place of its `compile`
    "CppBuilder": "torch._inductor.cpp_builder",  # knows the command line of the C++ compiler
    "CppTorchDeviceOptions": "torch._inductor.cpp_builder",
    "pick_vec_isa": "torch._inductor.cpu_vec_isa",  # the vector instructions of the processor
    "register_lowering": "torch._inductor.lowering",  # teaches Inductor operators of ours
    "clone": "torch._inductor.lowering",
}
# What those load when they are first called: once, and not in each process that is forked to compile something.
_LOADED_AHEAD: Final = ("codegen.cpp", "codegen.cpp_wrapper_cpu", "compile_fx")

# Names of Inductor's by which it calls oneDNN's matmul kernels. Without them large matmuls are torch's usual ones.
_ONEDNN: Final = {
    "ExternKernel": "torch._inductor.ir",
    "FixedLayout": "torch._inductor.ir",
    "TensorBox": "torch._inductor.ir",
    "LinearUnary": "torch._inductor.mkldnn_ir",
    "_create_output_node": "torch._inductor.mkldnn_ir",
}


def inductor() -> SimpleNamespace:
    """Load what compiles programs, which takes a second or more, and return its names.

    Raises:
        RuntimeError: If this torch lacks one. `compile` is refused with that line; `auto` warns once and stays eager.
    """
    inductor = _taken(_INDUCTOR)
    for module in _LOADED_AHEAD:
        _loaded(f"torch._inductor.{module}")
    return inductor


def onednn() -> SimpleNamespace:
    """Return the names by which Inductor calls oneDNN's matmul kernels.

    Raises:
        RuntimeError: If this torch lacks one.
    """
    return _taken(_ONEDNN)


def _taken(names: Mapping[str, str]) -> SimpleNamespace:
    namespace = SimpleNamespace()
    for name, module in names.items():
        if not hasattr(_loaded(module), name):
            raise _missing(f"{module}.{name}")
        setattr(namespace, name.lstrip("_"), getattr(_loaded(module), name))
    return namespace


def _loaded(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _missing(str(error.name)) from error


def _missing(name: str) -> RuntimeError:
    return RuntimeError(f"torch {torch.__version__} has no {name}, which rl8x compiles with. Use torch 2.13 or 2.14")


def has_loaded_compiler() -> bool:
    """Whether torch's compiler has been imported. Under another name it never has: then no trace collects garbage."""
    return "torch._dynamo" in sys.modules


@contextlib.contextmanager
def one_fake_mode() -> Iterator[None]:
    """Have make_fx describe all tensors of a trace, `[*]` each, by one fake mode.

    For each tensor it makes one of its own, which looks through the whole call stack: half of what a trace takes.
    Without these names it does so.
    """
    try:
        guards = importlib.import_module("torch._guards")
        mode = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_fallback_kernels=True)
        context = guards.tracing(guards.TracingContext(mode))
    except (ModuleNotFoundError, AttributeError, TypeError):
        context = contextlib.nullcontext()
    with context:
        yield


def is_observed() -> bool:
    """Whether a transform of torch.func's, or a mode such as make_fx's or fake tensors', sees each operation.

    There are no public names for these. Without them, whatever is called may be observed: eager perceptrons then go
    through their layers, which takes longer.
    """
    transformed: bool = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)()
    modes: int = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)()
    return transformed or modes > 0


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x weight^T + bias` by oneDNN; see `matmul.linear`, whose probe finds where torch lacks it.

    Raises:
        AttributeError: If this torch lacks it. Large matmuls are then torch's usual ones.
    """
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def fused_adam(decoupled: bool) -> Any:
    """Return torch's fused kernel of a step of Adam, in place, with a learning rate that is a tensor, 0-d.

    None where this torch lacks it: Adam is then a formula of a dozen operators everywhere.

    Args:
        decoupled: Whether weight decay is that of AdamW.
    """
    kernel = getattr(torch.ops.aten, "_fused_adamw_" if decoupled else "_fused_adam_", None)
    return getattr(kernel, "tensor_lr", None)


class Substitution:
    """Calls a module under other weights, as `torch.func.functional_call` does, without searching for them each time.

    That search takes longer than a small module. A module's `_parameters` is where PyTorch itself looks weights up.

    Args:
        module: The module.
        names: The weights that are replaced, as `named_parameters` calls them.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self.module = module
        named = dict(module.named_parameters())
        order = {id(named[name]): i for i, name in enumerate(names)}
        self._places = [
            (owner, name, order[id(weight)])
            for owner in module.modules()
            for name, weight in owner._parameters.items()
            if id(weight) in order  # one that several modules share is replaced in all
        ]

    def __call__(self, weights: Sequence[Tensor], *inputs: Any) -> Any:
        """Call the module on inputs, under weights `[*]` in the order of the names."""
        before = [owner._parameters[name] for owner, name, _ in self._places]
        for owner, name, i in self._places:
            owner._parameters[name] = weights[i]  # type: ignore[assignment] # any tensor does
        try:
            return self.module(*inputs)
        finally:
            for (owner, name, _), weight in zip(self._places, before, strict=True):
                owner._parameters[name] = weight


def is_view(node: Any) -> bool:
    """Whether an operation of a traced graph, a node, returns views of what it is given, and writes nothing.

    Raises:
        RuntimeError: If this torch says nothing of operations' schemas. A function that has to be split over ranks is
            then refused, or runs eagerly with `auto`.
    """
    if not hasattr(torch.ops.aten.view.default, "_schema"):
        raise _missing("torch._ops.OpOverload._schema")
    if node.op != "call_function":
        return False
    if not hasattr(node.target, "_schema"):
        return node.target is operator.getitem and is_view(node.args[0])
    returned = [each.alias_info for each in node.target._schema.returns]
    return bool(returned) and all(each is not None and not each.is_write for each in returned)


def written_by(node: Any) -> list[Any]:
    """Return the nodes of a traced graph that an operation, a node, writes to; see `is_view`."""
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return []
    arguments = list[Any]()
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            arguments += given if isinstance(given, list | tuple) else [given]
    return arguments


def copy_each(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each of `tensors` `[*]` into the one at its place; one by one, with the same bits, where torch lacks it."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(list(into), list(tensors))
    else:
        for one, other in zip(into, tensors, strict=True):
            one.copy_(other)


def add_to_each(sums: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Add each of `tensors` `[*]` to the one at its place; one by one, with the same bits, where torch lacks it."""
    if hasattr(torch, "_foreach_add_"):
        torch._foreach_add_(list(sums), list(tensors))
    else:
        for one, other in zip(sums, tensors, strict=True):
            one.add_(other)
