"""One of two plugins with the same entry-point name; importing either is a mistake."""

raise AssertionError("a plugin in conflict was imported")
