"""The part of UCX's C interface that is used: constants, structs and signatures, the same from 1.18 to 1.23.

Every struct of UCX begins with a mask of the fields that are valid, and grows at its end. Those versions differ in
fields that are not used here. The compiled loop reads and writes two of them by offset (`kvconnector.datapath.pump`).
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

OK = 0
IN_PROGRESS = 1
ERR_IO_ERROR = -3
ERR_MESSAGE_TRUNCATED = -9
ERR_BUSY = -15
ERR_CANCELED = -16
ERR_LAST = -100

API_VERSION = (1, 18)
"""The version for `ucp_init_version`, which newer libraries accept."""

FEATURE_TAG, FEATURE_WAKEUP = 1 << 0, 1 << 4
COMPONENT_FIELD_NAME = 1 << 0
PARAM_FIELD_FEATURES = 1 << 0
WORKER_FIELD_THREAD_MODE = 1 << 0
THREAD_MODE_SERIALIZED = 1
OP_FIELD_FLAGS = 1 << 4
OP_FIELD_MEMORY_TYPE = 1 << 6
OP_FIELD_RECV_INFO = 1 << 7
CLOSE_FORCE = 1
EP_FIELD_REMOTE_ADDRESS = 1 << 0
EP_FIELD_ERR_MODE = 1 << 1
EP_FIELD_ERR_HANDLER = 1 << 2
EP_ATTR_TRANSPORTS = 1 << 3
ERR_MODE_NONE = 0
ERR_MODE_PEER = 1
MEMORY_TYPE_HOST = 0

Status = c_int8
"""`ucs_status_t` is a packed enumeration: one byte, the rest of the register is undefined."""

ErrorCallback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, Status)
"""`void (*)(void *arg, ucp_ep_h ep, ucs_status_t status)`."""


def c_struct(c_name: str, **fields: Any) -> Any:
    """Make a ctypes class of a C struct with these fields."""
    return type(c_name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_P, _SIZE, _U32, _U64 = c_void_p, c_size_t, c_uint32, c_uint64
_NAME = ctypes.c_char * 32  # UCP_ENTITY_NAME_MAX
_SOCKADDR = c_uint64 * 16  # struct sockaddr_storage

# `reserved` is room for fields that are not used, which UCX may read all the same
TagInfo = c_struct("ucp_tag_recv_info_t", sender_tag=_U64, length=_SIZE)
ContextParams = c_struct("ucp_params_t", field_mask=_U64, features=_U64, reserved=_U64 * 16)
WorkerParams = c_struct(
    "ucp_worker_params_t", field_mask=_U64, thread_mode=c_int, reserved=_U64 * 32
)
RequestParam = c_struct(
    "ucp_request_param_t",
    op_attr_mask=_U32,
    flags=_U32,
    request=_P,
    callback=_P,
    datatype=_U64,
    user_data=_P,
    reply_buffer=_P,
    memory_type=c_int,
    recv_info=_P,
    reserved=_P * 8,
)
EpParams = c_struct(
    "ucp_ep_params_t",
    field_mask=_U64,
    address=_P,
    err_mode=c_int,
    err_callback=_P,
    err_arg=_P,
    reserved=_P * 16,
)
TransportEntry = c_struct("ucp_transport_entry_t", transport_name=c_char_p, device_name=c_char_p)
EpAttr = c_struct(
    "ucp_ep_attr_t",
    field_mask=_U64,
    name=_NAME,
    local_sockaddr=_SOCKADDR,
    remote_sockaddr=_SOCKADDR,
    entries=POINTER(TransportEntry),
    num_entries=c_uint,
    entry_size=_SIZE,
    user_data=_P,
)
ComponentAttr = c_struct(
    "uct_component_attr_t", field_mask=_U64, name=ctypes.c_char * 16, reserved=_U64 * 8
)

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ucp_get_version": (None, _P, _P, _P),
    "ucs_status_string": (c_char_p, Status),
    "ucs_log_push_handler": (None, _P),
    "ucs_log_pop_handler": (None,),
    "uct_query_components": (Status, _P, _P),
    "uct_component_query": (Status, _P, _P),
    "uct_release_component_list": (None, _P),
    "ucp_config_read": (Status, _P, _P, _P),
    "ucp_config_modify": (Status, _P, c_char_p, c_char_p),
    "ucp_config_release": (None, _P),
    "ucp_init_version": (Status, c_uint, c_uint, _P, _P, _P),
    "ucp_context_print_info": (None, _P, _P),
    "ucp_cleanup": (None, _P),
    "ucp_worker_create": (Status, _P, _P, _P),
    "ucp_worker_destroy": (None, _P),
    "ucp_worker_get_address": (Status, _P, _P, _P),
    "ucp_worker_release_address": (None, _P, _P),
    "ucp_worker_progress": (c_uint, _P),
    "ucp_worker_arm": (Status, _P),
    "ucp_worker_signal": (Status, _P),
    "ucp_worker_get_efd": (Status, _P, _P),
    "ucp_ep_create": (Status, _P, _P, _P),
    "ucp_ep_close_nbx": (_P, _P, _P),
    "ucp_ep_flush_nbx": (_P, _P, _P),
    "ucp_ep_query": (Status, _P, _P),
    "ucp_tag_send_nbx": (_P, _P, _P, _SIZE, _U64, _P),
    "ucp_tag_recv_nbx": (_P, _P, _P, _SIZE, _U64, _U64, _P),
    "ucp_tag_probe_nb": (_P, _P, _U64, _U64, c_int, _P),
    "ucp_tag_msg_recv_nbx": (_P, _P, _P, _SIZE, _P, _P),
    "ucp_request_check_status": (Status, _P),
    "ucp_tag_recv_request_test": (Status, _P, _P),
    "ucp_request_cancel": (None, _P, _P),
    "ucp_request_free": (None, _P),
}
"""Result and arguments of every function that is called, by name."""


def declare(library: Any) -> None:
    """Give the functions of a loaded library their types. Raises AttributeError: it lacks one."""
    for name, (restype, *argtypes) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = restype, argtypes
