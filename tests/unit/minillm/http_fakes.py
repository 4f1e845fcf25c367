"""Servers that answer completions, and the answers of a prefill engine that streams."""

from aiohttp import web


def app_of(handler):
    """Return a server that answers completions."""
    application = web.Application()
    application.add_routes([web.post("/v1/completions", handler)])
    return application


def streamed_offer(asked, port=1):
    """Return a prefill engine's params for a transfer that the router has named."""
    names = f"{asked['transfer_id']}|{asked['transfer_secret']}|key"
    address = {"remote_engine_id": "p", "remote_host": "h", "remote_port": port}
    return {"remote_request_id": names, **address}
