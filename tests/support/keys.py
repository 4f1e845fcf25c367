"""CURVE keys of engines that trust each other."""

from kvconnector.control.security import AUTHORIZED_CLIENTS_FILE, SECRET_KEY_FILE, generate_keys


def keyed_controls(folder, **trusts):
    """Make keys for engines, and control settings with which each engine trusts the ones named for it."""
    keys = {name: generate_keys(folder / name) for name in trusts}
    controls = {}
    for name, trusted in trusts.items():
        listed = folder / name / AUTHORIZED_CLIENTS_FILE
        listed.write_text("".join(f"{keys[other].public_key}\n" for other in trusted))
        secret = folder / name / SECRET_KEY_FILE
        controls[name] = {"secret_key_file": str(secret), "authorized_clients_file": str(listed)}
    return keys, controls


def variables_of(control):
    """Return the environment variables that set these control settings."""
    return {f"KVCONNECTOR_CONTROL_{name.upper()}": value for name, value in control.items()}
