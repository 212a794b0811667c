"""C++ is built with rl8x's own headers of kernels, or with torch's where those lack a name."""

import ctypes
import os
import shutil

import pytest
import torch
from tests.probes import described

from rl8x.execution import building, private
from rl8x.execution.building import build, remove_unfinished
from rl8x.execution.compiler import load
from rl8x.execution.lowering import lower

SOURCE = """
extern "C" __attribute__((visibility("default"))) int answer() {{
  return {answer} + at::vec::Vectorized<float>::size() * 0;
}}
"""


@pytest.fixture
def builds(monkeypatch):
    """The options of each run of the C++ compiler."""
    if str(private.inductor().pick_vec_isa()) not in ("avx2", "avx512"):
        pytest.skip("all programs are built with torch's headers on this processor")
    run, builds = building._run, []
    monkeypatch.setattr(building, "_run", lambda *given: builds.append(given[2:]) or run(*given))
    return builds


def answer(source, folder):
    build(source, folder / "answer.so")
    return ctypes.CDLL(str(folder / "answer.so")).answer()


def test_a_kernel_is_built_without_the_headers_of_torch(builds, tmp_path):
    source = "#ifdef AOTI_TORCH_SHIM\n#error torch's headers\n#endif" + SOURCE.format(answer=42)
    assert answer(source, tmp_path) == 42
    assert builds == [("-std=c++17",)]


def test_a_kernel_that_needs_another_name_is_built_with_torchs_headers(builds, tmp_path):
    assert answer(SOURCE.format(answer="int(calc_erfinv(0.0f)) + 41"), tmp_path) == 41
    assert builds == [("-std=c++17",), ()]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_a_program_of_a_loss_and_its_gradient_is_built_without_the_headers_of_torch(builds, tmp_path, precision):
    """What an update is made of: products, an activation, exponentials, sums, clipping, comparisons, rows by index."""

    def update(x, weight, rows):
        hidden = torch.relu(x[rows].to(precision) @ weight.to(precision)).float()
        ratio = (hidden.tanh() - hidden.log_softmax(-1)).exp()
        loss = torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
        norm = (hidden * hidden).sum().sqrt()
        return [loss, torch.where(hidden > norm, ratio, hidden) / (norm + 1e-5), x.argmax(-1), hidden.max()]

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 24, generator=generator), 0.1 * torch.randn(24, 70, generator=generator)
    arguments = (x, weight, torch.arange(33))
    description, read = described(update, *arguments)
    lower(description, tmp_path / "update.so")
    assert builds == [("-std=c++17",)]
    for mine, expected in zip(load(tmp_path / "update.so")(*arguments, *read), update(*arguments), strict=True):
        torch.testing.assert_close(mine, expected, atol=2e-2 if precision == torch.bfloat16 else 1e-4, rtol=2e-2)


def test_the_functions_of_torch_that_a_program_names_are_declared(tmp_path, builds):
    """As a call, or as a constant that is read once."""
    named = "aoti_torch_dtype_element_size(cached_torch_dtype_float64)"
    cached = "#define CACHE_TORCH_DTYPE(name) static const int cached_torch_dtype_##name = aoti_torch_dtype_##name()\n"
    source = f"{cached}CACHE_TORCH_DTYPE(float64);\n{SOURCE.format(answer=named)}"
    assert answer(source, tmp_path) == 8
    assert builds == [("-std=c++17",)]


def test_an_error_is_that_of_the_source_and_names_it_first(tmp_path):
    with pytest.raises(RuntimeError, match=r"^[^\n]*error: [^\n]*no_such_name"):
        build(SOURCE.format(answer="no_such_name"), tmp_path / "answer.so")
    assert not [*tmp_path.iterdir()]


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path, monkeypatch):
    folder, temporary = tmp_path / "programs", tmp_path / "temporary"
    monkeypatch.setattr(building.tempfile, "gettempdir", lambda: str(temporary))
    for place, name in ((folder, ".part"), (folder, ".key.lock"), (temporary, "rl8x-compile"), (temporary, "other")):
        for age, which in ((3600, "old"), (1, "new")):
            left = place / f"{name}-{which}"
            left.mkdir(parents=True)
            (left / "program.cpp").touch()
            if name.endswith("lock"):
                shutil.rmtree(left)
                left.touch()
            when = left.stat().st_mtime - age
            os.utime(left, (when, when))
    remove_unfinished(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".key.lock-new", ".part-new"]
    assert sorted(path.name for path in temporary.iterdir()) == ["other-new", "other-old", "rl8x-compile-new"]
