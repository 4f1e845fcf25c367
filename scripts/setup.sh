# Set-up shared by scripts/demo, scripts/test and scripts/check. Source it, then call one of
#
#   setup_demo    what the examples run on
#   setup_test    setup_demo, and what the tests need
#   setup_check   setup_test, the linters, and what builds the documentation
#
# Each makes `.venv` in the checkout with the versions in constraints.txt, puts its `bin` first on PATH, and returns at once
# when nothing has changed since. All it needs is Python 3.11 or newer with pip; PYTHON names another interpreter.

KVC_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# scripts/vllm_setup.sh has other values of these.
KVC_VENV="$KVC_ROOT/.venv"
KVC_CONSTRAINTS="$KVC_ROOT/constraints.txt"
KVC_INPUTS="pyproject.toml constraints.txt scripts/setup.sh"
KVC_PYTHONS=">=3.11"

setup_demo() { _kvc_setup demo "ucx-cu12,examples"; }
setup_test() { _kvc_setup test "ucx-cu12,test"; }
setup_check() { _kvc_setup check "ucx-cu12,test,lint,docs"; }

_kvc_fits() {
  "$1" - "$KVC_PYTHONS" 2>/dev/null <<'PY'
import re, sys
for relation, major, minor in re.findall(r"(>=|<)(\d+)\.(\d+)", sys.argv[1]):
    if (sys.version_info >= (int(major), int(minor))) != (relation == ">="):
        sys.exit(1)
PY
}

_kvc_find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    _kvc_fits "$PYTHON" && echo "$PYTHON" && return
    echo "PYTHON=$PYTHON is not a Python $KVC_PYTHONS" >&2
    return 1
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
    _kvc_fits "$candidate" && echo "$candidate" && return
  done
  echo "no Python $KVC_PYTHONS found; set PYTHON to one" >&2
  return 1
}

# Changes whenever an installed environment could be out of date: its inputs, its interpreter, or the place of the checkout
# (an editable install names it).
_kvc_fingerprint() {
  "$KVC_VENV/bin/python" - "$1" "$KVC_ROOT" $KVC_INPUTS <<'PY' 2>/dev/null
import hashlib, pathlib, sys
profile, root, *inputs = sys.argv[1:]
digest = hashlib.sha256(f"{profile} {root} {sys.version}".encode())
for name in inputs:
    digest.update(pathlib.Path(root, name).read_bytes())
print(digest.hexdigest())
PY
}

_kvc_stamp() { _kvc_fingerprint "$1" >"$KVC_VENV/.kvconnector-$1"; }

_kvc_has_stamp() {
  local stamp="$KVC_VENV/.kvconnector-$1"
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(_kvc_fingerprint "$1")" ]
}

# A larger profile holds everything of a smaller one.
_kvc_is_ready() {
  local profile
  for profile in demo test check; do
    case "$1:$profile" in test:demo | check:demo | check:test) continue ;; esac
    _kvc_has_stamp "$profile" && return 0
  done
  return 1
}

_kvc_make_venv() {
  local python
  [ -z "${PYTHON:-}" ] && _kvc_fits "$KVC_VENV/bin/python" && return
  python="$(_kvc_find_python)" || return 1
  [ -x "$KVC_VENV/bin/python" ] && [ "$("$KVC_VENV/bin/python" -V 2>&1)" = "$("$python" -V 2>&1)" ] && return
  rm -rf "$KVC_VENV"
  # Some distributions ship Python without the part of venv that installs pip; any pip can install itself there.
  "$python" -m venv "$KVC_VENV" 2>/dev/null ||
    { rm -rf "$KVC_VENV" && "$python" -m venv --without-pip "$KVC_VENV" &&
      "$python" -m pip --python "$KVC_VENV/bin/python" install --quiet pip; }
}

_kvc_setup() {
  local profile="$1" extras="$2"
  _kvc_make_venv || return 1
  PATH="$KVC_VENV/bin:$PATH"
  export PATH
  if ! _kvc_is_ready "$profile"; then
    echo "installing the $profile environment into $KVC_VENV ..." >&2
    _kvc_install "$KVC_ROOT[$extras]" || return 1
    _kvc_stamp "$profile"
  fi
  _kvc_build
}

# Installs the checkout. The build back end comes first, so that its version is pinned too, and a C compiler if there is none.
_kvc_install() {
  local compiler
  compiler="$("$KVC_VENV/bin/python" "$KVC_ROOT/kernels/native/build.py" --requirements)"
  # shellcheck disable=SC2086 # options and packages, one word each
  _kvc_pip hatchling editables $compiler && _kvc_pip --no-build-isolation ${2:-} -e "$1"
}

# Compiles the C sources if they have changed since the checkout was installed.
_kvc_build() { "$KVC_VENV/bin/python" "$KVC_ROOT/kernels/native/build.py"; }

_kvc_pip() {
  "$KVC_VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$KVC_CONSTRAINTS" "$@"
}

# The tool with which tests/hosts makes hosts. If it is missing and cannot be installed, those tests are skipped and say so.
setup_hosts() {
  command -v ip >/dev/null && command -v tc >/dev/null && command -v nsenter >/dev/null && return
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
  apt-get update -qq && apt-get install -qq -y iproute2 util-linux hostname mount procps >/dev/null || true
}
