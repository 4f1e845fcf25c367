"""Integrations of serving engines through their own connector interfaces. Import the module of the engine."""
