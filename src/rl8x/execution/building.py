"""Builds C++ source into shared libraries, with the compiler and the options that torch chooses.

Torch's headers take three fifths of a build. `vectors.h`, `kernels.h` and declarations of those of torch's C functions
that a program calls replace them; a program that needs more is built with torch's headers.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

import torch

from rl8x.execution import private

HOST: Final = Path(__file__).parent / "host.h"
PRODUCTS: Final = Path(__file__).parent / "products.h"
_OWN_HEADERS: Final = tuple(Path(__file__).parent / name for name in ("vectors.h", "kernels.h"))

# -O2 builds in five seconds where -O3 takes six. The programs are as fast, since Inductor emits explicit vector code.
# Without `-w` a tenth of a second goes to warnings that nobody sees, and with its usual limit GCC spends 4% of a first
# iteration on collecting garbage; in kB.
_OPTIONS: Final = ("-fvisibility=hidden", "-O2", "-g0", "-w", "--param=ggc-min-heapsize=1000000")
# The standard library is a third shorter in this version, which is too old for torch's headers.
_WITHOUT_TORCH: Final = "-std=c++17"
_TORCH: Final = "torch/csrc/inductor/"
_SHIMS: Final = tuple(
    f"{_TORCH}aoti_torch/{name}.h" for name in ("c/shim", "c/shim_cpu", "generated/c_shim_aten", "generated/c_shim_cpu")
)
# In those: a comment, and the declaration of a C function.
_COMMENT: Final = re.compile(r"//.*")
_DECLARATION: Final = re.compile(r"^AOTI_TORCH_EXPORT\s+(\w+\s+(aoti_torch_\w+)\([^;]*\);)", re.M)
_CONSTANT: Final = re.compile(r"\bCACHE_TORCH_(\w+)\((\w+)\)")
_TYPES: Final = """
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using AOTITorchError = int32_t;
constexpr AOTITorchError AOTI_TORCH_SUCCESS = 0;
"""
# Prefix of the temporary folders of builds, and the age in seconds after which they count as abandoned.
_BUILD: Final = "rl8x-compile-"
_LONG_AGO_S: Final = 600.0


def build(source: str, library: Path) -> None:
    """Compile a program to a shared library.

    Args:
        source: Its C++, without the headers of its kernels and of torch's C functions.
        library: Path of the library to write.

    Raises:
        RuntimeError: If compilation fails; the message begins with the compiler's first error.
    """
    with tempfile.TemporaryDirectory(prefix=_BUILD) as name:
        errors, built = _run(_own_headers(source) + source, Path(name), _WITHOUT_TORCH)
        if errors:
            errors, built = _run(_torchs_headers() + source, Path(name))
        if errors:
            raise RuntimeError(errors)
        # The library appears in one rename, even if the temporary folder is on another disk.
        beside = library.with_name(f"{library.name}.part")
        shutil.move(built, beside)
        beside.replace(library)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of builds that were killed, as happens when a run ends during a build.

    Args:
        folder: The cache folder; names of unfinished files in it begin with a dot.
    """
    since = time.time() - _LONG_AGO_S
    for left in (*folder.glob(".*"), *Path(tempfile.gettempdir()).glob(f"{_BUILD}*")):
        with contextlib.suppress(OSError):  # another process has removed it, or another user owns it
            if left.stat().st_mtime >= since:
                continue
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()


def _torchs_headers() -> str:
    return "".join(f"#include <{path}>\n" for path in (f"{_TORCH}cpp_prefix.h", *_SHIMS))


def _own_headers(source: str) -> str:
    """Return the text of our headers, and the declarations of torch's C functions that a program names."""
    names = {*re.findall(r"\baoti_torch_\w+", source)}
    names |= {
        f"aoti_torch_{'device_type' if kind == 'DEVICE' else kind.lower()}_{name}"
        for kind, name in _CONSTANT.findall(source)
    }
    declarations = [f'extern "C" {text}' for name, text in _functions().items() if name in names]
    return "\n".join([*[path.read_text() for path in _OWN_HEADERS], _TYPES, *declarations, ""])


@functools.cache
def _functions() -> dict[str, str]:
    """Return the declarations of torch's C functions by name."""
    paths = [Path(torch.__file__).parent / "include" / path for path in _SHIMS]
    texts = [_COMMENT.sub("", path.read_text()) for path in paths if path.exists()]
    return {name: text for each in texts for text, name in _DECLARATION.findall(each)}


def _run(source: str, folder: Path, *options: str) -> tuple[str, Path]:
    """Run the C++ compiler; return its output if it failed, beginning with the first error, and the result's path."""
    written = folder / "program.cpp"
    written.write_text(source)
    inductor = private.inductor()
    settings = inductor.CppTorchDeviceOptions(
        device_type="cpu", aot_mode=True, vec_isa=inductor.pick_vec_isa(), extra_flags=(*_OPTIONS, *options)
    )
    builder = inductor.CppBuilder("program", [str(written)], settings, str(folder))
    done = subprocess.run(
        shlex.split(builder.get_command_line()),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,  # where it looks for headers and libraries too, for an empty entry of CPATH or LIBRARY_PATH
    )
    if not done.returncode:
        return "", Path(builder.get_target_file_path())
    errors = [line for line in done.stdout.splitlines() if "error" in line]  # after where it was included
    return "\n".join([*errors[:1], done.stdout]), written
