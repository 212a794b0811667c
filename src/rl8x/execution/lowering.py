"""Compiles a traced graph to a shared library: decompose, lower with Inductor, build the C++ that Inductor generates.

It runs in the compiler's processes, and is the only module that depends on internals of AOTInductor.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.execution import kernels, private
from rl8x.execution.traces import KEPT

# Number of readers from which a value is worth memory of its own, and the most terms of a sum that is unrolled.
_MANY: Final = 64
_FEW: Final = 8
# -O2 builds in five seconds where -O3 takes six. The programs are as fast, since Inductor emits explicit vector code.
_OPTIONS: Final = ("-fvisibility=hidden", "-O2", "-g0", "-w")
_SHIMS: Final = ("c/shim", "c/shim_cpu", "generated/c_shim_aten", "generated/c_shim_cpu")
_HEADERS: Final = ("cpp_prefix", *(f"aoti_torch/{name}" for name in _SHIMS))
_HOST: Final = Path(__file__).parent / "host.h"
# In Inductor's generated code: the calls of kernels and operators, the kernels' headers, and the lines among the calls
# that only its own runtime needs.
_CALLS: Final = re.compile(r"void AOTInductorModel::run_impl\(.*?\) \{\n(.*?)\n\} // AOTInductorModel::run_impl", re.S)
_INCLUDES: Final = re.compile(r"^#include .*\n", re.M)
_OF_ITS_RUNTIME: Final = re.compile(
    r"^ *(__check_inputs_outputs|\[\[maybe_unused\]\] auto& kernels|if \(_check_aoti_runtime).*\n", re.M
)
# Operators of torch that return new memory, or write to the outputs passed to them.
_OWN_RESULTS: Final = re.compile(r"aoti_torch_\w*(_out|linear_pointwise)\(|aoti_torch_(empty_strided|item_\w+)\(")


def lower(program: str, library: Path) -> None:
    """Compile the text of a trace to a shared library."""
    code, inputs, threads = json.loads(program)
    inductor = private.inductor()
    with torch.no_grad():
        graph, examples = fused(code, inputs)

        def link(graph: Any, wrapper: str, kernels: str, operators: str | None, **_: Any) -> str:
            """Build the C++ that Inductor generated; replaces Inductor's own builder."""
            if operators or graph.constants:
                raise RuntimeError("one of its operators has no C++ function")
            build(source_of(wrapper, kernels, inputs, threads), library)
            return str(library)

        # `vec_isa_ok`: as in `private.load_inductor`.
        options = {"cpp.threads": threads, "cpp.vec_isa_ok": True, "fx_graph_cache": False}
        with mock.patch.object(inductor.AotCodeCompiler, "compile", link):
            inductor.aot_compile(graph, tuple(examples), options=options)


def compiled_here(graph: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a traced graph for an accelerator, in this process, for arguments like `examples`, `[*]` each."""
    # Traced again, since the compiler needs the metadata that tracing records for every argument.
    traced = make_fx(graph, decomposition_table=kernels.ADAM)(*[tensor.detach().clone() for tensor in examples])
    _lower_operators()
    with torch.no_grad():
        return private.inductor().standalone_compile(  # type: ignore[no-any-return]
            traced, list(examples), dynamic_shapes="from_example_inputs", options={}
        )


def fused(code: str, inputs: Sequence[Any]) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Return the graph to compile, with matmuls decomposed, and example inputs, `[*]` each; see `Trace.text`."""
    # Probed now, since tensors have no values to compare while tracing.
    kernels.has_fast_linear()
    _lower_operators()
    examples = [torch.empty_strided(*each, dtype=getattr(torch, dtype)).zero_() for *each, dtype in inputs]
    names: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
    exec(code, names)  # the source that torch.fx generated in the parent process
    table = kernels.MATMULS | kernels.ADAM
    function = functools.partial(names["forward"], None)
    graph = make_fx(function, decomposition_table=table, **private.FAKE_TRACING)(*examples)
    keep_values(graph)
    return graph, examples


def keep_values(traced: torch.fx.GraphModule) -> None:
    """Compute values once that Inductor would compute for each of their readers, or in code that is not vectorised.

    Numbers that scale a vector or all rows are fused into the loop over it. The C++ compiler cannot hoist them, since
    the loop also writes memory that might alias its inputs: gradient clipping and Adam's bias correction then cost two
    square roots and three divisions for every 16 weights, and normalising an observation a root and a division in
    float64 for every number. Without memory for them compiled PPO takes 1.12 times as long on 16 x 128 steps of
    Pendulum with minibatches of 64, and updates of HalfCheetah with minibatches of 256 1.1 times.

    A sum of few terms, such as the log-probability of an action, is unrolled, and its terms are then computed one by
    one: without memory for them updates of SAC of 256 rows take 1.05 times as long. (CPU time of one thread, Xeon,
    torch 2.13.)
    """
    graph = traced.graph
    for node in list(graph.nodes):
        users = [user for user in node.users if _is_spread(node, user) or _is_short_sum(node, user)]
        if users:
            with graph.inserting_after(node):
                computed = graph.call_function(KEPT, (node,))
            computed.meta.update(node.meta)
            for user in users:
                user.replace_input_with(node, computed)
    traced.recompile()


def _is_spread(node: torch.fx.Node, user: torch.fx.Node) -> bool:
    """Return whether a node's numbers are computed (no view or constant), and each is read by many of a user's."""
    target, size = node.target, _numel(node)
    if not isinstance(target, type(KEPT)) or target.is_view or not node.all_input_nodes:
        return False
    # A bias, which `kernels.product` negates, is as fast without; reduced and written values are in memory already.
    cheap = torch.Tag.reduction in target.tags or target is torch.ops.aten.neg.default
    if torch.Tag.inplace in target.tags or (cheap and size > 1) or not 0 < _MANY * size <= _numel(user):
        return False
    return bool(node.meta["val"].is_floating_point())


def _is_short_sum(node: torch.fx.Node, user: torch.fx.Node) -> bool:
    """Return whether a node's elements are computed one by one, and a user sums few of them at a time."""
    if user.target is not torch.ops.aten.sum.dim_IntList or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    return _MANY <= _numel(node) <= _FEW * _numel(user)


def _numel(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0


@functools.cache
def _lower_operators() -> None:
    """Register lowerings of our own operators with Inductor."""
    inductor = private.inductor()

    def computed(x: Any) -> Any:
        """Give the result a buffer of its own."""
        result = inductor.clone(x)
        result.realize()
        return result

    def linear(x: Any, weight: Any, bias: Any) -> Any:
        """Call oneDNN, as Inductor's own lowering does for constant weights."""
        node = inductor.LinearUnary
        inputs = [node.require_contiguous(node.realize_input(x)), node.realize_input(weight)]
        inputs += [] if bias is None else [node.realize_input(bias)]
        options = [*([None] if bias is None else []), "none", [-1], ""]
        size = [x.get_size()[0], weight.get_size()[0]]
        layout = inductor.FixedLayout(device=x.get_device(), dtype=x.get_dtype(), size=size)
        called = node(layout=layout, inputs=inputs, constant_args=options)
        return type(x).create(inductor.create_output_node(called))

    for operator, lowering in ((KEPT, computed), (kernels.LINEAR, linear)):
        inductor.register_lowering(operator, type_promotion_kind=None)(lowering)


def source_of(wrapper: str, kernels: str, inputs: Sequence[Any], threads: int) -> str:
    """Return a program's source, assembled from the code that Inductor generated."""
    found = _CALLS.search(wrapper)
    if found is None:
        raise RuntimeError(f"torch {torch.__version__} generates C++ in a form that rl8x does not know")
    calls = _OF_ITS_RUNTIME.sub("", found[1].replace("this->device_idx_", "0"))
    keeps = not all(_OWN_RESULTS.fullmatch(name) for name in re.findall(r"aoti_torch_\w+\(", calls))
    calls = re.sub(r"\bcached_torch_(\w+)", r"aoti_torch_\1()", calls)
    if re.search(r"^ *(const )?int64_t int_array", calls, re.M):
        raise RuntimeError("it has shapes that depend on values")
    layouts = ", ".join(f"{{{shape}, {stride}, aoti_torch_dtype_{dtype}()}}" for shape, stride, dtype in inputs)
    return "\n".join(
        [
            *(f"#include <torch/csrc/inductor/{name}.h>" for name in _HEADERS),
            _INCLUDES.sub("", kernels),
            f"#define KEEPS_MEMORY {str(keeps).lower()}",
            f"#define THREADS {threads}",
            f"#define INPUTS {layouts.translate(str.maketrans('[]', '{}'))}",
            _HOST.read_text(),
            "static void body(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles) {",
            calls,
            "}",
        ]
    )


def build(source: str, library: Path) -> None:
    """Compile C++ to a shared library, as torch would; a `RuntimeError` begins with the compiler's first error."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as name:
        written = Path(name, "program.cpp")
        written.write_text(source)
        inductor = private.inductor()
        settings = inductor.CppTorchDeviceOptions(
            device_type="cpu", aot_mode=True, vec_isa=inductor.pick_vec_isa(), extra_flags=_OPTIONS
        )
        builder = inductor.CppBuilder("program", [str(written)], settings, name)
        done = subprocess.run(
            shlex.split(builder.get_command_line()),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=name,  # also searched for headers and libraries, by an empty entry of CPATH or LIBRARY_PATH
        )
        if done.returncode:
            errors = [line for line in done.stdout.splitlines() if "error:" in line]  # skips lines on includes
            raise RuntimeError("\n".join([*errors[:1], done.stdout]))
        Path(builder.get_target_file_path()).replace(library)
