"""A plugin module that needs what is not there."""

raise ImportError("No module named 'vendor_sdk'", name="vendor_sdk")
