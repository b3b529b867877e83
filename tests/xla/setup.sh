#!/bin/sh
# .xla: a Python environment with torch_xla on the CPU, whose torch has stand-ins for the CUDA libraries (1 GB to
# download, 2.2 GB on disk). Needs gcc and readelf. Changes nothing when it is there already.
set -eu
cd "$(dirname "$0")/../.."
test -f .xla/.installed && exit 0
test -x .xla/bin/python || "${PYTHON:-python3}" -m venv .xla
pip() { .xla/bin/python -m pip --quiet --disable-pip-version-check "$@"; }
# Not with their dependencies: those are the CUDA libraries.
pip install --no-deps torch==2.9.0 torch_xla==2.9.0
pip install filelock typing_extensions "sympy>=1.13.3" networkx jinja2 fsspec numpy absl-py pyyaml requests setuptools \
  packaging safetensors psutil tqdm cloudpickle pytest pytest-timeout pytest-xdist hypothesis scikit-learn matplotlib
.xla/bin/python tests/xla/stub_cuda.py "$(.xla/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")"
touch .xla/.installed
