#!/usr/bin/env bash
# Installs what the tests of this folder start: Debian's packages (as root), and an environment for each Python client
# under .engines/, which sees .venv's own packages (torch) behind its own. What can't be installed is left out; its
# tests are skipped then.
set -uo pipefail
cd "$(dirname "$0")/../.."

python=.venv/bin/python
packages=(openmpi-bin slurm-wlm munge openssh-server openssh-client pdsh iproute2)
if command -v apt-get > /dev/null && [ "$(id -u)" = 0 ]; then
  missing=()
  for package in "${packages[@]}"; do
    dpkg -s "$package" > /dev/null 2>&1 || missing+=("$package")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
  fi
else
  echo "not root on Debian: install ${packages[*]} by hand to run their tests"
fi

environment() {
  local folder=.engines/$1
  shift
  [ -e "$folder/.installed" ] && return
  $python -m venv "$folder"
  # Sorted after the environment's own packages, so that those win.
  $python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_torch.pth"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@" && touch "$folder/.installed"
}

environment kubernetes kmock==0.8 "kubernetes>=37,<38"
environment kubernetes_schemas kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0 kubeflow-training==1.9.4
DS_BUILD_OPS=0 environment deepspeed --no-build-isolation deepspeed==0.19.8
environment ray "ray[train]==2.60.0"
moto="moto[server,sagemaker,s3,iam,sts,logs]>=5.2,<6"
environment sagemaker "sagemaker>=2.257,<3" "$moto"
environment sagemaker3 "sagemaker>=3.27,<4" "$moto"
