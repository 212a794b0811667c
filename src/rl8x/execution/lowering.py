"""Compiles what was traced to a shared library: decompose, lower with Inductor, build the C++ that it writes.

Runs in the compiler's own processes. The one module that knows how torch's ahead-of-time compiler works inside.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch._inductor
from torch import Tensor
from torch._inductor import codecache, cpp_builder, cpu_vec_isa
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.execution import matmul
from rl8x.execution.artifacts import key_of
from rl8x.execution.hoisting import hoist_scalars
from rl8x.execution.operators import looped
from rl8x.execution.traces import Description

# The functions by which a library is called, which Inductor writes into each: built once and linked to all.
_INTERFACE: Final = Path(torch._inductor.__file__).parent / "codegen" / "aoti_runtime" / "interface.cpp"
_MODEL: Final = "#include <torch/csrc/inductor/aoti_runtime/model.h>\n"
# Weights would lie between these; a program has none, since all that it reads is given at each call.
_NO_CONSTANTS: Final = "unsigned char _binary_constants_bin_start[16]; unsigned char _binary_constants_bin_end[16];\n"
# Probing what the processor and the C++ compiler know took four compilations; a compiler that does not know says so.
_SETTINGS: Final = {"cpp.vec_isa_ok": True, "fx_graph_cache": False}


def lower(description: Description, library: Path, shared: Path) -> None:
    """Compile a described program.

    Args:
        description: The program.
        library: Where the shared library is written.
        shared: Folder of what programs share.

    Raises:
        Exception: Whatever the compilers raise where they cannot.
    """
    with torch.no_grad():
        graph, examples = fused(description)
        link = functools.partial(_build, library=library, shared=shared)
        options = {"cpp.threads": description.threads, **_SETTINGS}
        with mock.patch.object(codecache.AotCodeCompiler, "compile", link):
            torch._inductor.aot_compile(graph, tuple(examples), options=options)


def compiled_here(graph: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a traced graph for an accelerator, in this process.

    Args:
        graph: The graph.
        examples: What it is called with, `[*]` each.
    """
    # Traced once more: the compiler needs metadata of every argument, which only tracing gives.
    traced = make_fx(graph)(*[tensor.detach().clone() for tensor in examples])
    with torch.no_grad():
        return torch._inductor.standalone_compile(
            traced, list(examples), dynamic_shapes="from_example_inputs", options={}
        )


def fused(description: Description) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Return the graph that is compiled, loops and kernels for matmuls included, and examples of its inputs."""
    # Probed now: what is called below is traced, and has no values to compare.
    _ = matmul.has_fast_linear() and matmul.lower_linear()
    function = _read(description.code)
    inputs = [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype)).zero_()
        for shape, stride, dtype in description.inputs
    ]
    loop = description.loop
    fake: Any = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    once = make_fx(function, decomposition_table=matmul.DECOMPOSITIONS, **fake)
    graph = once(*(inputs if loop is None else loop.first(inputs[:-1])))
    hoist_scalars(graph)
    if loop is None:
        return graph, inputs
    [output] = graph.graph.find_nodes(op="output")
    results = [torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype) for node in output.args[0]]
    return make_fx(looped(graph, loop, results), **fake)(*inputs), inputs


def _read(code: str) -> Callable[..., Sequence[Tensor]]:
    """Return the function that torch.fx wrote as source."""
    names: dict[str, Any] = {"torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan")}
    exec(code, names)  # of this user's own process
    return functools.partial(names["forward"], None)


def _build(
    graph: Any,
    wrapper_code: str,
    kernel_code: str,
    operators: str | None,
    *,
    library: Path,
    shared: Path,
    **_: Any,
) -> str:
    """Build what Inductor wrote; takes the place of its own builder, which compiles one file after the other.

    Half of each file's compilation went into functions that are the same in all programs.
    """
    if operators or graph.constants:
        raise RuntimeError("an operator of it has no C++ function")
    interface = _INTERFACE.read_text().strip()
    if interface not in wrapper_code:
        raise RuntimeError(f"torch {torch.__version__} writes programs in another form than is known")
    wrapper_code = wrapper_code.replace(interface, _MODEL)
    with tempfile.TemporaryDirectory(prefix="rl8x-compile-") as name:
        folder = Path(name)
        steps = [
            _compilation(folder, "wrapper", wrapper_code, min_optimize=True),
            _compilation(folder, "kernels", kernel_code),
        ]
        objects = [*_finished(steps), _interface_object(shared)]
        _move(_finished([_compiler(folder, "program", objects)])[0], library)
    return str(library)


def build(source: str, library: Path) -> None:
    """Compile C++ source that uses torch's headers to a shared library."""
    with tempfile.TemporaryDirectory(prefix="rl8x-compile-") as name:
        _move(_finished([_compilation(Path(name), "library", source, compile_only=False)])[0], library)


_Step = tuple[subprocess.Popen[str], Path]
_OPTIONS: Final[dict[str, Any]] = {"device_type": "cpu", "aot_mode": True}


def _compilation(folder: Path, name: str, code: str, **options: Any) -> _Step:
    """Begin to compile a file."""
    source = folder / f"{name}.cpp"
    source.write_text(code)
    return _compiler(folder, name, [source], **{"compile_only": True, **options})


def _compiler(folder: Path, name: str, sources: Sequence[Path], **options: Any) -> _Step:
    """Begin to compile or link files; return the process and the file that it makes."""
    isa = cpu_vec_isa.pick_vec_isa()
    chosen = cpp_builder.CppTorchDeviceOptions(**_OPTIONS, vec_isa=isa, extra_flags=("-lc10",), **options)
    builder = cpp_builder.CppBuilder(
        name=name, sources=[str(source) for source in sources], output_dir=str(folder), BuildOption=chosen
    )
    command = shlex.split(builder.get_command_line())
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return process, Path(builder.get_target_file_path())


def _finished(steps: Sequence[_Step]) -> list[Path]:
    """Wait for all; return the files that were made."""
    for process, _ in steps:
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(output)
    return [path for _, path in steps]


def _interface_object(shared: Path) -> Path:
    """Return the object file of the functions by which a library is called; build it where there is none."""
    code = _INTERFACE.read_text() + _NO_CONSTANTS
    built = shared / f"{key_of('interface', code)}.o"
    if not built.exists():
        with tempfile.TemporaryDirectory(prefix="rl8x-compile-") as name:
            _move(_finished([_compilation(Path(name), "interface", code, min_optimize=True)])[0], built)
    return built


def _move(made: Path, to: Path) -> None:
    """Put a file in its place, all of it at once, also where that is on another disk."""
    beside = to.with_name(f".{os.getpid()}{to.suffix}.part")
    shutil.move(made, beside)
    beside.replace(to)
