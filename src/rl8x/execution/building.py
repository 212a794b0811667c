"""Builds C++ into shared libraries, by the C++ compiler that torch finds and with the options that it chooses.

Half of what a program takes to build is reading the headers that all programs include: they are precompiled, once for
each version of torch, into the folder of the programs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from rl8x.execution import private
from rl8x.execution.artifacts import Artifacts, key_of

HOST: Final = Path(__file__).parent / "host.h"
PRODUCTS: Final = Path(__file__).parent / "products.h"

# Against -O3, -O2 takes a second less of six; the programs are as fast, since Inductor has written the vectors out.
_OPTIONS: Final = ("-fvisibility=hidden", "-O2", "-g0")
# What Inductor's kernels include.
_PREFIX: Final = "#include <torch/csrc/inductor/cpp_prefix.h>"
# The size of what is precompiled, in MB: not kept in a folder whose limit it would fill.
_HEADERS_MB: Final = 150
# Folders in which programs are being built and headers precompiled, and the age in seconds at which no one is at it any
# more.
_BUILD: Final = "rl8x-compile-"
_PRECOMPILATION: Final = ".headers-"
_LONG_AGO_S: Final = 600.0


def build(source: str, library: Path) -> None:
    """Compile C++ source that uses torch's headers to a shared library.

    Args:
        source: The source.
        library: Where the library is written, in the folder in which there may be precompiled headers.

    Raises:
        RuntimeError: If the compiler refuses it; the first line is its first error.
    """
    headers = Headers(library.parent)
    with tempfile.TemporaryDirectory(prefix=_BUILD) as name:
        written = Path(name) / "program.cpp"
        written.write_text(source)
        precompiled = headers.find()
        errors, built = _run(written, Path(name), precompiled)
        if errors and precompiled is not None:
            errors, built = _run(written, Path(name), None)
            if not errors:
                headers.remove()  # which are damaged
        if errors:
            raise RuntimeError(errors)
        # All of it at once, also where the temporary folder is on another disk.
        beside = library.with_name(f"{library.name}.part")
        shutil.move(built, beside)
        beside.replace(library)


def remove_unfinished(folder: Path) -> None:
    """Remove what builds left that were killed in the middle, as those are of a run that ends.

    Args:
        folder: Where the programs are; all that is unfinished in it has a name that begins with a dot.
    """
    since = time.time() - _LONG_AGO_S
    for left in (*folder.glob(".*"), *Path(tempfile.gettempdir()).glob(f"{_BUILD}*")):
        with contextlib.suppress(OSError):  # another process removes it, or it is another user's
            if left.stat().st_mtime >= since:
                continue
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()


class Headers:
    """The headers that all programs include, precompiled.

    Args:
        folder: Where the programs are.
    """

    def __init__(self, folder: Path) -> None:
        includes = re.findall(r"^#include .*", HOST.read_text(), re.M)
        self.text = "\n".join([_PREFIX, *includes, ""])
        self.key = key_of("headers", self.text)
        self._artifacts = Artifacts(folder)

    def find(self) -> Path | None:
        """Return what a source includes for them; None where they are not precompiled."""
        precompiled = self._artifacts.headers(self.key)
        if precompiled is None:
            return None
        with contextlib.suppress(OSError):  # another process has just removed it
            os.utime(precompiled)  # what has not been used for longest is removed first
        return precompiled.with_suffix("")

    def precompile(self) -> None:
        """Precompile them, unless they are or the folder is for less; whoever finds none builds without."""
        folder = self._artifacts.folder
        if self._artifacts.find(self.key) is not None or self._artifacts.limit_mb < 2 * _HEADERS_MB:
            return
        with tempfile.TemporaryDirectory(prefix=_PRECOMPILATION, dir=folder) as name:
            beside = Path(name) / f"{self.key}.h"
            beside.write_text(self.text)
            errors, built = _run(beside, Path(name), None, precompiling=True)
            if not errors:
                self._artifacts.put_headers(beside, built)

    def remove(self) -> None:
        """Remove them."""
        self._artifacts.remove(self.key)


def _run(source: Path, folder: Path, headers: Path | None, **options: Any) -> tuple[str, Path]:
    """Run the C++ compiler; return what it has against a source, its first error first, and where the result is."""
    inductor = private.inductor()
    settings = inductor.CppTorchDeviceOptions(
        device_type="cpu", aot_mode=True, vec_isa=inductor.pick_vec_isa(), extra_flags=_OPTIONS, **options
    )
    settings.precompiled_header = headers
    builder = inductor.CppBuilder(source.name if options else "program", [str(source)], settings, str(folder))
    command = shlex.split(builder.get_command_line())
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if not done.returncode:
        return "", Path(builder.get_target_file_path())
    errors = [line for line in done.stdout.splitlines() if "error" in line]  # warnings come before
    return "\n".join([*errors[:1], done.stdout]), source
