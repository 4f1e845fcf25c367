# Set-up for scripts/test_sglang and the SGLang example. Source it, then call one of
#
#   setup_sglang   SGLang on the CPU and kvconnector
#   setup_peers    setup_sglang, and NIXL and Mooncake, for comparisons
#   setup_release VERSION   after setup_sglang: another release of SGLang, whole, first on PYTHONPATH; what it needs stays that of
#                           the release in the list
#   setup_sources VERSION   the tests' own environment, and SGLang's Python sources in $SGLANG_SOURCES: seconds, 50 MB
#   known_versions          the releases of SGLang that the backend knows, for setup_sources
#
# The first two make `.venv-sglang` in the checkout with the versions in requirements-sglang.txt, put its `bin` first on PATH, and
# return at once when nothing has changed since. PYTHON names the interpreter, 3.11.
#
# SGLang has a CPU engine, but no release of it for the CPU. Two things stand in for what is missing:
# - `sgl_kernel`, its compiled kernels: SGLang imports their names everywhere and, with torch's own attention and without
#   AMX, calls none of them. The package made here has every name; calling one raises.
# - torchvision registers its C++ operators with torch at import, and the ones in its release are built for CUDA: the file
#   that does so is emptied. SGLang needs torchvision's Python code only.

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
KVC_VENV="$KVC_ROOT/.venv-sglang"
KVC_CONSTRAINTS="$KVC_ROOT/requirements-sglang.txt"
KVC_INPUTS="requirements-sglang.txt scripts/setup.sh scripts/sglang_setup.sh"
KVC_PYTHONS=">=3.11,<3.12"

setup_sglang() {
  _kvc_make_venv || return 1
  PATH="$KVC_VENV/bin:$PATH"
  export PATH
  _kvc_has_stamp sglang && _kvc_build && return
  echo "installing SGLang for the CPU into $KVC_VENV (about 3 GB) ..." >&2
  # torch's own requirements depend on its build; everything else is in the list.
  _kvc_pip torch &&
    _kvc_pip --no-deps -r "$KVC_CONSTRAINTS" &&
    _kvc_install "$KVC_ROOT" --no-deps &&
    _kvc_stand_in && _kvc_build && _kvc_stamp sglang && return
  echo "the environment of scripts/test_sglang could not be made; what failed is above" >&2
  return 1
}

setup_peers() {
  setup_sglang || return 1
  # Mooncake looks for libibverbs, also for TCP; NIXL brings one, under another name
  local nixl="$KVC_VENV/lib/python3.11/site-packages/nixl_cu12.libs" links="$KVC_VENV/lib/peers"
  export LD_LIBRARY_PATH="$links:$nixl${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" MC_FORCE_TCP=1 MOONCAKE_PROTOCOL=tcp
  _kvc_has_stamp peers && return
  _kvc_pip --no-deps nixl==1.5.1 nixl-cu12==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1 &&
    mkdir -p "$links" && ln -sf "$nixl"/libibverbs-*.so.1* "$links/libibverbs.so.1" && _kvc_stamp peers
}

setup_release() {
  local folder="$KVC_VENV/sglang-$1"
  [ -d "$folder" ] || {
    rm -rf "$folder.part"
    python -m pip install -q --no-deps --no-compile --only-binary=:all: --target "$folder.part" "sglang==$1" && mv "$folder.part" "$folder" || return 1
  }
  export PYTHONPATH="$folder:$PYTHONPATH"
}

known_versions() { sed -n 's/^KNOWN_VERSIONS = (\(.*\))$/\1/p' "$KVC_ROOT/kvconnector/integrations/sglang/shared.py" | tr -d '",'; }

setup_sources() {
  local sglang="sglang==$1" dill
  dill="$(grep ^dill== "$KVC_ROOT/requirements-sglang.txt")"
  source "$KVC_ROOT/scripts/setup.sh"
  setup_test || return 1
  export SGLANG_SOURCES="$KVC_VENV/${sglang/==/-}"
  [ -d "$SGLANG_SOURCES" ] && return
  local wheels="$KVC_VENV/wheels"
  # whichever wheel there is: its compiled parts stay unused
  python -m pip download -q --no-deps --only-binary=:all: --python-version 3.11 -d "$wheels" "$sglang" &&
    python -m pip install -q --no-deps --target "$SGLANG_SOURCES.part" "$dill" &&
    python - "$wheels" "$SGLANG_SOURCES.part" <<'PY' && mv "$SGLANG_SOURCES.part" "$SGLANG_SOURCES" && rm -r "$wheels"
import pathlib, re, sys, zipfile
(wheel,), folder = pathlib.Path(sys.argv[1]).glob("sglang-*.whl"), pathlib.Path(sys.argv[2])
with zipfile.ZipFile(wheel) as archive:
    wanted = re.compile(r"sglang/(srt|kernels)/.*\.py|sglang/[^/]*\.py|[^/]*/METADATA")
    archive.extractall(folder, filter(wanted.fullmatch, archive.namelist()))
# SGLang looks for these folders of kernels' sources at import
for name in ("include", "csrc"):
    (folder / "sglang/kernels/jit" / name).mkdir(exist_ok=True)
PY
}

_kvc_stand_in() {
  local packages
  packages="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || return 1
  : >"$packages/torchvision/_meta_registrations.py"
  mkdir -p "$packages/sgl_kernel"
  cat >"$packages/sgl_kernel/__init__.py" <<'PY'
"""Stands in for SGLang's compiled kernels: every name can be imported, and raises when it is called."""

import importlib.machinery
import sys


class Missing:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return _missing(self._name, name)

    def __call__(self, *arguments, **options):
        raise NotImplementedError(f"{self._name} has no build for the CPU")


class Finder:
    """Finds every submodule, of any depth."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = lambda name: _missing(module.__name__, name)


def _missing(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{owner}.{name}")


def __getattr__(name):
    return _missing(__name__, name)


sys.meta_path.append(Finder())
PY
}
