"""A plugin module whose driver library is missing."""

raise OSError("libvendor.so.2: cannot open shared object file")
