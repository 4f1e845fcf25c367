"""Serving engines that use kvconnector through their own connector interface. Import one by its module."""
