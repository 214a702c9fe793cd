"""Which tritons the kernels in Gluon are for; other versions of it are pretended."""

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton isn't installed", allow_module_level=True)

import triton

from kernel_launches import fresh
from pico_vllm.kernels import gluon_compat


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1234"])
def test_with_the_gluon_of_another_triton_it_cannot_be_imported(monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(ImportError, match=rf"triton 3.6 to 3.9.*{version.partition('+')[0]}"):
        fresh(gluon_compat)


@pytest.mark.parametrize(("version", "beyond"), [("3.6.0", True), ("3.7.1", True), ("3.8.0", False), ("3.9.0", False)])
def test_views_reach_beyond_others_up_to_3_7(monkeypatch, version, beyond):
    monkeypatch.setattr(triton, "__version__", version)
    assert fresh(gluon_compat).REINTERPRETS_BEYOND is beyond
