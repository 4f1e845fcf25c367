"""The choice of libucp for a process, and the offsets in its structs."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from kvconnector.errors import ConfigError, TransportError
from kvconnector.transport.ucx import abi, library, load_library
from tests.support.forked import run_python
from tests.support.headers import needs_compiler, numbers_of, offsets_of

pytestmark = pytest.mark.ucx


def in_a_new_process(program, **variables):
    """Return what a program prints in an interpreter that has loaded no UCX yet."""
    program = f"import os\nos.environ.pop('KVCONNECTOR_UCX_LIBRARY', '')\n{program}"
    return run_python("-c", program, **variables).strip()


LOAD = "from kvconnector.transport.ucx import load_library as load\n"


@pytest.fixture
def wheel():
    """Return the folder of the wheel's libraries."""
    pytest.importorskip("libucx")
    return library.SOURCES["wheel"]().parent


def test_a_source_is_a_name_that_is_known_or_a_path():
    with pytest.raises(ConfigError, match=r"named='mofed', known=\['auto', 'wheel', 'nixl'\]"):
        load_library("mofed")
    with pytest.raises(TransportError, match="no-such-file"):
        library.UcxLibrary("path", Path("/no-such-file/libucp.so"))


def test_loading_leaves_the_environment_alone():
    in_a_new_process(f"before = dict(os.environ)\n{LOAD}load()\nassert dict(os.environ) == before")


@pytest.fixture
def too_old(tmp_path):
    """A folder with a libucp of an unknown version."""
    source = tmp_path / "old.c"
    source.write_text(
        "void ucp_get_version(unsigned *a, unsigned *b, unsigned *c) { *a = 1; *b = 13; *c = 1; }"
    )
    output = tmp_path / "libucp.so.0"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libucp.so.0", "-o", output, source], check=True
    )
    return tmp_path


@needs_compiler
def test_an_unknown_version_is_refused_by_name(too_old):
    program = (
        f"{LOAD}"
        "from kvconnector.errors import TransportError\n"
        "try:\n"
        f"    load('{too_old}/libucp.so.0')\n"
        "except TransportError as error:\n"
        "    print(error.statement)"
    )
    refusal = in_a_new_process(program)
    assert str(too_old) in refusal
    assert "cannot be used" in refusal or "not supported: kvconnector calls libucp" in refusal


def test_a_library_that_ucxx_has_loaded_is_shared():
    if importlib.util.find_spec("ucxx") is None:  # this process has a UCX
        pytest.skip("ucxx is not installed")
    if load_library().version < (1, 19):
        pytest.skip("ucxx refuses UCX 1.18")
    mapped = "sorted({line.split()[-1] for line in open('/proc/self/maps') if '/libucp' in line})"
    module = "ucxx._lib.libucxx"
    for first in (f"import {module}; load()", f"load(); import {module}"):
        paths = in_a_new_process(f"{LOAD}{first}\nprint(load().path, *{mapped})").split()
        assert len(set(paths)) == 1, first


def test_a_second_ucx_is_refused(wheel, tmp_path):
    for file in wheel.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    other = tmp_path / "libucp.so.0"
    for first in ("load('wheel')", f"import ctypes; ctypes.CDLL('{wheel}/libucp.so.0')"):
        words = in_a_new_process(
            f"{LOAD}{first}\n"
            "from kvconnector.errors import TransportError\n"
            "try:\n"
            f"    load('{other}')\n"
            "except TransportError as error:\n"
            "    print(error.statement)"
        )
        assert "loaded another" in words
        assert str(other) in words


def test_a_package_whose_layout_has_changed_says_so(tmp_path, monkeypatch):
    (tmp_path / "nixl_cu13").mkdir()
    (tmp_path / "nixl_cu13/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TransportError, match=r"layout may have changed.*libucp-\*\.so"):
        library.SOURCES["nixl"]()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes sources with these names, of which some have transports for RDMA."""

    def install(**has_rdma):
        for source, is_capable in has_rdma.items():
            folder = tmp_path / source / "ucx"
            folder.mkdir(parents=True)
            if is_capable:
                (folder / "libuct_ib.so.0").touch()
        found = {
            source: lambda source=source: tmp_path / source / "libucp.so" for source in has_rdma
        }
        monkeypatch.setattr(library, "SOURCES", found)

    return install


@pytest.mark.parametrize(
    "ports, order",
    [([], ["wheel", "nixl"]), (["mlx5_0:1"], ["nixl", "wheel"])],
)
def test_with_rdma_libraries_that_can_use_it_come_first(installed, ports, order):
    installed(wheel=False, nixl=True)
    assert library.automatic_order(ports) == order


@pytest.mark.parametrize(
    "drivers, first", [({"mlx5_core"}, "nixl"), ({"mlx5_core", "efa"}, "nixl"), ({"efa"}, "wheel")]
)
def test_nixls_libibverbs_knows_one_vendors_ports(installed, monkeypatch, drivers, first):
    installed(wheel=False, nixl=True)
    (library.SOURCES["nixl"]().parent / "libibverbs-1de1263b.so.1").touch()
    monkeypatch.setattr(library, "active_drivers", lambda: drivers)
    assert library.automatic_order(["ibp24s0:1"])[0] == first


def test_nixls_library_without_transports_for_rdma_is_no_better_than_the_wheel(installed):
    installed(wheel=False, nixl=False)
    assert library.automatic_order(["mlx5_0:1"]) == ["wheel", "nixl"]


@needs_compiler
@pytest.mark.parametrize(
    "nixl, source, words",
    [("whole", "nixl", ""), ("other", "wheel", 'pip install "kvconnector[rdma]"')],
)
def test_auto_takes_nixls_where_ports_are_active_and_warns_without(
    wheel, too_old, nixl, source, words
):
    """NIXL's library is made from the wheel's, with a name of its own and a module for RDMA."""
    package = too_old / "nixl_cu13"
    libraries = too_old / "nixl_cu13.libs"
    (libraries / "ucx").mkdir(parents=True)
    package.mkdir()
    (package / "__init__.py").touch()
    (libraries / "ucx/libuct_ib.so.0").touch()
    if nixl == "whole":
        for file in wheel.glob("*.so.0"):
            shutil.copy(file, libraries)
        (libraries / "libucp.so.0").rename(libraries / "libucp-0123.so.0")
    program = (
        "import logging, sys\n"
        f"sys.path.insert(0, {str(too_old)!r})\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "from kvconnector.transport.ucx import library\n"
        "library.active_rdma_ports = lambda: {'mlx5_0:1': None}\n"
        "print(library.load_library().source)"
    )
    *log, taken = in_a_new_process(program).splitlines()
    assert taken == source
    assert words in "".join(log)
    assert bool(log) == bool(words)
    if words:  # the reasons for not using the others
        assert "wheel: " in log[0]
        assert "layout may have changed" in log[0]


def test_the_log_names_it_once():
    *log, path = in_a_new_process(
        f"import logging, sys\nlogging.basicConfig(stream=sys.stdout, level=20)\n{LOAD}load()\nprint(load().path)"
    ).splitlines()
    (record,) = [line for line in log if library.__name__ in line]
    assert path in record
    assert "UCX 1." in record
    assert "tcp" in record


LOSE_A_PEER = """
from kvconnector.errors import TransportError
from kvconnector.transport.ucx import open_ucx_transport
from tests.support.transport_suite import HostMemory

a, b = (open_ucx_transport(options={"TLS": "tcp", "RNDV_THRESH": "64k"}) for _ in range(2))
try:
    endpoint = a.connect(b.address)
except TransportError as error:
    print(error)
else:
    # it waits for its receive, or for the connection
    a.send(endpoint, 1, HostMemory(1 << 20).buffer)
    b.close()
    print("done")
a.close()
"""


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("UCX_RCACHE_ENABLE", "n", "done"),
        ("UCX_MEM_EVENTS", "n", "unset UCX_MEM_EVENTS"),
        ("UCX_MEM_MMAP_HOOK_MODE", "none", "unset UCX_MEM_EVENTS"),
    ],
)
def test_a_lost_peer_does_not_crash_a_ucx_without_its_cache(name, value, words):
    """UCX before 1.22 asks the cache about what the peer has not taken, whether there is one or not."""
    said = in_a_new_process(LOSE_A_PEER, **{name: value})
    if load_library().version < (1, 22):
        assert words in said
    else:
        assert said.endswith("done")


def test_a_ucx_without_its_cache_reaches_processes_of_its_host():
    program = LOSE_A_PEER.replace('options={"TLS": "tcp", "RNDV_THRESH": "64k"}', "")
    assert in_a_new_process(program, UCX_MEM_EVENTS="n").splitlines()[-1] == "done"


def as_named(fields):
    return {field: field for field in fields.split()}


STRUCTS = {
    "ucp_params_t": (abi.ContextParams, as_named("field_mask features")),
    "ucp_worker_params_t": (abi.WorkerParams, as_named("field_mask thread_mode")),
    "ucp_request_param_t": (
        abi.RequestParam,
        as_named("op_attr_mask flags request datatype user_data reply_buffer memory_type recv_info")
        | {"cb": "callback"},
    ),
    "ucp_ep_params_t": (
        abi.EpParams,
        as_named("field_mask address err_mode")
        | {"err_handler.cb": "err_callback", "err_handler.arg": "err_arg"},
    ),
    "ucp_ep_attr_t": (
        abi.EpAttr,
        as_named("field_mask name local_sockaddr remote_sockaddr user_data")
        | {f"transports.{name}": name for name in ("entries", "num_entries", "entry_size")},
    ),
    "ucp_tag_recv_info_t": (abi.TagInfo, as_named("sender_tag length")),
    "ucp_transport_entry_t": (abi.TransportEntry, as_named("transport_name device_name")),
    "uct_component_attr_t": (abi.ComponentAttr, as_named("field_mask name")),
}
CONSTANTS = {
    "UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP": abi.FEATURE_TAG | abi.FEATURE_WAKEUP,
    "UCP_PARAM_FIELD_FEATURES": abi.PARAM_FIELD_FEATURES,
    "UCP_WORKER_PARAM_FIELD_THREAD_MODE": abi.WORKER_FIELD_THREAD_MODE,
    "UCS_THREAD_MODE_SERIALIZED": abi.THREAD_MODE_SERIALIZED,
    "UCP_OP_ATTR_FIELD_FLAGS": abi.OP_FIELD_FLAGS,
    "UCP_OP_ATTR_FIELD_MEMORY_TYPE": abi.OP_FIELD_MEMORY_TYPE,
    "UCP_OP_ATTR_FIELD_RECV_INFO": abi.OP_FIELD_RECV_INFO,
    "UCP_EP_CLOSE_FLAG_FORCE": abi.CLOSE_FORCE,
    "UCP_EP_PARAM_FIELD_REMOTE_ADDRESS": abi.EP_FIELD_REMOTE_ADDRESS,
    "UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE": abi.EP_FIELD_ERR_MODE,
    "UCP_EP_PARAM_FIELD_ERR_HANDLER": abi.EP_FIELD_ERR_HANDLER,
    "UCP_EP_ATTR_FIELD_TRANSPORTS": abi.EP_ATTR_TRANSPORTS,
    "UCP_ERR_HANDLING_MODE_PEER": abi.ERR_MODE_PEER,
    "UCS_MEMORY_TYPE_HOST": abi.MEMORY_TYPE_HOST,
    "UCT_COMPONENT_ATTR_FIELD_NAME": abi.COMPONENT_FIELD_NAME,
    "UCS_INPROGRESS": abi.IN_PROGRESS,
    "UCS_ERR_MESSAGE_TRUNCATED": abi.ERR_MESSAGE_TRUNCATED,
    "UCS_ERR_BUSY": abi.ERR_BUSY,
    "UCS_ERR_CANCELED": abi.ERR_CANCELED,
    "UCS_ERR_IO_ERROR": abi.ERR_IO_ERROR,
    "UCS_ERR_LAST": abi.ERR_LAST,
    "sizeof(ucs_status_t)": ctypes.sizeof(abi.Status),
    "sizeof(ucp_tag_recv_info_t)": ctypes.sizeof(abi.TagInfo),
    "sizeof(ucp_transport_entry_t)": ctypes.sizeof(abi.TransportEntry),
}


@needs_compiler
def test_structs_and_constants_are_those_of_the_headers(wheel, tmp_path):
    headers = wheel.parent / "include"
    if not headers.is_dir():
        pytest.skip("the wheel has no headers")
    ours = offsets_of(STRUCTS) | CONSTANTS
    sizes = {f"sizeof({name})": kind for name, (kind, _) in STRUCTS.items()}
    places = ("ucp/api/ucp.h", "uct/api/uct.h")
    found = numbers_of([*ours, *sizes], places, tmp_path, [headers])
    assert {each: found[each] for each in ours} == ours
    for size, kind in sizes.items():
        assert ctypes.sizeof(kind) >= found[size], kind  # UCX may read what its mask does not name
